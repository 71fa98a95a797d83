"""Convolutions on the GPU: every form at awkward sizes; integers equal the CPU's to the bit."""

import ml_dtypes
import numpy as np
import pytest
from on_gpu import check_graph

import bitwright as bw
from bitwright.backends.gpu.lowering.build import build
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.ir.dtype import dtype

ATOL = {"f32": 1e-4, "f16": 3e-2, "bf16": 0.25}
CASES = {
    "pointwise": ((2, 17, 5, 7), (9, 17, 1, 1), {}),
    "pointwise, stride 2": ((1, 32, 7, 6), (16, 32, 1, 1), {"strides": (2, 2)}),
    "3x3": ((2, 32, 7, 8), (17, 32, 3, 3), {"pads": (1, 1, 1, 1)}),
    "odd channels": ((1, 19, 6, 5), (7, 19, 3, 2), {"pads": (1, 0, 2, 1), "strides": (2, 1)}),
    "first layer": ((1, 3, 17, 16), (8, 3, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    "dilated": ((1, 16, 9, 9), (4, 16, 3, 3), {"dilations": (2, 3), "pads": (2, 3, 2, 3)}),
    "groups": ((1, 32, 5, 6), (6, 16, 3, 3), {"groups": 2, "pads": (1, 1, 1, 1)}),
    "small groups": ((1, 6, 5, 6), (4, 3, 2, 2), {"groups": 2}),
    "depthwise": ((2, 33, 7, 5), (33, 1, 3, 3), {"groups": 33, "pads": (1, 1, 1, 1)}),
    "multiplier": ((1, 4, 6, 6), (8, 1, 3, 3), {"groups": 4, "strides": (2, 2)}),
    "many images": ((64, 32, 3, 2), (9, 32, 3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 1)}),
    "dense strides": ((2, 32, 9, 8), (20, 32, 3, 5), {"pads": (1, 2, 1, 2), "strides": (3, 2)}),
    "few tiles": ((1, 512, 4, 5), (24, 512, 3, 3), {"pads": (1, 1, 1, 1)}),
    "wide dilation": (
        (3, 64, 5, 9),
        (40, 32, 3, 3),
        {"pads": (2, 3, 2, 3), "dilations": (2, 3), "groups": 2},
    ),
    "few channels": ((3, 5, 9, 8), (8, 5, 3, 4), {"pads": (1, 2, 1, 1), "strides": (1, 3)}),
    "one pixel": ((1, 3, 2, 3), (5, 3, 2, 2), {"strides": (2, 2)}),
    "one axis": ((2, 16, 11), (5, 16, 3), {"pads": (1, 1)}),
    "three axes": ((1, 16, 4, 3, 5), (3, 16, 2, 3, 2), {"pads": (0, 1, 0, 1, 1, 0)}),
}


def values(*shape, seed=0, element=np.float32):
    rng = np.random.default_rng(seed)
    if np.dtype(element).kind in "iu":
        limits = np.iinfo(element)
        return rng.integers(limits.min, limits.max + 1, shape).astype(element)
    return rng.standard_normal(shape).astype(element)


def text(array):
    return f"{dtype(array.dtype)}[{', '.join(map(str, array.shape))}]"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("element", [np.float32, ml_dtypes.bfloat16])
def test_float_layers(case, element):
    shape, filters, attrs = CASES[case]
    x, w = values(*shape, element=element), values(*filters, seed=1, element=element)
    b = bw.Builder("g")
    bias = b.constant(values(len(w), seed=2, element=element))
    y = b.relu(b.conv(b.input("x", text(x)), b.constant(w), bias, **attrs))
    check_graph(b.build(y=y), {"x": x}, atol=ATOL[str(dtype(element))])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("element", [np.int8, np.uint8])
def test_int8_layers_are_equal_to_the_bit(case, element):
    shape, filters, attrs = CASES[case]
    x, w = values(*shape, element=element), values(*filters, seed=1, element=np.int8)
    b = bw.Builder("g")
    bias = b.constant(np.random.default_rng(3).integers(-999, 999, len(w)).astype(np.int32))
    zero = b.constant(np.array(7, element))
    sums = b.integer_conv(b.input("x", text(x)), b.constant(w), zero, None, bias, **attrs)
    scale = np.abs(values(len(w), *(1,) * (x.ndim - 2), seed=4)) * 1e-3 + 1e-4
    y = b.mul(b.cast(sums, to="f32"), b.constant(scale.astype(np.float32)))
    residual = values(*sums.shape, seed=5)
    y = b.relu(b.add(y, b.input("r", text(residual))))
    graph = b.build(
        y=b.requantize(b.mul(y, np.float32(20)), b.constant(np.array(-9, np.int8)), to="i8")
    )
    feeds = {"x": x, "r": residual}
    exe = check_graph(graph, feeds)
    on_cpu = bw.compile(graph, target="cpu").run(feeds)["y"]
    np.testing.assert_array_equal(exe.run(feeds)["y"], on_cpu)


@pytest.mark.parametrize("case", ["3x3", "first layer", "depthwise", "groups"])
@pytest.mark.parametrize(
    "zero",
    [np.int8(-128), np.int8(-3), np.uint8(128), np.uint8(255)],
    ids=lambda z: f"{z.dtype}{z}",
)
def test_pixels_outside_count_as_the_zero_point(case, zero):
    shape, filters, attrs = CASES[case]
    x, w = values(*shape, element=zero.dtype), values(*filters, seed=1, element=np.int8)
    b = bw.Builder("g")
    y = b.integer_conv(b.input("x", text(x)), b.constant(w), b.constant(zero), None, None, **attrs)
    check_graph(b.build(y=y), {"x": x})


def test_forms_of_convolutions():
    def families(shape, filters, attrs):
        b = bw.Builder("g")
        x, w = b.input("x", f"i8[{', '.join(map(str, shape))}]"), values(*filters, element=np.int8)
        zero = b.constant(np.array(-128, np.int8))
        exe = bw.compile(
            b.build(y=b.integer_conv(x, b.constant(w), zero, None, None, **attrs)), target="cuda"
        )
        kernels = [s.kernel.rpartition("_")[0] for s in exe.engine.artifact.schedule.steps]
        return [name for name in kernels if name.startswith("conv")]

    assert families(*CASES["many images"]) == ["conv_i8_tma"]
    assert families(*CASES["dense strides"]) == ["conv_i8_tma"]
    assert families(*CASES["few tiles"]) == ["conv_i8_tma_split", "conv_sum_parts"]
    assert families(*CASES["first layer"]) == ["conv_pack_i8", "conv_i8_tma"]
    assert families(*CASES["odd channels"]) == ["conv_i8"]


@pytest.mark.parametrize("op", ["max_pool", "avg_pool"])
def test_pooling_of_channels_last(op):
    b = bw.Builder("g")
    x = b.conv(
        b.input("x", "f16[2, 24, 7, 9]"), b.constant(values(24, 24, 1, 1, element=np.float16))
    )
    attrs = {"kernel": (3, 2), "strides": (2, 2), "pads": (1, 1, 1, 0)}
    exe = check_graph(
        b.build(y=getattr(b, op)(x, **attrs)),
        {"x": values(2, 24, 7, 9, element=np.float16)},
        atol=3e-2,
    )
    why = [s.why for s in exe.engine.artifact.schedule.steps if op in s.kernel]
    assert why == ["channels last"]


@pytest.mark.parametrize(
    "taps, attrs",
    [
        ((2, 2), {"strides": (2, 2)}),
        ((3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
        ((4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
        ((5,), {"strides": (3,), "pads": (1, 1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["f32", "mixed"])
def test_transposed_convolutions(taps, attrs, precision):
    axes = ("h", "w")[: len(taps)]
    x, w = values(2, 6, *(7, 5)[: len(taps)]), values(6, 4, *taps, seed=1)
    b = bw.Builder("g")
    one = b.input("x", f"f32[n, 6, {', '.join(axes)}]")
    y = b.conv_transpose(one, b.constant(w), b.constant(values(4, seed=2)), **attrs)
    atol = 1e-4 if precision == "f32" else 5e-2
    check_graph(b.build(y=b.relu(y)), {"x": x}, atol=atol, precision=precision)


def test_a_network_stays_channels_last():
    b = bw.Builder("g")
    x = b.input("x", "f32[n, 3, 12, 12]")
    y = b.relu(b.conv(x, b.constant(values(16, 3, 3, 3)), None, pads=(1, 1, 1, 1)))
    z = b.conv(y, b.constant(values(16, 16, 3, 3, seed=1)), None, pads=(1, 1, 1, 1))
    z = b.relu(b.add(b.conv(b.relu(z), b.constant(values(16, 16, 1, 1, seed=2))), y))
    feeds = {"x": values(2, 3, 12, 12)}
    exe = check_graph(b.build(y=z), feeds, rtol=1e-4, atol=1e-3)
    empty = exe.run({"x": feeds["x"][:0]})
    assert next(iter(empty.values())).shape == (0, 16, 12, 12)
    kernels = [s.kernel.rpartition("_")[0] for s in exe.engine.artifact.schedule.steps]
    assert sum(name.startswith("copy") for name in kernels) == 2, kernels  # the borders


@pytest.mark.parametrize(
    "case", ["3x3", "odd channels", "first layer", "depthwise", "small groups"]
)
@pytest.mark.parametrize("x_type, w_type", [(np.uint8, np.uint8), (np.int8, np.int8)])
def test_zero_points_that_filters_do_not_hold_or_that_are_given(case, x_type, w_type):
    shape, filters, attrs = CASES[case]
    x, w = values(*shape, element=x_type), values(*filters, seed=1, element=w_type)
    b = bw.Builder("g")
    points = values(len(w), seed=2, element=w_type)
    given, zero = b.input("z", dtype(x_type).name + "[]"), values(seed=3, element=x_type)
    one, two = b.input("x", text(x)), b.constant(w)
    y = b.integer_conv(one, two, given, b.constant(points), None, **attrs)
    z = b.integer_conv(one, two, b.constant(zero), b.constant(points[:1]), None, **attrs)
    check_graph(b.build(y=y, z=z), {"x": x, "z": np.asarray(zero)})


def test_zero_points_of_filters():
    x, w = values(1, 16, 5, 5, element=np.uint8), values(4, 16, 3, 3, seed=1, element=np.uint8)
    b = bw.Builder("g")
    zeros = b.constant(np.array([128, 128, 128, 128], np.uint8))
    y = b.integer_conv(b.input("x", text(x)), b.constant(w), b.constant(np.uint8(9)), zeros, None)
    check_graph(b.build(y=y), {"x": x})


@pytest.mark.parametrize("shape, filters", [((4, 128, 9, 9), 3), ((4, 3, 9, 9), 7)])
def test_devices_with_little_shared_memory_have_no_boxes(shape, filters):
    w = np.zeros((64, shape[1], filters, filters), np.float16)
    b = bw.Builder("g")
    graph = b.build(y=b.conv(b.input("x", f"f16{list(shape)}"), b.constant(w), pads=(1, 1, 1, 1)))
    for room, is_boxed in ((227 << 10, True), (99 << 10, False)):
        machine = Machine("test", (12, 0), shared_bytes=room)
        families = {source.family for source in build(graph, machine).sources.values()}
        assert any("tma" in family for family in families) == is_boxed, families


def test_a_batch_without_images():
    x = values(0, 32, 5, 5, element=np.float16)
    b = bw.Builder("g")
    w = b.constant(values(8, 32, 3, 3, element=np.float16))
    check_graph(b.build(y=b.conv(b.input("x", text(x)), w)), {"x": x})
