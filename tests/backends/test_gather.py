"""Gathers, scatters and position patterns against the interpreter, and recorded faults."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    Run,
    assert_near,
    assert_same,
    feeds_of,
    graph_of,
    lower,
    reference,
)

from bitwright.backends.cpu.backend import CpuBackend
from bitwright.errors import RunError
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import draw
from bitwright.ops.core.registry import get
from bitwright.target import host, named

OPS = [
    "gather",
    "gather_elements",
    "gather_nd",
    "scatter_elements",
    "scatter_nd",
    "tensor_scatter",
    "one_hot",
    "trilu",
    "reverse_sequence",
    "iota",
    "sizes",
    "shape_of",
]


def check(op, *arrays, target="host", shapes=None, near=0.0, **attrs):
    graph = graph_of(op, *arrays, shapes=shapes, **attrs)
    feeds = feeds_of(graph, arrays)
    expected = reference(graph, feeds)
    ctx = lower(graph, named(target))
    for threads in (1, 2, 3):
        done = Run(graph, feeds, threads=threads, ctx=ctx)
        assert done.fault is None
        for name, result in expected.items():
            if near:
                assert_near(done.outputs[name], result, near)
            else:
                assert_same(done.outputs[name], result)


def places(*shape, size, dtype=np.int64, seed=0):
    """Indices on an axis of this size, some of them negative."""
    return np.random.default_rng(seed).integers(-size, size, shape).astype(dtype)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_samples(op, target):
    for sample in get(op).samples():
        arrays = sample.inputs
        if any(a is not None and a.dtype == object for a in arrays):
            continue
        graph = graph_of(op, *arrays, **sample.attrs)
        done = Run(graph, feeds_of(graph, arrays), named(target), threads=2, host=True)
        for name, result in reference(graph, feeds_of(graph, arrays)).items():
            assert_near(done.outputs[name], result, sample.tolerance)


@pytest.mark.parametrize("target", TARGETS)
def test_gather(target):
    for inner in ((1,), (7,), (64,), (33, 3), ()):
        for index in (np.int64, np.int32):
            at = places(5, 3, size=17, dtype=index)
            check("gather", draw(17, *inner), at, target=target)
            check("gather", draw(2, 17, *inner, dtype="i8"), at, target=target, axis=1)
    check("gather", draw(3, 40, dtype="f64"), places(2500, size=40), target=target, axis=-1)
    check("gather", draw(4, 3, dtype="c128"), places(6, size=3), target=target, axis=1)
    check("gather", draw(9, 5000), places(3, size=9), target=target)
    check("gather", draw(6, 2), np.array([5, 0], np.uint8), target=target)


def test_gather_of_a_transpose():
    b = Builder("transposed")
    x, at = b.input("x", "f32[7, 9]"), b.input("at", "i64[4]")
    graph = b.build(y=b.gather(b.transpose(x, perm=(1, 0)), at, axis=1))
    feeds = {"x": draw(7, 9), "at": places(4, size=7)}
    assert_same(Run(graph, feeds, threads=2).outputs["y"], reference(graph, feeds)["y"])


def test_gather_by_a_constant_scalar_is_a_view():
    ctx = lower(graph_of("gather", draw(5, 3), np.array(-2), constants=(1,)))
    assert [step.why for step in ctx.schedule.steps] == ["contiguous copy"]
    check("gather", draw(2, 5, 3), np.array(4), axis=1)


@pytest.mark.parametrize("target", TARGETS)
def test_gather_elements(target):
    for axis in (0, 1, 2):
        at = places(4, 9, 17, size=(5, 9, 33)[axis])
        check("gather_elements", draw(5, 9, 33), at, target=target, axis=axis)
    check("gather_elements", draw(3000, dtype="u8", low=0), places(2000, size=3000), target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_gather_nd(target):
    x = draw(4, 5, 6, 7)
    check("gather_nd", x, places(3, 2, size=4), target=target)
    check("gather_nd", x, places(9, 4, size=4, dtype=np.int32), target=target)
    check("gather_nd", x, places(4, 3, 2, size=5), target=target, batch_dims=1)
    check("gather_nd", x, places(4, 5, 2, 1, size=6), target=target, batch_dims=2)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("target", TARGETS)
def test_scatters(target, reduction):
    """Many updates of few positions are applied in the same order for any number of threads."""
    rounds = 1e-5 if reduction in ("add", "mul") else 0.0
    for element in ("f32", "i32", "u8"):
        near = rounds if element == "f32" else 0.0
        low = 0 if element == "u8" else -2
        x, u = (draw(5, 70, dtype=element, low=low, seed=seed) for seed in (0, 1))
        at = places(5, 70, size=5, seed=2)
        attrs = {"target": target, "near": near, "reduction": reduction}
        check("scatter_elements", x, at, u, axis=0, **attrs)
        check("scatter_elements", x, places(5, 70, size=70, seed=3), u, axis=1, **attrs)
        check("scatter_elements", x[0], places(70, size=70, seed=4), u[0], axis=0, **attrs)
        rows = places(5, 1, size=5, seed=5)
        check("scatter_nd", x, rows, u, **attrs)
        both = np.stack([places(70, size=5, seed=6), places(70, size=70, seed=7)], 1)
        check("scatter_nd", x, both, u[0], **attrs)
    nan = draw(5, 3)
    nan[1, 2] = np.nan
    transposed = nan[::-1].copy()
    check("scatter_nd", nan, places(5, 1, size=5), transposed, reduction=reduction, near=rounds)


@pytest.mark.parametrize("target", TARGETS)
def test_tensor_scatter(target):
    past, update = draw(3, 2, 9, 5), draw(3, 2, 4, 5, seed=1)
    check("tensor_scatter", past, update, np.array([0, 5, 2]), target=target)
    check("tensor_scatter", past, update, np.array([8, 30, 2]), target=target, mode="circular")
    check("tensor_scatter", past, update, target=target)
    check("tensor_scatter", past, draw(3, 2, 9, 2), target=target, axis=-1)


def test_a_cache_is_updated_in_place():
    b = Builder("cache")
    past = b.state("past", np.zeros((2, 6, 3), np.float32))
    update, at = b.input("update", "f32[2, 1, 3]"), b.input("at", "i64[2]")
    present = b.tensor_scatter(past, update, at, axis=1)
    b.update(past, present)
    graph = b.build(y=b.neg(present))
    steps = [step for step in lower(graph).schedule.steps if step.node != "y"]
    assert [step.kernel.rsplit("_", 1)[0] for step in steps[:1]] == ["tensor_scatter"]


@pytest.mark.parametrize("target", TARGETS)
def test_patterns(target):
    check("one_hot", places(4, 5, size=7), draw(2), target=target, depth=9)
    for axis in (0, 1, -1):
        at = places(3, 33, size=6, dtype=np.int32)
        check("one_hot", at, np.array([1, 9], np.int16), target=target, depth=5, axis=axis)
    for k in (-40, -1, 0, 3, 90):
        for upper in (True, False):
            check("trilu", draw(2, 17, 33), target=target, upper=upper, k=k)
            check("trilu", draw(7, 5, dtype="i8"), np.array(k), target=target, upper=upper)
    lengths = np.array([0, 7, 3, 1], np.int32)
    for axes in ({"batch_axis": 0, "time_axis": 1}, {"batch_axis": 1, "time_axis": 0}):
        shape = (4, 7, 33) if axes["batch_axis"] == 0 else (7, 4, 33)
        check("reverse_sequence", draw(*shape), lengths, target=target, **axes)
    for element in ("i64", "i32", "i8", "u16", "f32", "f16", "bf16", "f64"):
        check("iota", target=target, length=100, dtype=element)


def test_sizes_come_from_slots():
    b = Builder("sizes")
    x = b.input("x", "f32[n, 3]")
    n = x.shape[0]
    graph = b.build(y=b.sizes(values=(n, n * 2 + 1, 7), shape=(3,)), z=b.shape_of(x))
    done = Run(graph, {"x": draw(5, 3)}, threads=3)
    assert done.outputs["y"].tolist() == [5, 11, 7]
    assert done.outputs["z"].tolist() == [5, 3]


BAD = [
    ("gather", (draw(5, 3), np.array([1, 5])), {}, 5),
    ("gather", (draw(5, 3), np.array([-6, 0], np.int32)), {"axis": 0}, -6),
    ("gather", (draw(5), np.array([2, 9])), {}, 9),
    ("gather_elements", (draw(3, 4), np.array([[4, 0]])), {"axis": 1}, 4),
    ("gather_nd", (draw(3, 4), np.array([[2, -5]])), {}, -5),
    ("scatter_elements", (draw(3), np.array([3]), draw(1)), {}, 3),
    ("scatter_nd", (draw(3, 2), np.array([[7]]), draw(1, 2)), {}, 7),
    ("tensor_scatter", (draw(1, 3, 2), draw(1, 2, 2), np.array([2])), {}, 2),
    ("reverse_sequence", (draw(4, 2), np.array([1, 5])), {}, 5),
]


@pytest.mark.parametrize("op, arrays, attrs, index", BAD)
def test_an_index_out_of_range_is_recorded(op, arrays, attrs, index):
    """Nothing out of bounds is read or written, and the fault names the index."""
    graph = graph_of(op, *arrays, **attrs)
    feeds = feeds_of(graph, arrays)
    done = Run(graph, feeds, threads=2)
    assert done.fault == (list(graph.nodes).index(graph.outputs[0][1].node), index)
    with pytest.raises(RunError, match=f"index {index}"):
        CpuBackend(host()).compile(graph, threads=1).run(feeds)


def test_an_empty_axis_has_no_index():
    graph = graph_of("gather", draw(0, 3), np.array([0]), shapes={0: "[n, 3]"})
    assert Run(graph, {"in0": draw(0, 3), "in1": np.array([0])}).fault is not None
    check("gather", draw(0, 3), np.zeros(0, np.int64))
    check("scatter_nd", draw(0, 3), np.zeros((0, 1), np.int64), draw(0, 3))


def test_a_program_goes_on_after_a_fault():
    graph = graph_of("gather", draw(5, 3), np.array([1, 5]))
    program = CpuBackend(host()).compile(graph, threads=1)
    with pytest.raises(RunError):
        program.run({"in0": draw(5, 3), "in1": np.array([1, 5])})
    found = program.run({"in0": draw(5, 3), "in1": np.array([1, 4])})
    assert_same(found["out0"], draw(5, 3)[[1, 4]])
