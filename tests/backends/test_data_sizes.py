"""Data-dependent sizes: a step reads them, without an interpreter fallback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bitwright.errors import RunError
from bitwright.ir.graph import Graph
from bitwright.lir.schedule import SizeStep
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.pipeline import compile_graph

X = np.random.default_rng(0).standard_normal((4, 6, 5)).astype(np.float32)


def graph_of(op: str, types: dict[str, str], **attrs: Any) -> Graph:
    """The op between two elementwise ops, so that kernels read and write its views."""
    b = Builder(op)
    x, *rest = (b.input(name, type_) for name, type_ in types.items())
    results = b.op(op, b.mul(x, 2), *rest, **attrs)
    results = results if isinstance(results, tuple) else (results,)
    return b.build(**{f"y{i}": b.add(y, 1) for i, y in enumerate(results)})


def check(graph: Graph, *feeds: dict[str, Any]) -> None:
    executable = compile_graph(graph, threads=2)
    steps = executable.engine.schedule.steps  # type: ignore[attr-defined]
    assert any(isinstance(step, SizeStep) for step in steps)
    assert not any(executable.engine.schedule.fallbacks)  # type: ignore[attr-defined]
    for given in feeds:
        found = executable.run(given)
        for name, want in run(graph, given).items():
            assert found[name].shape == want.shape
            assert (found[name] == want).all()


def ints(*numbers: int) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.int64)


def floats(*numbers: float) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.float32)


def test_reshape() -> None:
    graph = graph_of("reshape", {"x": "f32[a, b, c]", "shape": "i64[2]"})
    check(graph, *({"x": X, "shape": s} for s in (ints(-1, 5), ints(8, 15), ints(0, -1))))
    executable = compile_graph(graph)
    for wrong in (ints(7, 7), ints(-1, -1), ints(-2, 3)):
        with pytest.raises(RunError):
            executable.run({"x": X, "shape": wrong})


def test_expand() -> None:
    graph = graph_of("expand", {"x": "f32[a, 1]", "shape": "i64[3]"})
    column = X[:, 0, :1]
    check(
        graph, *({"x": column, "shape": s} for s in (ints(2, 4, 3), ints(1, 1, 7), ints(0, 4, 1)))
    )
    with pytest.raises(RunError):
        compile_graph(graph).run({"x": column, "shape": ints(2, 3, 3)})


def test_slice() -> None:
    types = {"x": "f32[a, b, c]", **dict.fromkeys(("starts", "stops", "axes", "steps"), "i64[2]")}
    cases = [
        ((1, 0), (3, 99), (0, 2), (1, 2)),
        ((-1, -1), (-99, 0), (1, 0), (-1, -2)),
        ((2, 3), (1, 3), (0, -1), (1, 1)),
    ]
    names = list(types)[1:]
    feeds = [{"x": X, **{n: ints(*v) for n, v in zip(names, c, strict=True)}} for c in cases]
    check(graph_of("slice", types), *feeds)
    short = {"x": "f32[a, b, c]", "starts": "i64[1]", "stops": "i64[1]"}
    check(graph_of("slice", short), {"x": X, "starts": ints(1), "stops": ints(3)})


def test_tile() -> None:
    graph = graph_of("tile", {"x": "f32[a, b, c]", "repeats": "i64[3]"})
    check(graph, *({"x": X, "repeats": r} for r in (ints(1, 2, 3), ints(1, 1, 1), ints(2, 0, 1))))


def test_pad() -> None:
    b = Builder("pad")
    x, pads = b.input("x", "f32[a, b, c]"), b.input("pads", "i64[6]")
    graph = b.build(y=b.pad(b.neg(x), b.constant(np.float32(3)), pads))
    check(graph, *({"x": X, "pads": p} for p in (ints(0, 1, 2, 3, 0, 1), ints(-1, 0, 0, 2, -3, 0))))


def test_top_k() -> None:
    graph = graph_of("top_k", {"x": "f32[a, b, c]", "k": "i64[1]"}, axis=1)
    check(graph, *({"x": X, "k": ints(k)} for k in (0, 1, 6)))
    with pytest.raises(RunError):
        compile_graph(graph).run({"x": X, "k": ints(-1)})


@pytest.mark.parametrize("element", ["f32", "f64", "f16", "i32", "i64"])
def test_range(element: str) -> None:
    b = Builder("range")
    operands = [b.input(name, f"{element}[]") for name in ("start", "limit", "delta")]
    graph = b.build(y=b.neg(b.range(*operands)))
    cases = [(0, 10, 1), (5, -30, -3), (1, 1, 1), (4, 2, 1)]
    types = [graph.inputs[0].dtype.numpy] * 3
    names = ("start", "limit", "delta")
    check(
        graph,
        *({n: np.array(v, t) for n, v, t in zip(names, c, types, strict=True)} for c in cases),
    )
    with pytest.raises(RunError, match="step 0"):
        compile_graph(graph).run(
            {n: np.array(v, types[0]) for n, v in zip(names, (0, 1, 0), strict=False)}
        )


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "asymmetric"])
def test_resize(mode: str, coordinates: str) -> None:
    x = X[:, None, :, :].repeat(2, axis=1)
    attrs = {"mode": mode, "coordinate_mode": coordinates}
    for name, operand, cases in (
        ("sizes", "i64[4]", (ints(4, 2, 9, 3), ints(4, 2, 6, 5), ints(1, 3, 1, 7))),
        ("scales", "f32[4]", (floats(1, 1, 1.7, 0.6), floats(1, 1, 1, 1), floats(0.5, 2, 2, 3))),
    ):
        b = Builder("resize")
        given = [b.input("x", "f32[a, b, c, d]"), b.input(name, operand)]
        operands = given if name == "sizes" else [given[0], None, given[1]]
        graph = b.build(y=b.resize(*operands, **attrs))
        executable = compile_graph(graph, threads=2)
        assert not any(executable.engine.schedule.fallbacks)  # type: ignore[attr-defined]
        for case in cases:
            feeds = {"x": x, name: case}
            (found,), (want,) = executable.run(feeds).values(), run(graph, feeds).values()
            assert found.shape == want.shape
            np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_a_negative_size_is_an_error() -> None:
    b = Builder("resize")
    x, sizes = b.input("x", "f32[a, b]"), b.input("sizes", "i64[2]")
    executable = compile_graph(b.build(y=b.resize(x, sizes, mode="nearest")))
    with pytest.raises(RunError):
        executable.run({"x": X[0], "sizes": ints(3, -1)})


def test_require() -> None:
    b = Builder("require")
    x, flag = b.input("x", "f32[a]"), b.input("flag", "bool[]")
    graph = b.build(y=b.add(b.require(flag, b.mul(x, 2), message="not now"), 1))
    check(graph, {"x": X[0, 0], "flag": np.array(True)})
    with pytest.raises(RunError, match="not now"):
        compile_graph(graph).run({"x": X[0, 0], "flag": np.array(False)})
