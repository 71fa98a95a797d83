"""Sums by index, the gradient of gather, by their kernels."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    THREADS,
    Run,
    assert_near,
    assert_same,
    feeds_of,
    graph_of,
    named,
    reference,
    run_op,
)

from bitwright.autodiff.grad import grad
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import draw
from bitwright.ops.core.registry import get
from bitwright.pipeline import compile_graph

OP = "gather_backward"


def check(dy, indices, target="host", threads=2, shapes=None, tolerance=1e-6, **attrs):
    graph = graph_of(OP, dy, indices, shapes=shapes, **attrs)
    expected = reference(graph, feeds_of(graph, (dy, indices)))["out0"]
    how = {"target": named(target), "threads": threads, "shapes": shapes}
    assert_near(run_op(OP, dy, indices, **how, **attrs), expected, tolerance)


def places(count, size, seed=0, element=np.int64):
    """Indices from the front and from the end, many of them equal."""
    found = np.random.default_rng(seed).integers(-size, size, count) // 2
    return found.astype(element)


@pytest.mark.parametrize("target", TARGETS)
def test_samples(target):
    for case in get(OP).samples():
        check(*case.inputs, target, tolerance=max(case.tolerance, 1e-6), **case.attrs)


@pytest.mark.parametrize("target", TARGETS)
def test_any_size(target):
    for columns in (1, 7, 16, 17, 33, 127, 300):
        for threads in THREADS:
            check(draw(33, columns), places(33, 17), target, threads, size=17)
    check(draw(2, 127, 7), places(127, 33, element=np.int32), target, axis=1, size=33)
    check(draw(2, 127), places(127, 33, element=np.int8), target, axis=1, size=33)


def test_element_types():
    for name, tolerance in (("f64", 1e-14), ("f16", 1e-3), ("bf16", 8e-3), ("i32", 0), ("i64", 0)):
        for columns in (1, 17):
            dy = draw(33, columns, dtype=name)
            check(dy, places(33, 7), tolerance=tolerance, size=7)


def test_half_floats_are_summed_in_f32():
    ones = np.ones((5000, 3), np.float16)
    found = run_op(OP, ones, np.zeros(5000, np.int64), size=2)
    assert (found[0] == 5000).all() and not found[1].any()


def test_empty_axes():
    check(draw(0, 17), np.zeros(0, np.int64), size=7)
    check(draw(0, 17), np.zeros(0, np.int64), size=0)
    check(draw(0), np.zeros(0, np.int64), size=7)
    check(draw(7, 0), places(7, 3), size=3)


def test_symbolic_sizes():
    check(draw(33, 17), places(33, 7), shapes={0: "[M, C]", 1: "[M]"}, size=7)
    check(draw(33), places(33, 7), shapes={0: "[M]", 1: "[M]"}, size=7)


def test_threads_do_not_change_a_bit():
    for dy in (draw(300, 127), draw(300, 1), draw(300, 7, dtype="f16")):
        one, *others = (
            run_op(OP, dy, places(300, 17), threads=threads, size=17) for threads in (1, 2, 5)
        )
        for other in others:
            assert_same(one, other)


def test_an_index_out_of_range_is_recorded():
    for dy in (draw(3, 5), draw(3)):
        for size, wrong in ((4, 4), (4, -5), (0, 0)):
            arrays = dy, np.array([0, wrong, 0])
            graph = graph_of(OP, *arrays, size=size)
            done = Run(graph, feeds_of(graph, arrays), threads=2)
            assert done.fault is not None and done.fault[1] == wrong


@pytest.mark.parametrize("op", ["gather", "gather_elements", "gather_nd", "scatter_elements"])
def test_gradients_of_indexing_run_compiled(op):
    b = Builder(op)
    x = b.input("x", "f32[5, 3]")
    indices = b.input("indices", "i64[4]" if op == "gather" else "i64[4, 2]")
    if op == "scatter_elements":
        part = b.slice(x, starts=(0, 0), stops=(4, 2), steps=(1, 1), axes=(0, 1))
        y = b.scatter_elements(x, indices, part, reduction="mul")
    else:
        y = b.op(op, x, indices)
    axes = tuple(range(y.rank))
    loss = b.reduce_sum(b.mul(y, y), axes=axes, keepdims=False)
    graph = grad(b.build(loss=loss), "loss", wrt=["x"])
    exe = compile_graph(graph, threads=1)
    assert not list(exe.engine.fallbacks)
    places = np.array([[0, 1], [4, 2], [0, 1], [-1, 0]])
    feeds = {"x": draw(5, 3), "indices": places[:, 0].copy() if op == "gather" else places}
    expected = reference(graph, feeds)
    for name, found in exe.run(feeds).items():
        assert_near(found, expected[name], 1e-5)
