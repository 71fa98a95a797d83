"""Values and arguments that once gave silent wrong results or raw exceptions."""

import warnings

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import BitwrightError, QuantizationError
from bitwright.quant import Observer, quality
from bitwright.quant.tensor.tensor import QuantizedTensor
from bitwright.warn import BitwrightWarning

RNG = np.random.default_rng(0)


# a float bias of a product whose result is f32


@pytest.mark.parametrize("dtype", ["int2", "int4", "int8", "uint8", "int16"])
@pytest.mark.parametrize("fixed_point", [False, True])
def test_a_float_bias_of_qmatmul_is_exact_in_f32(dtype, fixed_point):
    x = bw.quantize_tensor(RNG.normal(size=(3, 16)), dtype)
    w = bw.quantize_tensor(RNG.normal(size=(16, 5)), dtype, axis=1)
    bias = RNG.normal(size=5).astype(np.float32) * 4.3
    plain = bw.quant.qmatmul(x, w, fixed_point=fixed_point)
    found = bw.quant.qmatmul(x, w, bias, fixed_point=fixed_point)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, plain + bias)


def test_a_float_bias_is_added_to_zero_products():
    zero = bw.quantize_tensor(np.zeros((1, 2), np.float32), "int2")
    w = bw.quantize_tensor(np.ones((2, 1), np.float32), "int2")
    assert bw.quant.qmatmul(zero, w, np.array([4.3], np.float32)) == np.float32(4.3)


@pytest.mark.parametrize("dtype", ["int2", "int8", "int16"])
def test_a_float_bias_of_qconv2d_is_exact_in_f32(dtype):
    x = bw.quantize_tensor(RNG.normal(size=(2, 3, 6, 6)), dtype)
    w = bw.quantize_tensor(RNG.normal(size=(4, 3, 3, 3)), dtype, axis=0)
    bias = RNG.normal(size=4).astype(np.float32) * 4.3
    found = bw.quant.qconv2d(x, w, bias)
    np.testing.assert_array_equal(found, bw.quant.qconv2d(x, w) + bias[:, None, None])


def test_an_integer_bias_is_in_units_of_both_scales():
    x = bw.quantize_tensor(RNG.normal(size=(3, 16)), "int8")
    w = bw.quantize_tensor(RNG.normal(size=(16, 5)), "int8")
    unit = np.float64(x.parameters.scale) * np.float64(w.parameters.scale)
    found = bw.quant.qmatmul(x, w, np.full(5, 1000, np.int32))
    np.testing.assert_allclose(found - bw.quant.qmatmul(x, w), 1000 * unit, rtol=1e-4)


# parameters without data


@pytest.mark.parametrize("prefer", ["accuracy", "speed"])
def test_parameters_take_the_data(prefer):
    system, x = bw.QuantizationSystem(), RNG.normal(size=1000) * 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = system.parameters("int8", prefer, x=x)
        assert found == system.parameters("int8", prefer, Observer().add(x))
        assert found == system.parameters("int8", prefer, Observer().add(x).statistics)
        system.create_tensor((2, 3))
    assert quality(x, QuantizedTensor.quantize(x, found)).sqnr > 35


def test_parameters_without_data_warn_that_they_clip():
    with pytest.warns(BitwrightWarning, match=r"clip values to -1\.\.1: pass x= or statistics="):
        assert bw.QuantizationSystem().parameters("int8").scale == np.float32(1 / 127)
    with pytest.raises(QuantizationError, match="both given"):
        bw.QuantizationSystem().parameters("int8", statistics=Observer().add([1.0]), x=[1.0])


# entropy on small samples


@pytest.mark.parametrize("size", [5, 16, 64, 256, 1024, 4096, 16384])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4"])
def test_entropy_of_a_small_sample_is_no_worse_than_the_full_range(size, dtype):
    rng = np.random.default_rng(1)
    for x in (rng.laplace(size=size), rng.normal(size=size), np.maximum(rng.normal(size=size), 0)):
        for observe in (lambda m, x=x: Observer().add(x).calibrate(dtype, m), None):
            made = [
                bw.quantize_tensor(x, dtype, m)
                if observe is None
                else QuantizedTensor.quantize(x, observe(m))
                for m in ("entropy", "minmax")
            ]
            entropy, whole = (quality(x, one).sqnr for one in made)
            assert entropy > whole - 0.5


def test_entropy_notes_where_it_used_the_squared_error():
    few = Observer().add(RNG.laplace(size=200)).calibrate("int8", "entropy")
    assert any("too few values for a histogram" in note for note in few.notes)
    many = Observer().add(RNG.laplace(size=400_000)).calibrate("int8", "entropy")
    assert not many.notes and many.method == few.method == "entropy"


def test_entropy_falls_back_for_the_channels_that_need_it():
    x = np.stack([RNG.laplace(size=200_000), np.zeros(200_000)])
    x[1, :100] = RNG.laplace(size=100)
    found = Observer(0).add(x).calibrate("int8", "entropy")
    assert any("for 1 of 2 scales" in note for note in found.notes)
    alone = Observer(0).add(x[:1]).calibrate("int8", "entropy")
    assert found.scale[0] == alone.scale[0]


def test_an_outlier_does_not_make_a_histogram_sparse():
    x = RNG.normal(size=300_000)
    x[0] = 100
    assert not Observer().add(x).calibrate("int8", "entropy").notes


# invalid arguments


X = RNG.normal(size=(4, 6)).astype(np.float32)
FAULTS = {
    "the range is reversed": lambda: Observer().add(X).calibrate("int8", lambda seen: (5, -5)),
    r"found \(-5, -7\)": lambda: Observer().add(X).calibrate("int8", lambda seen: (-5, -7)),
    "axis 7 is out of range.*an axis of": lambda: bw.quantize_tensor(X, "mixed", axis=7),
    "axis -3 is out of range": lambda: bw.quantize_tensor(X, "mixed", axis=-3),
    "for a scalar": lambda: bw.quantize_tensor(np.float32(3), "mixed", axis=0),
    "not quantized per tensor": lambda: bw.quantize_tensor(X, "mixed"),
    "not a whole number; found 'rows'": lambda: bw.quantize_tensor(X, "mixed", axis="rows"),
    r"not a whole number; found \(0, 1\)": lambda: bw.quantize_tensor(X, "mixed", axis=(0, 1)),
    "not a whole number; found 1.0": lambda: bw.QuantParams.mixed([1.0], [4], 1.0),
    "widths do not match.*expected 4, .*found 2": lambda: bw.quantize_tensor(
        X, "mixed", axis=0, widths=(2, 4)
    ),
    "widths do not match.*found none": lambda: Observer(0).add(X).calibrate("mixed"),
    "the block size is out of range": lambda: bw.quantize_tensor(X, "int8", axis=0, block=-2),
    r"exceeds f32.*found 1e\+300": lambda: bw.quantize_tensor([1e300, 1.0]),
    r"exceeds f32.*one of 2": lambda: QuantizedTensor.quantize(
        np.array([-1e300, 1.0, 1e39]), bw.QuantParams.symmetric("int8", 0.1)
    ),
    "observed values exceed f32": lambda: Observer().add([1e300, 1.0]).calibrate("int8", "mse"),
    "not an array of real numbers": lambda: bw.quantize_tensor([[1], [2, 3]]),
    "real numbers; found complex128": lambda: bw.quantize_tensor(np.array([1 + 2j])),
}


@pytest.mark.parametrize("match", FAULTS)
def test_an_invalid_argument_is_a_clear_error(match):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BitwrightError, match=match):
            FAULTS[match]()


def test_values_beyond_f32_saturate_without_strict():
    found = bw.quantize_tensor(np.array([1e300, 1.0, -1.0]), "int8", strict=False)
    np.testing.assert_allclose(found.dequantize(), [1, 1, -1], rtol=1e-2)
    assert bw.quantize_tensor(np.zeros((0, 3), np.float32), "mixed", axis=0).shape == (0, 3)
