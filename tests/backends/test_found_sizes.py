"""Kernels with data-dependent result sizes: nonzero and non-maximum suppression."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.pipeline import compile_graph

Array = np.ndarray[Any, Any]


def check(graph: Any, *feeds: dict[str, Array], threads: int) -> Any:
    executable = compile_graph(graph, threads=threads)
    assert not list(executable.engine.fallbacks)  # type: ignore[attr-defined]
    for given in feeds:
        (found,), (want,) = executable.run(given).values(), run(graph, given).values()
        assert found.dtype == want.dtype and found.shape == want.shape
        assert (found == want).all()
    return executable


@pytest.mark.parametrize("element", ["f32", "f16", "bool", "i64", "u8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_nonzero(element: str, threads: int) -> None:
    b = Builder("nonzero")
    x = b.input("x", f"{element}[a, b, c]")
    graph = b.build(y=b.add(b.nonzero(x), 1))
    rng = np.random.default_rng(0)
    shapes = [(1, 1, 1), (3, 1, 7), (0, 4, 2), (5, 33, 127), (2, 4096, 1), (3, 64, 64)]
    feeds = [{"x": (rng.random(shape) < 0.3).astype(x.dtype.numpy)} for shape in shapes] + [
        {"x": np.zeros((2, 3, 4), x.dtype.numpy)}
    ]
    check(graph, *feeds, threads=threads)
    if element == "f32":
        odd = np.array([[[np.nan, -0.0, 0.0, np.inf, -1e-45]]], np.float32)
        check(graph, {"x": odd}, threads=threads)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_suppression(centred: bool, threads: int) -> None:
    b = Builder("nms")
    boxes, scores = b.input("boxes", "f32[B, N, 4]"), b.input("scores", "f32[B, C, N]")
    most, share, least = b.input("most", "i64[]"), b.input("share", "f32[1]"), b.input("t", "f32[]")
    y = b.non_max_suppression(boxes, scores, most, share, least, center_point_box=centred)
    rng = np.random.default_rng(0)
    feeds = []
    for batch, classes, count in ((1, 1, 1), (2, 3, 7), (1, 2, 33), (3, 2, 127), (2, 2, 0)):
        rounded = np.round(rng.random((batch, classes, count)), 1)  # many are equal
        given = {
            "boxes": rng.random((batch, count, 4)).astype(np.float32),
            "scores": rounded.astype(np.float32),
            "share": np.array([0.4], np.float32),
            "t": np.float32(0.25),
        }
        feeds += [{**given, "most": np.array(n)} for n in (0, 1, 5, 1000)]
    check(b.build(y=y), *feeds, threads=threads)


def test_suppression_without_limits_and_with_odd_scores() -> None:
    b = Builder("nms")
    boxes, scores = b.input("boxes", "f32[1, 6, 4]"), b.input("scores", "f32[1, 1, 6]")
    graph = b.build(y=b.non_max_suppression(boxes, scores, np.array(9)))
    corners = np.array([[i, i, i + 0.5, i + 0.5] for i in range(6)], np.float32)[None]
    corners[0, 4] = [2, 2, 2, 2]  # no area, hence no overlap
    values = np.array([[[1, np.inf, 0, -np.inf, 1, -3]]], np.float32)
    check(graph, {"boxes": corners, "scores": values}, threads=1)


def test_suppression_like_onnx_runtime() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    import onnx
    from onnx import TensorProto as T
    from onnx import helper

    import bitwright as bw

    rng = np.random.default_rng(1)
    corner = rng.random((1, 300, 2)) * 4
    boxes = np.concatenate([corner, corner + rng.random((1, 300, 2))], -1).astype(np.float32)
    scores = rng.random((1, 5, 300)).astype(np.float32)
    arrays = {"n": np.array([20]), "i": np.array([0.3], np.float32), "t": np.array([0.2], "f4")}
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", *arrays], ["y"])
    graph = helper.make_graph(
        [node],
        "nms",
        [
            helper.make_tensor_value_info("boxes", T.FLOAT, boxes.shape),
            helper.make_tensor_value_info("scores", T.FLOAT, scores.shape),
        ],
        [helper.make_tensor_value_info("y", T.INT64, ("k", 3))],
        [onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"boxes": boxes, "scores": scores}
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    assert (bw.compile(bw.load(model)).run(feeds)["y"] == want).all()


@pytest.mark.parametrize("with_fallback", [False, True])
def test_repeated_sizes_are_prepared_and_other_sizes_stay_correct(
    with_fallback: bool,
) -> None:
    b = Builder("found")
    x = b.input("x", "f32[n]")
    places = b.transpose(b.nonzero(x), perm=(1, 0))
    if with_fallback:
        places = b.unique(places, axis=0)[0]
    w = b.constant(np.arange(12, dtype=np.float32).reshape(1, 12))
    graph = b.build(y=b.relu(b.matmul(b.cast(places, to="f32"), w)), places=places)
    executable = compile_graph(graph, threads=2)
    program: Any = executable.engine
    one, same, other = np.zeros((3, 40), np.float32)
    one[[3, 7, 20]] = same[[1, 2, 39]] = 1
    other[5:30] = 1
    guessed = []
    for array in (one, same, one, other, one, other, other, other, np.zeros(40, "f4"), other):
        want = run(graph, {"x": array})
        found = executable.run({"x": array})
        guessed.append(bool(program._plans.by_shapes))
        for name, expected in want.items():
            np.testing.assert_array_equal(found[name], expected)
    # two runs of the same sizes prepare the third; a run of other sizes drops it
    assert guessed == [False, True, True, False, False, False, True, True, False, False]
    result = executable.run({"x": other})["places"]
    before = result.copy()
    executable.run({"x": np.roll(other, 1)})
    np.testing.assert_array_equal(result, before)  # the caller owns the results
