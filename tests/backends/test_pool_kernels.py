"""Pools and resizes against the interpreter, channels first and channels last."""

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

from bitwright.ir.dtype import dtype
from bitwright.ir.types import TensorType
from bitwright.ops.builder import Builder
from bitwright.ops.opdef import draw
from bitwright.ops.registry import get
from bitwright.target import named

POOLS = ["max_pool", "avg_pool", "lp_pool"]


def agree(found, expected, element):
    if dtype(element).is_float:
        assert_near(found, expected, {"f16": 2e-3, "bf16": 2e-2}.get(str(element), 1e-5))
    else:
        assert_same(found, expected)


def check(op, x, target="host", shapes=None, threads=(1, 3), **attrs):
    """The op on an image as it is, and on one that lies channels last."""
    graph = graph_of(op, x, shapes=shapes, **attrs)
    element = dtype(x.dtype)
    expected = reference(graph, feeds_of(graph, [x]))["out0"]
    ctx = lower(graph, named(target))
    for count in threads:
        agree(Run(graph, {"in0": x}, threads=count, ctx=ctx).outputs["out0"], expected, element)
    if x.ndim < 3:
        return
    order = (0, *range(2, x.ndim), 1)
    turned = np.ascontiguousarray(x.transpose(order))
    b = Builder("last")
    back = (0, x.ndim - 1, *range(1, x.ndim - 1))
    value = b.transpose(b.input("in0", TensorType(element, turned.shape)), perm=back)
    value = b.op(op, value, **attrs)
    graph = b.build(y=b.transpose(value, perm=order))
    ctx = lower(graph, named(target))
    if x.shape[1] > 1:  # one channel lies both ways
        assert sum(step.why.endswith("copy") for step in ctx.schedule.steps) <= 1
    for count in threads:
        found = Run(graph, {"in0": turned}, threads=count, ctx=ctx).outputs["y"]
        agree(np.ascontiguousarray(found.transpose(back)), expected, element)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", POOLS)
def test_samples(op, target):
    for sample in get(op).samples():
        check(op, *sample.inputs, target=target, threads=(2,), **sample.attrs)


WINDOWS = [
    ((2, 3, 17, 33), {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 33, 9, 40), {"kernel": (2, 2), "strides": (1, 1)}),
    ((1, 70, 7, 7), {"kernel": (3, 3), "strides": (1, 1), "pads": (1, 1, 1, 1)}),
    ((1, 1, 12, 100), {"kernel": (2, 5), "strides": (3, 3), "pads": (0, 4, 1, 2), "ceil": True}),
    ((1, 4, 20, 50), {"kernel": (3, 3), "dilations": (2, 3), "pads": (2, 3, 2, 3)}),
    ((2, 5, 127), {"kernel": (4,), "strides": (2,), "pads": (1, 2)}),
    ((1, 16, 6, 7, 18), {"kernel": (2, 3, 2), "strides": (1, 2, 2), "pads": (0, 1, 1, 1, 0, 0)}),
    ((1, 8, 7, 7), {"kernel": (7, 7)}),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", POOLS)
def test_windows(op, target):
    for shape, attrs in WINDOWS:
        check(op, draw(*shape), target=target, **attrs)
        if op == "avg_pool":
            check(op, draw(*shape), target=target, count_include_pad=True, **attrs)
    check("lp_pool", draw(1, 3, 9, 20), target=target, kernel=(2, 2), p=3)


@pytest.mark.parametrize("element", ["f64", "f16", "bf16", "i8", "u8", "i32", "i64"])
def test_element_types(element):
    low = 0 if element == "u8" else -100
    x = draw(2, 20, 9, 35, dtype=element, low=low, high=100)
    attrs = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    check("max_pool", x, **attrs)
    if dtype(element).is_float:
        check("avg_pool", x, **attrs)


def test_nan_wins_and_padding_does_not():
    x = np.full((1, 2, 5, 40), -np.inf, np.float32)
    x[0, 0, 2, 3], x[0, 1, 4, 39], x[0, 1, 0, 0] = np.nan, np.nan, -1e30
    check("max_pool", x, kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    check("avg_pool", np.nan_to_num(x, neginf=0.5), kernel=(2, 2), pads=(1, 1, 1, 1))


def test_sizes_are_slots():
    texts = set()
    attrs = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    for shape in [(1, 3, 5, 7), (2, 4, 33, 40), (0, 3, 9, 9)]:
        graph = graph_of("max_pool", draw(*shape), shapes={0: "[n, c, h, w]"}, **attrs)
        ctx = lower(graph)
        texts |= {kernel.text for kernel in ctx.kernels.values()}
        feeds = {"in0": draw(*shape)}
        found = Run(graph, feeds, threads=2, ctx=ctx).outputs["out0"]
        assert_same(found, reference(graph, feeds)["out0"])
    assert len(texts) == 1
