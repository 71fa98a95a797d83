"""Every type x scheme x granularity round-trips within its error bound; others are errors."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.errors import QuantizationError
from bitwright.ir import dtype as ir_dtype
from bitwright.ir import quant_types
from bitwright.ir.quant_types import (
    COMBINATIONS,
    GRANULARITIES,
    PerAxis,
    PerGroup,
    PerTensor,
    Scheme,
)
from bitwright.ops.core import registry
from bitwright.quant import QuantizedTensor, QuantParams, quantize_tensor
from bitwright.quant.core.formats import FORMATS

ALL = [
    (name, scheme, granularity)
    for (name, scheme), held in COMBINATIONS.items()
    for granularity in sorted(held, key=lambda one: one.__name__)
]


def draw(rng, shape, name, scheme):
    x = rng.standard_t(3, size=shape).astype(np.float32) * 10.0 ** rng.integers(-6, 6)
    signed = quant_types.get(name).is_signed or scheme is Scheme.asymmetric
    return x if signed else np.abs(x)


def spread(values, shape, axis, block):
    """Scales broadcast by plain indexing."""
    if axis is None:
        return np.full(shape, values)
    index = np.indices(shape)
    if not block:
        return values[index[axis]]
    index[axis] //= block
    return values[tuple(index)]


def nearest(x, levels):
    """The distance to the nearest level, by exhaustive search."""
    return np.abs(x[..., None] - levels).min(-1)


def assert_within_bound(x, tensor):
    p = tensor.parameters
    scale = spread(p.effective_scale, x.shape, p.axis, p.block).astype(np.float64)
    back = tensor.dequantize().astype(np.float64)
    error = np.abs(back - x)
    slack = 1e-6 * (np.abs(x) + scale)
    kind = p.dtype
    if p.scheme is Scheme.binary:
        np.testing.assert_allclose(back, np.where(x >= 0, scale, -scale))
    elif p.scheme is Scheme.logarithmic:
        most = int(kind.max)
        smallest = scale * p.base ** (1.0 - most)
        ratio = np.abs(x) / np.maximum(np.abs(back), 1e-300)
        border = p.base**0.5 * (1 + 1e-5)
        kept = (back != 0) & (np.abs(x) < scale)
        assert (ratio[kept] < border).all() and (ratio[kept] > 1 / border).all()
        assert (np.abs(x)[back == 0] <= smallest[back == 0] * 1.00001).all()
        assert (np.sign(back) * np.sign(x) >= 0).all()
    elif kind.is_integer:
        zero = spread(p.zero_point.astype(np.int64), x.shape, p.axis, p.block)
        widths = spread(np.array(p.widths), x.shape, p.axis, 0) if p.widths else kind.bits
        low = -(2.0 ** (widths - 1)) if kind.is_signed else 0
        high = low + 2.0**widths - 1
        bound = np.maximum(
            scale / 2, np.maximum(x - (high - zero) * scale, (low - zero) * scale - x)
        )
        assert (error <= bound + slack).all()
    else:
        qvalues = np.arange(2**kind.bits, dtype=np.uint8).view(kind.element.numpy)
        levels = qvalues.astype(np.float64)
        levels = levels[np.isfinite(levels)]
        assert (error <= nearest(x / scale, levels) * scale + slack).all()


@pytest.mark.parametrize(
    "name, scheme, granularity", ALL, ids=lambda v: getattr(v, "__name__", str(v))
)
@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(1,), (7,), (3, 5), (2, 17, 3), (4, 33)]))
def test_every_combination_round_trips_within_its_bound(name, scheme, granularity, seed, shape):
    rng = np.random.default_rng(seed)
    x = draw(rng, shape, name, scheme)
    options = {}
    if granularity is not PerTensor:
        options["axis"] = int(rng.integers(0, len(shape)))
    if granularity is PerGroup:
        options["block"] = int(rng.choice([1, 2, 16, 32]))  # the last block is short
    for method in ("minmax", "mse"):
        tensor = quantize_tensor(x, name, method, scheme=scheme, **options)
        assert tensor.shape == shape
        assert_within_bound(x, tensor)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
def test_block_formats_with_narrow_scales(name, axis):
    x = np.random.default_rng(5).standard_t(4, size=(50, 37)).astype(np.float32)
    minmax = quantize_tensor(x, name, "minmax", axis=axis)
    best = quantize_tensor(x, name, "mse", axis=axis)
    assert minmax.parameters.scale.dtype == ir_dtype(FORMATS[name].scale).numpy
    for tensor in (minmax, best):
        assert_within_bound(x, tensor)
    error = [np.square(t.dequantize() - x).sum() for t in (minmax, best)]
    assert error[1] <= error[0]
    assert best.parameters.scale.dtype == minmax.parameters.scale.dtype


def test_integer_scales_under_a_tensor_scale():
    x = np.random.default_rng(6).normal(size=(8, 64)).astype(np.float32)
    tensor = quantize_tensor(x, "int4", "mse", axis=1, block=16, scale_type="u8")
    assert tensor.parameters.scale.dtype == np.uint8 and tensor.parameters.scale.max() > 200
    assert_within_bound(x, tensor)
    plain = quantize_tensor(x, "int4", "mse", axis=1, block=16)
    assert tensor.nbytes < plain.nbytes
    ratio = np.square(tensor.dequantize() - x).sum() / np.square(plain.dequantize() - x).sum()
    assert ratio < 1.05


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e35])
@pytest.mark.parametrize("scale_type", ["f16", "bf16", "f8e4m3fn", "f8e8m0", "u8"])
def test_narrow_scales_work_at_any_magnitude(size, scale_type):
    x = (np.random.default_rng(6).normal(size=(8, 64)) * size).astype(np.float32)
    tensor = quantize_tensor(x, "int8", "minmax", axis=1, block=16, scale_type=scale_type)
    error = np.abs(tensor.dequantize() - x).max() / np.abs(x).max()
    assert error < 0.04  # a scale of 3 bits of fraction may clip the largest value


def test_combinations_outside_the_table_are_errors():
    x = np.ones((2, 3), np.float32)
    choices = {PerTensor: {}, PerAxis: {"axis": 1}, PerGroup: {"axis": 1, "block": 2}}
    for name, scheme, granularity in itertools.product(quant_types.TYPES, Scheme, GRANULARITIES):
        if (name, scheme, granularity) not in ALL:
            with pytest.raises(QuantizationError, match=r"no .* scheme|is not quantized"):
                quantize_tensor(x, name, "minmax", scheme=scheme, **choices[granularity])


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int4", "uint2", "f8e4m3fn", "f8e5m2"])
@pytest.mark.parametrize("place", [{}, {"axis": 1}, {"axis": 2, "block": 3}])
def test_results_are_bit_identical_to_the_ops(name, place):
    rng = np.random.default_rng(8)
    x = (rng.normal(size=(3, 4, 7)) * 50).astype(np.float32)
    x[0, 0] = [np.inf, -np.inf, 1e38, -1e38, 0, -0.0, 1e-40]
    scheme = "asymmetric" if quant_types.get(name).is_integer else "symmetric"
    parameters = quantize_tensor(x, name, "minmax", scheme=scheme, **place).parameters
    tensor = QuantizedTensor.quantize(x, parameters)
    element = parameters.dtype.element
    zero = parameters.zero_point.astype(element.numpy) if scheme == "asymmetric" else None
    inputs = [x, parameters.scale, zero]
    place = {"axis": None, "block": 0, **place}
    options = {"to": element, "saturate": True, "precision": None}
    qvalues = registry.get("quantize").reference(*inputs, **place, **options)
    np.testing.assert_array_equal(tensor.qvalues().view(np.uint8), qvalues.view(np.uint8))
    back = registry.get("dequantize").reference(qvalues, *inputs[1:], **place, to=None)
    np.testing.assert_array_equal(tensor.dequantize(), back)


def test_nan_is_an_error_or_the_zero_point_and_infinity_saturates():
    x = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    parameters = QuantParams.asymmetric("uint8", 0.5, 10)
    with pytest.raises(QuantizationError, match=r"NaN cannot be quantized.*1 NaN among 4"):
        QuantizedTensor.quantize(x, parameters)
    with pytest.raises(QuantizationError, match="NaN"):
        quantize_tensor(x, "int8")
    assert QuantizedTensor.quantize(x, parameters, strict=False).qvalues().tolist() == [
        10,
        255,
        0,
        12,
    ]
    loose = quantize_tensor(x, "int8", strict=False)
    assert loose.dequantize().tolist()[0] == 0 and loose.qvalues()[1] == 127
    logs = QuantParams.logarithmic("int8", 1.0)
    assert QuantizedTensor.quantize(x, logs, False).dequantize().tolist() == [0, 1, -1, 1]
    e4m3 = QuantParams.symmetric("f8e4m3fn", 1.0)
    assert QuantizedTensor.quantize(x, e4m3, False).dequantize().tolist() == [0, 448, -448, 1]


@pytest.mark.parametrize("scheme", ["symmetric", "logarithmic"])
def test_unsigned_types_refuse_negative_data(scheme):
    with pytest.raises(QuantizationError, match="cannot represent negative"):
        quantize_tensor(np.array([-1.0, 2.0]), "uint8", scheme=scheme)
    parameters = QuantParams("uint8", scheme, 1.0)
    with pytest.raises(QuantizationError, match="cannot represent negative"):
        QuantizedTensor.quantize(np.array([-1.0]), parameters)


def test_binary_is_the_mean_magnitude_with_zero_positive():
    x = np.array([[0, -1, 2], [4, -4, -4]], np.float32)
    tensor = quantize_tensor(x, "binary", axis=0)
    np.testing.assert_allclose(tensor.parameters.scale, [1, 4])
    assert tensor.dequantize().tolist() == [[1, -1, 1], [4, -4, -4]]


def test_logarithmic_quantized_values_by_hand():
    parameters = QuantParams.logarithmic("int4", 8.0)
    x = np.array([8, 4, -2, 1, 0, 6, 5.5, 100, -0.12, -0.06], np.float32)
    tensor = QuantizedTensor.quantize(x, parameters)
    assert tensor.qvalues().astype(int).tolist() == [1, 2, -3, 4, 0, 1, 2, 1, -7, 0]
    assert tensor.dequantize().tolist() == [8, 4, -2, 1, 0, 8, 4, 8, -0.125, 0]
    finer = QuantParams.logarithmic("int8", 1.0, base=2**0.5)
    x = np.geomspace(1e-6, 1, 100).astype(np.float32)
    back = QuantizedTensor.quantize(x, finer).dequantize()
    assert (np.abs(np.log2(back / x)) <= 0.2501).all()


def test_mixed_widths_go_to_channels_with_large_errors():
    rng = np.random.default_rng(9)
    x = (rng.normal(size=(6, 200)) * [[1], [1], [1], [1], [1], [100]]).astype(np.float32)
    tensor = quantize_tensor(x, "mixed", axis=0, bits=4)
    widths = tensor.parameters.widths
    assert np.mean(widths) <= 4 and widths[5] == 8
    assert_within_bound(x, tensor)
    assert tensor.data.nbytes == sum(200 * width // 8 for width in widths)
    same = quantize_tensor(x, "int4", axis=0)
    errors = [np.square(t.dequantize() - x).sum() for t in (tensor, same)]
    assert errors[0] < errors[1] / 2
    given = quantize_tensor(x.T, "mixed", axis=1, widths=[2, 4, 8, 2, 4, 8])
    assert given.shape == (200, 6) and given.qvalues().shape == (200, 6)
    assert_within_bound(x.T, given)


@pytest.mark.parametrize("x", [np.zeros((0, 3)), np.float16(2.5), ml_dtypes.bfloat16(1), 3])
def test_odd_arrays(x):
    tensor = quantize_tensor(x, "int8")
    assert tensor.shape == np.shape(x)
    np.testing.assert_allclose(tensor.dequantize(), np.asarray(x, np.float32), rtol=1e-2)
