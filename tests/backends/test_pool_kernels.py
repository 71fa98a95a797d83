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
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import draw
from bitwright.ops.core.registry import get
from bitwright.target import named

POOLS = ["max_pool", "avg_pool", "lp_pool"]


def agree(found, expected, element):
    if dtype(element).is_float:
        assert_near(found, expected, {"f16": 2e-3, "bf16": 2e-2}.get(str(element), 1e-5))
    else:
        assert_same(found, expected)


def check(op, x, target="host", shapes=None, threads=(1, 3), **attrs):
    """The op on an image in channels-first and in channels-last layout."""
    graph = graph_of(op, x, shapes=shapes, **attrs)
    element = dtype(x.dtype)
    expected = reference(graph, feeds_of(graph, [x]))["out0"]
    ctx = lower(graph, named(target))
    for count in threads:
        agree(Run(graph, {"in0": x}, threads=count, ctx=ctx).outputs["out0"], expected, element)
    if x.ndim < 3:
        return
    order = (0, *range(2, x.ndim), 1)
    transposed = np.ascontiguousarray(x.transpose(order))
    b = Builder("last")
    back = (0, x.ndim - 1, *range(1, x.ndim - 1))
    value = b.transpose(b.input("in0", TensorType(element, transposed.shape)), perm=back)
    value = b.op(op, value, **attrs)
    graph = b.build(y=b.transpose(value, perm=order))
    ctx = lower(graph, named(target))
    if x.shape[1] > 1:  # with one channel both layouts are equal
        assert sum(step.why.endswith("copy") for step in ctx.schedule.steps) <= 1
    for count in threads:
        found = Run(graph, {"in0": transposed}, threads=count, ctx=ctx).outputs["y"]
        agree(np.ascontiguousarray(found.transpose(back)), expected, element)


@pytest.mark.parametrize("op", POOLS)
def test_samples(op):
    for sample in get(op).samples():
        check(op, *sample.inputs, threads=(2,), **sample.attrs)


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
    windows = WINDOWS if target == "host" else WINDOWS[:3]
    for shape, attrs in windows:
        check(op, draw(*shape), target=target, **attrs)
        if op == "avg_pool":
            check(op, draw(*shape), target=target, count_include_pad=True, **attrs)


LONG = [
    ((2, 3, 90), {"kernel": (33,)}),
    ((1, 3, 4, 100), {"kernel": (2, 40), "strides": (1, 2), "pads": (0, 20, 1, 35)}),
    ((1, 2, 70), {"kernel": (64,), "strides": (3,), "pads": (63, 63)}),
    ((1, 5, 130), {"kernel": (50,), "dilations": (3,), "pads": (40, 9), "ceil": True}),
    ((2, 1, 3), {"kernel": (70,), "pads": (69, 69)}),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", POOLS)
def test_windows_that_are_not_unrolled(op, target):
    for shape, attrs in LONG:
        check(op, draw(*shape), target=target, **attrs)
        if op == "avg_pool":
            check(op, draw(*shape), target=target, count_include_pad=True, **attrs)


@pytest.mark.parametrize("p", [3, 8, 9, 40])
def test_a_norm_with_another_power(p):
    check("lp_pool", draw(1, 3, 9, 20), kernel=(2, 2), p=p)


def test_a_norm_with_the_largest_power():
    x = np.array([[[0.0, 0.5, 1.0, -1.0, 2.0, 0.25]]], np.float32)
    check("lp_pool", x, kernel=(2,), p=2**62)


def test_windows_with_positions_beyond_32_bits_fall_back_to_the_interpreter():
    graph = graph_of("max_pool", draw(1, 1, 3), kernel=(2**40,), pads=(2**40, 2**40))
    assert lower(graph).kernels == {}


@pytest.mark.parametrize("element", ["f64", "f16", "bf16", "i8", "u8", "i32", "i64"])
def test_element_types(element):
    low = 0 if element == "u8" else -100
    x = draw(2, 20, 9, 35, dtype=element, low=low, high=100)
    attrs = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    check("max_pool", x, **attrs)
    if dtype(element).is_float:
        check("avg_pool", x, **attrs)


def test_nan_propagates_and_padding_is_ignored():
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
        texts |= {ctx.text(kernel) for kernel in ctx.kernels.values()}
        feeds = {"in0": draw(*shape)}
        found = Run(graph, feeds, threads=2, ctx=ctx).outputs["out0"]
        assert_same(found, reference(graph, feeds)["out0"])
    assert len(texts) == 1


# resize

MODES = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]
SIZES = [
    ((1, 3, 5, 7), (1, 3, 10, 14)),
    ((2, 5, 9, 33), (2, 5, 4, 70)),
    ((1, 2, 6, 8), (1, 2, 6, 17)),
    ((1, 20, 4, 5), (1, 20, 1, 13)),
    ((1, 2, 3, 4, 5), (1, 2, 6, 3, 11)),
    ((2, 3, 8), (2, 3, 13)),
    ((3, 4), (5, 7)),
    ((2, 1, 3, 2, 4, 2, 2), (3, 2, 2, 5, 3, 4, 3)),
    ((1, 1, 2, 2100), (1, 1, 3, 1500)),
]


def test_resize_samples():
    for sample in get("resize").samples():
        x, *rest = sample.inputs
        attrs = sample.attrs
        if rest or attrs.get("antialias") or "crop" in attrs.get("coordinate_mode", ""):
            continue
        check("resize", x, threads=(2,), **attrs)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", MODES)
def test_resize(coordinates, mode):
    for number, (shape, sizes) in enumerate(SIZES):
        attrs = {"sizes": sizes, "mode": mode, "coordinate_mode": coordinates}
        x = draw(*shape)
        if number == 1 and mode != "nearest":
            attrs["exclude_outside"] = True
        check("resize", x, target=TARGETS[number % len(TARGETS)], threads=(3,), **attrs)


@pytest.mark.parametrize("rule", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_nearest_rules(rule):
    for coordinates in MODES:
        for element in ("i8", "f32", "c128"):
            attrs = {"coordinate_mode": coordinates, "nearest_mode": rule}
            x = draw(1, 3, 7, 9, dtype=element)
            check("resize", x, sizes=(1, 3, 14, 6), threads=(2,), **attrs)


@pytest.mark.parametrize("element", ["f64", "f16", "bf16", "u8", "i8", "i32", "u32"])
def test_resized_types(element):
    low = 0 if element[0] == "u" else -100
    x = draw(1, 18, 9, 7, dtype=element, low=low, high=100)
    for mode in ("linear", "cubic"):
        check("resize", x, sizes=(1, 18, 20, 15), mode=mode)


def test_resize_by_scales_that_do_not_fit():
    """A scale of 2.3 on 5 rows gives 11 rows, with the coordinates of 11.5 rows."""
    for coordinates in MODES:
        attrs = {"scales": (1, 1, 2.3, 0.7), "coordinate_mode": coordinates}
        for mode in ("nearest", "linear"):
            check("resize", draw(1, 2, 5, 10), sizes=(1, 2, 11, 7), mode=mode, **attrs)


def test_infinite_pixels_do_not_spread():
    x = draw(1, 2, 6, 9)
    x[0, 0, 2, 3] = np.inf
    attrs = {"mode": "linear", "coordinate_mode": "align_corners"}
    check("resize", x, sizes=(1, 2, 11, 17), **attrs)


def test_resize_of_symbolic_sizes():
    b = Builder("twice")
    x = b.input("x", "f32[1, 3, h, w]")
    h, w = x.shape[2:]
    graph = b.build(y=b.resize(x, sizes=(1, 3, 2 * h, 2 * w), mode="linear"))
    for shape in [(1, 3, 5, 7), (1, 3, 20, 33), (1, 3, 1, 1)]:
        feeds = {"x": draw(*shape)}
        assert_near(Run(graph, feeds, threads=2).outputs["y"], reference(graph, feeds)["y"])


def test_an_empty_axis_cannot_grow():
    b = Builder("empty")
    x = b.input("x", "f32[2, n]")
    graph = b.build(y=b.resize(x, sizes=(2, x.shape[1] + 4), mode="linear"))
    assert Run(graph, {"x": draw(2, 0)}).fault is not None
