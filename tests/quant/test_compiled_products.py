"""Compiled products of quantized tensors are bit-identical to numpy."""

import gc

import numpy as np
import pytest

import bitwright as bw
from bitwright.errors import QuantizationError
from bitwright.quant import QuantParams, quantize_tensor
from bitwright.quant.tensor import compiled_elementwise, compiled_products
from bitwright.quant.tensor.tensor import QuantizedTensor

rng = np.random.default_rng(0)
BYTES = QuantParams.asymmetric("uint8", 0.7, 117)


def tensor(kind, *shape, **options):
    x = rng.normal(size=shape).astype(np.float32)
    scheme = "asymmetric" if kind.startswith("u") else None
    return quantize_tensor(x, kind, "minmax", scheme=scheme, **options)


@pytest.fixture
def both(monkeypatch):
    """Runs a product in numpy and in a compiled kernel, at any size, and compares bits."""
    ran = []
    run = compiled_products.program_of

    def program(graph):
        ran.append(graph)
        return run(graph)

    monkeypatch.setattr(compiled_products, "program_of", program)

    def compare(product, compiled=True):
        monkeypatch.setattr(compiled_products, "MIN_TERMS", 1 << 60)
        expected = product()
        monkeypatch.setattr(compiled_products, "MIN_TERMS", 0)
        monkeypatch.setattr(compiled_products, "TERMS_AT_ONCE", 0)
        before = len(ran)
        found = product()
        assert (len(ran) > before) == compiled
        if isinstance(expected, QuantizedTensor):
            assert found.parameters == expected.parameters
            expected, found = expected.qvalues(), found.qvalues()
        assert found.dtype == expected.dtype and found.shape == expected.shape
        np.testing.assert_array_equal(
            found.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8)
        )

    return compare


@pytest.mark.parametrize("x_kind", ["uint8", "int8", "uint4", "binary"])
@pytest.mark.parametrize("w_kind", ["int8", "uint8", "int4"])
def test_matrices(both, x_kind, w_kind):
    x, w = tensor(x_kind, 7, 33), tensor(w_kind, 33, 17, axis=1)
    bias = rng.normal(size=17).astype(np.float32)
    both(lambda: bw.quant.qmatmul(x, w))
    both(lambda: bw.quant.qmatmul(x, w, bias, BYTES))


def test_batches_integer_biases_and_wide_results(both):
    x, w = tensor("uint8", 2, 3, 5, 16), tensor("int8", 16, 9)
    bias = rng.integers(-999, 999, 9).astype(np.int32)
    both(lambda: bw.quant.qmatmul(x, w, bias))
    wide = QuantParams.symmetric("int16", rng.uniform(0.1, 1, 9), axis=3)
    both(lambda: bw.quant.qmatmul(x, w, None, wide))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_convolutions(both, groups):
    x = tensor("uint8", 2, 6, 9, 11)
    w = tensor("int8", 12, 6 // groups, 3, 2, axis=0)
    bias = rng.normal(size=12).astype(np.float32)
    attrs = {"strides": (2, 1), "pads": (1, 0, 2, 1), "groups": groups}
    both(lambda: bw.quant.qconv2d(x, w, bias, **attrs))
    both(lambda: bw.quant.qconv2d(x, w, bias, BYTES, **attrs))


def test_cases_that_numpy_computes(both):
    x, w = tensor("uint8", 4, 8), tensor("int8", 8, 5)
    both(lambda: bw.quant.qmatmul(x, w, None, BYTES, fixed_point=True), compiled=False)
    both(lambda: bw.quant.qmatmul(tensor_rows, w), compiled=False)
    both(lambda: bw.quant.qmatmul(x, tensor_blocks), compiled=False)
    both(lambda: bw.quant.qmatmul(tensor_16, w), compiled=False)
    both(lambda: bw.quant.qmatmul(x, w, None, QuantParams.symmetric("int4", 1.0)), False)
    both(lambda: bw.quant.qmatmul(tensor_none, w), compiled=False)


tensor_rows = tensor("uint8", 4, 8, axis=0)
tensor_blocks = tensor("int4", 8, 5, axis=0, block=4)
tensor_16 = tensor("int16", 4, 8)
tensor_none = QuantizedTensor.from_qvalues(
    np.zeros((0, 8), np.uint8), QuantParams.asymmetric("uint8", 1.0, 3)
)


def test_overflow_is_an_error(both, monkeypatch):
    plain = QuantParams.symmetric("int8", 1.0)
    x = QuantizedTensor.from_qvalues(np.full((1, 140000), 127, np.int8), plain)
    w = QuantizedTensor.from_qvalues(np.full((140000, 2), 127, np.int8), plain)
    monkeypatch.setattr(compiled_products, "TERMS_AT_ONCE", 0)
    with pytest.raises(QuantizationError, match="a sum overflows int32"):
        bw.quant.qmatmul(x, w)


def test_a_program_takes_other_rows_and_is_freed_with_its_weight(monkeypatch):
    made = []
    run = compiled_products.program_of
    monkeypatch.setattr(compiled_products, "MIN_TERMS", 0)
    monkeypatch.setattr(compiled_products, "program_of", lambda g: made.append(g) or run(g))
    w = tensor("int8", 12, 5)
    for rows in (3, 3, 8, 1):  # the first time in numpy
        bw.quant.qmatmul(tensor("uint8", rows, 12), w)
    assert len(made) == 1
    held = len(compiled_products._WEIGHTS)
    del w
    gc.collect()
    assert len(compiled_products._WEIGHTS) == held - 1


@pytest.mark.parametrize("kinds", [("uint8", "int8"), ("int4", "uint8"), ("int8", "int8")])
@pytest.mark.parametrize("output", [None, BYTES, QuantParams.symmetric("int8", 0.02)])
def test_elementwise_sums_and_products(monkeypatch, kinds, output):
    x, y = (tensor(kind, 7, 33) for kind in kinds)
    ops = [lambda: bw.quant.qadd(x, y, output), lambda: bw.quant.qmul(x, y, output)]
    if output is not None:
        ops.append(lambda: bw.quant.requantize(x, output))
    for op in ops:
        monkeypatch.setattr(compiled_elementwise, "MIN_ELEMENTS", 1 << 60)
        expected = op()
        monkeypatch.setattr(compiled_elementwise, "MIN_ELEMENTS", 0)
        op()
        found = op()
        if output is not None:
            assert found.parameters == expected.parameters
            found, expected = found.qvalues(), expected.qvalues()
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert any(compiled_elementwise._PROGRAMS.values())
