"""Gradients of pools by their kernels, channels first and channels last."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    Run,
    assert_near,
    assert_same,
    lower,
    reference,
)

from bitwright.ir.dtype import dtype
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import draw
from bitwright.ops.core.registry import get
from bitwright.target import named

OPS = ("max_pool", "avg_pool")
WINDOWS = [
    ((2, 3, 17, 33), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 33, 7, 40), {"kernel": (2, 2), "strides": (2, 2)}),
    ((1, 70, 7, 7), {"kernel": (3, 3), "strides": (1, 1), "pads": (1, 1, 1, 1)}),
    ((1, 1, 12, 100), {"kernel": (2, 5), "strides": (3, 3), "pads": (0, 4, 1, 2), "ceil": True}),
    ((1, 4, 20, 50), {"kernel": (3, 3), "dilations": (2, 3), "pads": (2, 3, 2, 3)}),
    ((2, 5, 127), {"kernel": (4,), "strides": (2,), "pads": (1, 2)}),
    ((1, 16, 6, 7, 18), {"kernel": (2, 3, 2), "strides": (1, 2, 2), "pads": (0, 1, 1, 1, 0, 0)}),
    ((1, 8, 7, 7), {"kernel": (7, 7)}),
    ((1, 2, 5, 90), {"kernel": (1, 40), "strides": (1, 5), "pads": (0, 3, 0, 3)}),
    ((1, 2, 9), {"kernel": (2,), "strides": (4,)}),
]


def build(op, x, element, is_last, **attrs):
    """The gradient of a pool whose operand is channels first, or stored channels last."""
    b = Builder("pool")
    rank = x.ndim
    order, back = (0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1))
    shape = [x.shape[axis] for axis in order] if is_last else x.shape
    value = b.input("x", TensorType(element, shape))
    image = b.transpose(value, perm=back) if is_last else value
    pooled = b.op(op, image, **attrs)
    counts = [pooled.shape[axis] for axis in order] if is_last else pooled.shape
    given = b.input("dy", TensorType(element, counts))
    dy = b.transpose(given, perm=back) if is_last else given
    if op == "max_pool":
        dx = b.max_pool_backward(dy, image, **attrs)
    else:
        dx = b.avg_pool_backward(dy, shape=image.shape, **attrs)
    return b.build(dx=b.transpose(dx, perm=order) if is_last else dx)


def check(op, x, target="host", threads=(1, 3), tolerance=1e-6, **attrs):
    for is_last in (False, True):
        graph = build(op, x, dtype(x.dtype), is_last, **attrs)
        types = {value.name: value.shape for value in graph.inputs}
        dy = draw(*types["dy"], seed=3).astype(x.dtype)
        order = (0, *range(2, x.ndim), 1)
        feeds = {"dy": dy, "x": np.ascontiguousarray(x.transpose(order)) if is_last else x}
        feeds = {name: feeds[name] for name in types}
        expected = reference(graph, feeds)["dx"]
        ctx = lower(graph, named(target))
        found = [Run(graph, feeds, threads=n, ctx=ctx).outputs["dx"] for n in threads]
        for result in found:
            assert_near(result, expected, tolerance)
            assert_same(result, found[0])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", TARGETS)
def test_windows(op, target):
    for shape, attrs in WINDOWS if target == "host" else WINDOWS[:4]:
        check(op, draw(*shape), target, **attrs)
        if op == "avg_pool":
            check(op, draw(*shape), target, count_include_pad=True, **attrs)


@pytest.mark.parametrize("op", OPS)
def test_samples(op):
    for case in get(op).samples():
        x = case.inputs[0]
        if dtype(x.dtype).is_float:
            check(op, x, threads=(2,), tolerance=max(case.tolerance, 1e-6), **case.attrs)


@pytest.mark.parametrize("op", OPS)
def test_element_types(op):
    window = {"kernel": (3, 3), "strides": (1, 2), "pads": (1, 1, 1, 1)}
    for name, tolerance in (("f64", 1e-14), ("f16", 1e-3), ("bf16", 8e-3)):
        check(op, draw(2, 17, 6, 17, dtype=name), tolerance=tolerance, **window)


def test_ties_and_values_that_are_not_finite():
    x = draw(2, 17, 9, 20, dtype="i8").astype(np.float32) // 40
    for attrs in (
        {"kernel": (3, 3), "pads": (1, 1, 1, 1)},
        {"kernel": (2, 2), "strides": (2, 2)},
        {"kernel": (2, 3), "strides": (2, 4), "pads": (1, 2, 0, 1), "dilations": (2, 1)},
    ):
        check("max_pool", x, **attrs)
        for number in (np.nan, -np.inf, np.inf):
            mixed = np.where(x == 0, np.float32(number), x)
            check("max_pool", mixed, **attrs)
            check("max_pool", np.full_like(x, number), **attrs)


@pytest.mark.parametrize("op", OPS)
def test_empty_and_symbolic_sizes(op):
    check(op, draw(0, 3, 5, 5), kernel=(2, 2))
    b = Builder("symbolic")
    x = b.input("x", "f32[n, 3, h, w]")
    dy = b.op(op, x, kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    attrs = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    extra = {"shape": x.shape} if op == "avg_pool" else {}
    operands = (dy,) if op == "avg_pool" else (dy, x)
    graph = b.build(dx=b.op(f"{op}_backward", *operands, **attrs, **extra))
    feeds = {"x": draw(2, 3, 7, 17)}
    assert_near(Run(graph, feeds, threads=2).outputs["dx"], reference(graph, feeds)["dx"], 1e-6)
