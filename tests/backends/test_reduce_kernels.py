"""Reductions, argmax, argmin, cumulative sums and top_k against the interpreter."""

import random

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    Run,
    assert_near,
    assert_same,
    feeds_of,
    graph_of,
    named,
    reference,
    run_op,
)

from bitwright.backends.cpu.kernels.reduce.reduction import OPS
from bitwright.ir import dtype, symbol
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import get

ORDER_OPS = ("argmax", "argmin", "hardmax", "top_k", "cumsum", "cumprod")
SIZES = (1, 2, 3, 7, 16, 17, 33, 70, 127)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check(graph, feeds, target="host", threads=2, tolerance=1e-5):
    expected = reference(graph, feeds)
    found = Run(graph, feeds, named(target), threads).outputs
    for name, array in expected.items():
        if dtype(array.dtype).is_float:
            assert_near(found[name], array, tolerance)
        else:
            assert_same(found[name], array)


@pytest.mark.parametrize("op", (*OPS, *ORDER_OPS))
def test_samples(op):
    for case in get(op).samples():
        if op == "top_k" and len(case.inputs) > 1:
            continue  # a data-dependent k falls back to the interpreter
        graph = graph_of(op, *case.inputs, **case.attrs)
        for target in TARGETS:
            check(graph, feeds_of(graph, case.inputs), target, tolerance=max(case.tolerance, 1e-5))


def cases(count, seed):
    """Shapes, an order of their axes, and axes."""
    draws = random.Random(seed)
    while count:
        rank = draws.randint(1, 4)
        shape = tuple(draws.choice(SIZES) for _ in range(rank))
        if np.prod(shape) <= 30000:
            count -= 1
            perm = tuple(draws.sample(range(rank), rank))
            yield shape, perm, tuple(a for a in range(rank) if draws.random() < 0.5), draws


def graph_after_transpose(op, x, perm, **attrs):
    b = Builder("g")
    value = b.input("x", TensorType(dtype(x.dtype), x.shape))
    node = b.node(op, [b.transpose(value, perm=perm)], attrs, [])
    return b.build(**{f"out{n}": v for n, v in enumerate(node.outputs)})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", OPS)
def test_any_axes_of_any_strides(op, target):
    for shape, perm, axes, draws in cases(8, op):
        x = draw(*shape)
        if op == "reduce_prod":
            x = 1 + x / 100
        graph = graph_after_transpose(op, x, perm, axes=axes, keepdims=draws.random() < 0.5)
        check(graph, {"x": x}, target, draws.choice((1, 2, 3)))


@pytest.mark.parametrize("element", ("i64", "i32", "i8", "u8", "bool"))
def test_integers_equal_the_reference(element):
    ops = ("reduce_max", "reduce_min") if element == "bool" else OPS[:5]
    for op in (*ops, "argmax", "argmin"):
        for shape, perm, axes, _ in cases(4, op + element):
            x = (np.abs(draw(*shape)) * 9).astype(dtype(element).numpy)
            attrs = {"axes": axes} if op.startswith("reduce") else {"axis": (*axes, 0)[0]}
            check(graph_after_transpose(op, x, perm, **attrs), {"x": x})


@pytest.mark.parametrize("op", ("reduce_max", "reduce_min", "reduce_sum", "reduce_log_sum_exp"))
@pytest.mark.parametrize("axis", (0, 1))
def test_special_values(op, axis):
    x = draw(40, 41)
    x[3, 5], x[6, :], x[:, 9], x[7, 7] = np.nan, -np.inf, np.inf, 100.0
    for target in TARGETS:
        graph = graph_of(op, x, axes=(axis,))
        check(graph, {"in0": x}, target)


def test_long_sums_stay_accurate():
    x = np.random.default_rng(0).uniform(0, 1, (2, 1_000_003)).astype(np.float32)
    found = run_op("reduce_sum", x, axes=(1,))
    np.testing.assert_allclose(found[:, 0], x.sum(axis=1, dtype=np.float64), rtol=1e-6)
    tall = np.ascontiguousarray(x.reshape(-1, 2)[:500_001])
    found = run_op("reduce_sum", tall, axes=(0,))
    np.testing.assert_allclose(found[0], tall.sum(axis=0, dtype=np.float64), rtol=1e-6)


def test_results_do_not_depend_on_threads():
    x = draw(37, 5, 29)
    for op in ("reduce_sum", "reduce_mean", "reduce_log_sum_exp"):
        for axes in ((0,), (1, 2), (0, 2)):
            one, *more = (run_op(op, x, axes=axes, threads=n) for n in (1, 2, 7))
            for other in more:
                assert_same(other, one)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ORDER_OPS)
def test_order_along_an_axis(op, target):
    """Many ties, NaN, infinities, both zeros; any axis and any strides."""
    for shape, perm, _, draws in cases(8, op):
        x = np.round(draw(*shape) * 3)
        if op != "cumprod":
            where = np.random.default_rng(1).random(shape)
            x[where < 0.05], x[where > 0.97], x[np.abs(where - 0.5) < 0.05] = np.nan, -np.inf, -0.0
        axis = draws.randrange(len(shape))
        flip = draws.random() < 0.5
        attrs = {"axis": axis}
        if op.startswith("arg"):
            attrs |= {"select_last": flip, "keepdims": draws.random() < 0.5}
        elif op == "top_k":
            attrs |= {"k": draws.randint(0, shape[perm[axis]]), "largest": flip}
        elif op.startswith("cum"):
            attrs |= {"exclusive": flip, "reverse": draws.random() < 0.5}
        check(graph_after_transpose(op, x, perm, **attrs), {"x": x}, target, draws.choice((1, 3)))


def test_top_k_of_long_rows():
    x = draw(3, 5000)
    for k in (1, 17, 400, 5000):
        values, places = run_op("top_k", x, k=k, threads=2)
        order = np.argsort(-x, axis=1, kind="stable")[:, :k]
        assert_same(places, order)
        assert_same(values, np.take_along_axis(x, order, axis=1))


def test_empty_axes_and_large_k_are_faults():
    """An axis that is empty at run time, and k larger than the axis."""
    empty = np.zeros((3, 0), np.float32)
    for axis, x in ((1, empty), (0, empty.T)):
        graph = graph_of("argmax", x, shapes={0: "[m, n]"}, axis=axis)
        assert Run(graph, {"in0": x}).fault is not None
    b = Builder("g")
    x = b.input("x", "f32[3, n]")
    values, _ = b.top_k(x, k=symbol("n") + 1)
    assert Run(b.build(values), {"x": draw(3, 5)}).fault[1] == 6
    graph = graph_of("argmax", np.zeros((0, 3), np.float32), shapes={0: "[m, n]"}, axis=1)
    assert Run(graph, {"in0": np.zeros((0, 3), np.float32)}).fault is None
