"""Ops of com.microsoft, each against ONNX Runtime on a model of one node."""

import math

import numpy as np
import onnx
import pytest
from one_node import agree, by_bitwright, compare, feeds, model
from onnx import helper

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx import load
from bitwright.frontend.onnx.microsoft.base import REFUSED

SIZES = {2: "batch", 5: "length"}


def draw(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def whole(low, high, *shape, dtype=np.int32):
    return np.random.default_rng((low + 999, high, *shape)).integers(low, high, shape).astype(dtype)


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def number(value, dtype=np.float32):
    return np.array(value, dtype)


@pytest.mark.parametrize(
    "op_type, shapes, attrs",
    [
        ("Gelu", [(2, 3)], {}),
        ("BiasGelu", [(2, 5, 3), (3,)], {}),
        ("FastGelu", [(2, 3)], {}),
        ("FastGelu", [(2, 5, 3), (3,)], {}),
        ("QuickGelu", [(2, 3)], {}),
        ("QuickGelu", [(2, 3)], {"alpha": 1.0}),
        ("ScaledSiLU", [(2, 3)], {"alpha": 1.3}),
        ("ScaledSiLU", [(2, 3), ()], {}),
        ("GatedAdd", [(2, 3), (2, 3), (2, 1)], {}),
        ("GatedRMSNorm", [(2, 3, 8), (4,), (2, 3, 8)], {}),
        ("GatedRMSNorm", [(2, 3, 8), (8,), (2, 3, 8)], {"activation": "sigmoid"}),
        ("BranchwiseRMSNorm", [(2, 3, 8), (24,)], {}),
        ("BranchwiseRMSNorm", [(2, 24), (8,)], {"num_branches": 3}),
        ("Trilu", [(2, 3, 4)], {}),
        ("UnfoldTensor", [(2, 7, 3)], {"dim": 1, "size": 3, "step": 2}),
        ("FusedMatMul", [(2, 3, 4), (2, 5, 4)], {"transB": 1, "alpha": 0.3}),
        ("FusedMatMul", [(3, 2, 5, 4), (2, 5, 4, 6)], {"transBatchA": 1}),
        ("FusedMatMul", [(4, 2, 5, 3), (2, 5, 4, 6)], {"transBatchA": 1, "transA": 1}),
        ("FusedMatMul", [(2, 5, 3, 4), (6, 2, 5, 4)], {"transBatchB": 1, "transB": 1}),
        ("FusedMatMul", [(4,), (4, 5)], {"transA": 1}),
        ("TransposeMatMul", [(2, 4, 3), (2, 5, 4)], {"transA": 1, "transB": 1}),
        ("FusedGemm", [(3, 4), (5, 4), (5,)], {"activation": "Relu", "transB": 1, "alpha": 0.5}),
        ("FusedGemm", [(3, 4), (4, 5)], {"activation": "LeakyRelu", "activation_alpha": 0.3}),
        ("Inverse", [(2, 4, 4)], {}),
        ("CDist", [(4, 3), (5, 3)], {"metric": "euclidean"}),
        ("CDist", [(4, 3), (5, 3)], {"metric": "sqeuclidean"}),
    ],
)
@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "symbolic"])
def test_op_of_floats(op_type, shapes, attrs, dynamic):
    inputs = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    if dynamic and op_type == "BranchwiseRMSNorm":
        dynamic = {2: "batch"}
    compare(op_type, inputs, dynamic=dynamic, tolerance=1e-4, **attrs)


@pytest.mark.parametrize(
    "op_type, shape, attrs",
    [
        ("Affine", (2, 3), {"alpha": 1.3, "beta": 0.7}),
        ("ScaledTanh", (2, 3), {"alpha": 1.3, "beta": 0.7}),
        ("ParametricSoftplus", (2, 3), {"alpha": 1.3, "beta": 0.7}),
        ("Scale", (2, 3), {"scale": 2.0}),
        ("ImageScaler", (1, 3, 4, 5), {"scale": 2.0, "bias": [1.0, 2.0, 3.0]}),
        ("Crop", (1, 3, 6, 7), {"border": [1, 1, 2, 1]}),
        ("Crop", (1, 3, 6, 7), {"border": [1, 2, 0, 0], "scale": [3, 2]}),
    ],
)
def test_old_op_of_the_default_domain(op_type, shape, attrs):
    compare(op_type, [draw(*shape)], domain="", version=9, **attrs)


@pytest.mark.parametrize(
    "activation, params",
    [
        ("Relu", None),
        ("Tanh", None),
        ("Sigmoid", None),
        ("HardSwish", None),
        ("LeakyRelu", [0.2]),
        ("Clip", [-0.5, 0.7]),
        ("HardSigmoid", [0.3, 0.4]),
    ],
)
def test_fused_conv(activation, params):
    attrs = {"activation": activation, **({"activation_params": params} if params else {})}
    operands = [draw(2, 3, 6, 7), draw(4, 3, 3, 3), draw(4), draw(2, 4, 4, 5)]
    compare("FusedConv", operands, **attrs)


def test_fused_conv_takes_the_attributes_of_conv():
    x, w = draw(2, 3, 6, 7), draw(6, 1, 3, 3)
    compare("FusedConv", [x, w], activation="Relu", group=3, auto_pad="SAME_UPPER")
    w = draw(4, 3, 3, 3)
    compare("FusedConv", [x, w], activation="Relu", strides=[2, 2], pads=[1, 1, 0, 0])


def test_pools_and_convolutions_with_channels_last():
    qvalues = whole(0, 256, 1, 6, 7, 3, dtype=np.uint8)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 0, 0, 1]}
    compare("NhwcMaxPool", [qvalues], **attrs)
    x, w, bias, z = draw(1, 6, 7, 3), draw(4, 3, 3, 3), draw(4), draw(1, 4, 5, 4)
    proto = model("NhwcFusedConv", [x, w, bias, z], activation="Relu")
    (found,) = by_bitwright(proto, feeds(proto, [x, w, bias, z]))
    first = [np.moveaxis(x, -1, 1), w, bias, np.moveaxis(z, -1, 1)]
    (expected,) = compare("FusedConv", first, activation="Relu")
    np.testing.assert_array_equal(found, np.moveaxis(expected, 1, -1))


def test_conv_transpose_with_pads_as_operand():
    operands = [draw(1, 3, 4, 4), draw(3, 2, 3, 3), np.array([1, 1, 1, 1]), draw(2)]
    compare("ConvTransposeWithDynamicPads", operands, constants=[2], strides=[2, 2])


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample(mode, padding, align):
    grid = np.clip(draw(2, 4, 3, 2), -1.3, 1.3)
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
    compare("GridSample", [draw(2, 3, 5, 6), grid], **attrs)


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("size", [(4, 5), (3, 1)])
def test_crop_and_resize(mode, size):
    boxes = number([[0, 0, 1, 1], [0.2, 0.1, 0.7, 0.8], [-0.3, 0, 0.5, 1.2], [0.8, 0.9, 0.1, 0.2]])
    operands = [draw(2, 3, 6, 7), boxes, number([0, 1, 1, 0], np.int32), number(size, np.int32)]
    compare("CropAndResize", operands, mode=mode, extrapolation_value=0.5, constants=[3])


def test_movement():
    compare("ExpandDims", [draw(2, 3), number(-1, np.int32)], constants=[1])
    compare("GatherND", [draw(3, 4), np.array([[0, 1], [2, 3]])])
    compare("Trilu", [draw(2, 3, 4), np.array(1)], upper=0)
    compare("Unique", [number([2, 1, 1, 3, 4, 3])], 3)
    slices = [draw(4, 6), np.array([1, 2]), np.array([3, 5])]
    compare("DynamicSlice", slices, domain="", version=9)


@pytest.mark.parametrize(
    "pads, value, attrs",
    [
        ([0, 2, 0, 0], [1.5], {}),
        ([[0, 2, 1, 0]], None, {"mode": "edge"}),
        ([0, 2, 1, 0], None, {"mode": "reflect"}),
    ],
)
def test_pad(pads, value, attrs):
    operands = [draw(2, 3), np.array(pads), None if value is None else number(value)]
    compare("Pad", operands, constants=[1], **attrs)


def test_range():
    compare("Range", [np.array(1.0), np.array(5.0), np.array(0.7)])
    compare("Range", [np.array(1), np.array(5)])
    bounds = [number([n], np.int32) for n in (2, 9, 3)]
    compare("Range", bounds, constants=[0, 1, 2])


@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "symbolic"])
def test_norms_of_sums(dynamic):
    x, skip, gamma, beta, bias = draw(2, 5, 8), draw(2, 5, 8, seed=1), draw(8), draw(8), draw(8)
    options = {"dynamic": dynamic}
    compare("SimplifiedLayerNormalization", [x, gamma], 2, domain="", epsilon=1e-3, **options)
    compare("LayerNormalization", [x, gamma, beta], domain="", version=11, **options)
    compare("SkipLayerNormalization", [x, skip, gamma], **options)
    full = [x, skip, gamma, beta, bias]
    compare("SkipLayerNormalization", full, [1, 0, 0, 1], epsilon=1e-4, **options)
    compare("SkipLayerNormalization", full, 4, **options)
    compare("SkipLayerNormalization", [x, draw(5, 8), gamma, None, bias], **options)
    simple = [x, skip, gamma, bias]
    compare("SkipSimplifiedLayerNormalization", simple, [1, 0, 0, 1], **options)


@pytest.mark.parametrize("dynamic", [None, SIZES], ids=["static", "symbolic"])
def test_embeddings(dynamic):
    ids, segments = whole(0, 11, 2, 5), whole(0, 3, 2, 5)
    mask = number([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    words, places, table, gamma, beta = draw(11, 8), draw(7, 8), draw(3, 8), draw(8), draw(8)
    options = {"dynamic": dynamic}
    full = [ids, segments, words, places, table, gamma, beta, mask]
    compare("EmbedLayerNormalization", full, 2, **options)
    bare = [ids, None, words, places, None, gamma, beta]
    compare("EmbedLayerNormalization", bare, 2, constants=[2, 3], **options)
    positions = [*full[:7], None, whole(0, 7, 2, 5)]
    compare("EmbedLayerNormalization", positions, 3, **options)


def test_group_norm_in_both_layouts():
    x, gamma, beta = draw(2, 6, 3, 4), draw(6), draw(6)
    grouped = x.reshape(2, 2, -1).astype(np.float64)
    centred = grouped - grouped.mean(-1, keepdims=True)
    normal = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5)
    y = normal.reshape(x.shape) * gamma[:, None, None] + beta[:, None, None]
    expected = y / (1 + np.exp(-y))
    attrs = {"groups": 2, "activation": 1}
    proto = model("GroupNorm", [x, gamma, beta], channels_last=0, **attrs)
    agree([expected], [by_bitwright(proto, feeds(proto, [x, gamma, beta]))[0].astype(float)], 1e-5)
    last = [np.ascontiguousarray(np.moveaxis(x, 1, -1)), gamma, beta]
    proto = model("GroupNorm", last, **attrs)
    (found,) = by_bitwright(proto, feeds(proto, last))
    agree([np.moveaxis(expected, 1, -1)], [found.astype(float)], 1e-5)
    skipped = [*last, np.zeros((2, 6), np.float32)]
    proto = model("SkipGroupNorm", skipped, 2, **attrs)
    found, total = by_bitwright(proto, feeds(proto, skipped))
    agree([np.moveaxis(expected, 1, -1)], [found.astype(float)], 1e-5)
    np.testing.assert_array_equal(total, last[0])


@pytest.mark.parametrize(
    "op_type, inputs, attrs, expected",
    [
        (
            "BiasSplitGelu",
            [draw(2, 3, 8), draw(8)],
            {},
            lambda x, b: (x + b)[..., :4] * gelu((x + b)[..., 4:]),
        ),
        ("BiasAdd", [draw(2, 3), draw(3), draw(2, 3)], {}, lambda x, b, s: x + b + s),
        (
            "Rfft",
            [draw(3, 8)],
            {"signal_ndim": 1},
            lambda x: np.stack([np.fft.rfft(x).real, np.fft.rfft(x).imag], -1),
        ),
        (
            "Irfft",
            [draw(3, 5, 2)],
            {"signal_ndim": 1},
            lambda x: np.fft.irfft(x[..., 0] + 1j * x[..., 1]),
        ),
        (
            "ComplexMul",
            [draw(3, 2), draw(3, 2, seed=1)],
            {},
            lambda a, b: (a.copy().view(np.complex64) * b.view(np.complex64)).view(np.float32),
        ),
        ("IsAllFinite", [number([1, np.inf]), draw(3)], {}, lambda x, y: np.array(False)),
        ("IsAllFinite", [number([1, np.inf])], {"isnan_only": 1}, lambda x: np.array(True)),
        (
            "BiasSoftmax",
            [draw(2, 3, 4), draw(1, 1, 4)],
            {"axis": 2, "is_inner_broadcast": 0},
            lambda x, b: np.exp(x + b) / np.exp(x + b).sum(-1, keepdims=True),
        ),
        (
            "MulInteger",
            [
                number([[1, 255]], np.uint8),
                number(3, np.uint8),
                number([[7]], np.uint8),
                number(9, np.uint8),
            ],
            {},
            lambda a, az, b, bz: (a.astype(np.int32) - 3) * (b.astype(np.int32) - 9),
        ),
    ],
)
def test_op_without_a_kernel_in_onnxruntime(op_type, inputs, attrs, expected):
    proto = model(op_type, inputs, **attrs)
    (found,) = by_bitwright(proto, feeds(proto, inputs))
    wanted = np.asarray(expected(*inputs)).astype(found.dtype)
    agree([wanted], [found], 1e-5)


@pytest.mark.parametrize("op_type", sorted(REFUSED))
def test_refusal_names_op_and_reason(op_type):
    with pytest.raises(UnsupportedError, match=rf"com\.microsoft\.{op_type} .*not supported: \w"):
        load(model(op_type, [draw(2)]))


def test_refusal_of_blocked_channels_says_what_to_do():
    with pytest.raises(UnsupportedError, match=r"nchwc\.Conv .*ORT_ENABLE_EXTENDED"):
        load(model("Conv", [draw(2)], domain="com.microsoft.nchwc"))


def test_missing_operand_is_named():
    with pytest.raises(ImportModelError, match=r"BiasGelu.*input 1 is missing"):
        load(model("BiasGelu", [draw(2)]))


def test_unknown_op_is_refused():
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="com.microsoft")
    info = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = helper.make_graph([node], "g", [info], [helper.make_empty_tensor_value_info("y")])
    with pytest.raises(UnsupportedError, match=r"com\.microsoft\.Frobnicate"):
        load(helper.make_model(graph))
