"""Operations on quantized tensors against a plain int64 reference written here."""

import itertools
import warnings

import numpy as np
import pytest
import torch

import bitwright as bw
from bitwright import warn
from bitwright.errors import BitwrightError, QuantizationError
from bitwright.quant import QuantParams, quantize_tensor
from bitwright.quant.tensor.arithmetic import fixed_point_of, rounding_shift

P = QuantParams
KINDS = ["int8", "uint8", "int4", "uint4", "int2", "binary", "int16"]


def tensor(seed, shape, kind="int8", **options):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    scheme = {"uint8": "asymmetric", "uint4": "asymmetric", "binary": "binary"}.get(kind)
    return quantize_tensor(x, kind, "minmax", scheme=scheme, **options)


def whole(t):
    """q - zero_point in int64, broadcast by plain indexing."""
    qvalues = t.qvalues().astype(np.int64)
    if t.parameters.dtype.name == "binary":
        return 2 * qvalues - 1
    return qvalues - plain(t.parameters.zero_point.astype(np.int64), t)


def plain(values, t):
    p = t.parameters
    if p.axis is None:
        return np.full(t.shape, values)
    index = np.indices(t.shape)
    if not p.block:
        return values[index[p.axis]]
    index[p.axis] //= p.block
    return values[tuple(index)]


def scales(t):
    return plain(t.parameters.scale.astype(np.float64), t)


def requantize(acc, scale, p):
    """The contract's sequence: m rounded once to f32, one f32 product, rne, zero point, clip."""
    like = type("Like", (), {"parameters": p, "shape": acc.shape})
    m = (scale / plain(p.scale.astype(np.float64), like)).astype(np.float32)
    t = acc.astype(np.float32) * m
    zero = plain(p.zero_point.astype(np.int64), like)
    return np.clip(np.rint(t.astype(np.float64)) + zero, p.dtype.min, p.dtype.max)


def check(found, qvalues):
    np.testing.assert_array_equal(found.qvalues().astype(np.int64), qvalues.astype(np.int64))


OUTPUTS = [P.symmetric("int8", 0.11), P.asymmetric("uint8", 0.07, 131), P.symmetric("int16", 1e-3)]


@pytest.mark.parametrize(
    "kinds", list(itertools.product(KINDS, ["int8", "int4", "uint8", "int16"]))
)
def test_matmul_equals_the_int64_reference(kinds):
    for seed, (m, k, n) in enumerate([(1, 1, 1), (7, 33, 5), (16, 17, 127)]):
        x = tensor(seed, (m, k), kinds[0], **({"axis": 0} if seed == 1 else {}))
        w = tensor(seed + 9, (k, n), kinds[1], **({"axis": 1} if seed else {}))
        acc = whole(x) @ whole(w)
        unit = scales(x)[:, :1] * scales(w)[:1, :]
        y = bw.quant.qmatmul(x, w)
        np.testing.assert_array_equal(y, acc.astype(np.float32) * unit.astype(np.float32))
        for output in OUTPUTS:
            check(bw.quant.qmatmul(x, w, output=output), requantize(acc, unit, output))


def test_matmul_takes_batches_biases_and_channelled_outputs():
    x, w = tensor(0, (2, 3, 8), "uint8"), tensor(1, (8, 5), axis=1)
    bias = np.linspace(-1, 1, 5).astype(np.float32)
    unit = scales(x)[..., :1] * scales(w)[:1]
    acc = whole(x) @ whole(w) + np.rint(bias / (scales(x).flat[0] * scales(w)[0])).astype(np.int64)
    output = P.symmetric("int8", np.linspace(0.02, 0.1, 5), axis=2)
    check(bw.quant.qmatmul(x, w, bias, output), requantize(acc, unit, output))
    units = np.arange(5, dtype=np.int32)
    found = bw.quant.qmatmul(x, w, units)
    exact = (whole(x) @ whole(w) + units).astype(np.float32) * unit.astype(np.float32)
    np.testing.assert_array_equal(found, exact)
    per_token = tensor(0, (6, 8), axis=0)  # rows with different scales: no integer bias
    expected = bw.quant.qmatmul(per_token, w) + bias
    np.testing.assert_array_equal(bw.quant.qmatmul(per_token, w, bias), expected)


def test_matmul_with_blocks_sums_each_exactly():
    x = tensor(2, (3, 20), "uint8")
    for w in (tensor(3, (20, 4), "int4", axis=0, block=8), tensor(3, (20, 4), axis=0)):
        size = w.parameters.block or 1
        total = np.float32(0)
        for start in range(0, 20, size):
            own = slice(start, start + size)
            acc = whole(x)[:, own] @ whole(w)[own]
            unit = (scales(x)[:, :1] * scales(w)[start : start + 1]).astype(np.float32)
            total = total + acc.astype(np.float32) * unit
        np.testing.assert_array_equal(bw.quant.qmatmul(x, w), total)
        np.testing.assert_allclose(total, x.dequantize() @ w.dequantize(), rtol=1e-4, atol=1e-5)


def reference_conv(x, w, stride, pad, dilation, groups):
    """A convolution in int64 by summing shifted images."""
    x = np.pad(x, ((0, 0), (0, 0), (pad[0], pad[2]), (pad[1], pad[3])))
    height = (x.shape[2] - dilation[0] * (w.shape[2] - 1) - 1) // stride[0] + 1
    width = (x.shape[3] - dilation[1] * (w.shape[3] - 1) - 1) // stride[1] + 1
    out = np.zeros((len(x), len(w), height, width), np.int64)
    each, own = x.shape[1] // groups, len(w) // groups
    for m, c, i, j in np.ndindex(w.shape):
        image = x[:, m // own * each + c, i * dilation[0] :, j * dilation[1] :]
        image = image[:, :: stride[0], :: stride[1]][:, :height, :width]
        out[:, m] += w[m, c, i, j] * image
    return out


@pytest.mark.parametrize("kinds", [("uint8", "int8"), ("int8", "int4"), ("int16", "int8")])
@pytest.mark.parametrize(
    "shape, weight, stride, pad, dilation, groups",
    [
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        ((2, 3, 7, 9), (5, 3, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
        ((1, 4, 8, 7), (4, 1, 3, 3), (2, 2), (0, 1, 2, 1), (1, 1), 4),
        ((2, 4, 9, 9), (6, 2, 2, 3), (1, 2), (1, 0, 0, 1), (2, 1), 2),
    ],
)
def test_conv2d_equals_the_int64_reference(kinds, shape, weight, stride, pad, dilation, groups):
    x, w = tensor(4, shape, kinds[0]), tensor(5, weight, kinds[1], axis=0)
    acc = reference_conv(whole(x), whole(w), stride, pad, dilation, groups)
    bias = np.arange(weight[0], dtype=np.int32) * 3
    acc += bias[:, None, None]
    unit = scales(x).flat[0] * w.parameters.scale.astype(np.float64)[:, None, None]
    options = {"strides": stride, "pads": pad, "dilations": dilation, "groups": groups}
    found = bw.quant.qconv2d(x, w, bias, **options)
    np.testing.assert_array_equal(found, acc.astype(np.float32) * unit.astype(np.float32))
    check(bw.quant.qconv2d(x, w, bias, OUTPUTS[1], **options), requantize(acc, unit, OUTPUTS[1]))
    theirs = torch.nn.functional.conv2d(
        torch.nn.functional.pad(
            torch.from_numpy(x.dequantize()), (pad[1], pad[3], pad[0], pad[2])
        ),
        torch.from_numpy(w.dequantize()),
        torch.from_numpy((bias * unit.reshape(-1)).astype(np.float32)),
        stride, 0, dilation, groups,
    )  # fmt: skip
    np.testing.assert_allclose(found, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_add_and_mul_broadcast(kind):
    x, y = tensor(6, (2, 3, 4), kind, axis=1), tensor(7, (3, 1), "int8", axis=0)
    for output in (OUTPUTS[1], P.symmetric("int8", [0.05, 0.1], axis=0)):
        like = type("Like", (), {"parameters": output, "shape": x.shape})
        step = plain(output.scale.astype(np.float64), like)
        t = sum(
            (whole(one).astype(np.float32) * (scales(one) / step).astype(np.float32))
            for one in (x, y)
        )
        zero = plain(output.zero_point.astype(np.int64), like)
        qvalues = np.clip(np.rint(t) + zero, output.dtype.min, output.dtype.max)
        check(bw.quant.qadd(x, y, output), qvalues)
        product = whole(x) * whole(y)
        check(bw.quant.qmul(x, y, output), requantize(product, scales(x) * scales(y), output))
    np.testing.assert_allclose(bw.quant.qadd(x, y), x.dequantize() + y.dequantize(), atol=1e-5)
    np.testing.assert_allclose(bw.quant.qmul(x, y), x.dequantize() * y.dequantize(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "uint8", "uint4", "f8e4m3fn"])
def test_relu_is_exact_on_quantized_values(kind):
    x = tensor(8, (3, 5), kind, axis=0)
    found = bw.quant.qrelu(x)
    np.testing.assert_array_equal(found.dequantize(), np.maximum(x.dequantize(), 0))
    assert found.parameters == x.parameters
    logs = quantize_tensor(np.linspace(-2, 2, 9), "int4", scheme="logarithmic")
    np.testing.assert_array_equal(
        bw.quant.qrelu(logs).dequantize(), np.maximum(logs.dequantize(), 0)
    )
    with pytest.raises(QuantizationError, match="cannot represent 0"):
        bw.quant.qrelu(tensor(0, (3,), "binary"))


@pytest.mark.parametrize("kind", ["int8", "uint8", "int4"])
@pytest.mark.parametrize("ceil", [False, True])
def test_pooling(kind, ceil):
    x = tensor(9, (2, 3, 7, 8), kind, axis=1)
    found = bw.quant.qmax_pool2d(x, (3, 2), (2, 2), (1, 0, 1, 0), ceil=ceil)
    real = torch.from_numpy(x.dequantize())
    theirs = torch.nn.functional.max_pool2d(real, (3, 2), 2, (1, 0), ceil_mode=ceil)
    np.testing.assert_array_equal(found.dequantize(), theirs)

    output = P.asymmetric("uint8", 0.02, 100)
    mean = bw.quant.qaverage_pool2d(x, (3, 2), (2, 2), (1, 0, 1, 0), output, ceil)
    values = whole(x)
    for n, c, i, j in np.ndindex(mean.shape):
        rows = slice(max(2 * i - 1, 0), min(2 * i + 2, 7))
        cells = values[n, c, rows, 2 * j : min(2 * j + 2, 8)]
        unit = scales(x)[n, c, 0, 0] / cells.size
        expected = requantize(np.array([cells.sum()]), np.array([unit]), output)
        assert mean.qvalues()[n, c, i, j] == expected[0]
    assert bw.quant.qaverage_pool2d(x, (2, 2)).parameters == x.parameters


def test_concat_with_and_without_requantization():
    x, y = tensor(10, (2, 3), axis=0), tensor(11, (4, 3), axis=0)
    both = bw.quant.qconcat([x, y], 0)
    expected = np.concatenate([x.dequantize(), y.dequantize()])
    np.testing.assert_array_equal(both.dequantize(), expected)
    with pytest.raises(QuantizationError, match="different parameters"):
        bw.quant.qconcat([tensor(1, (2, 2)), tensor(2, (2, 2))], 1)
    x, y = tensor(1, (2, 2)), tensor(2, (2, 3), "uint8")
    joined = bw.quant.qconcat([x, y], 1, OUTPUTS[1])
    qvalues = [requantize(whole(one), scales(one), OUTPUTS[1]) for one in (x, y)]
    check(joined, np.concatenate(qvalues, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_requantize_equals_the_reference(kind):
    x = tensor(12, (5, 6), kind, axis=1)
    for output in OUTPUTS:
        check(bw.quant.requantize(x, output), requantize(whole(x), scales(x), output))


def test_fixed_point_is_the_exact_quotient_rounded_half_to_even():
    rng = np.random.default_rng(13)
    values = rng.integers(-(2**31), 2**31, 500)
    multipliers = 2.0 ** rng.uniform(-40, 3, 500)
    mantissa, shift = fixed_point_of(multipliers)
    assert (mantissa < 2**31).all() and (mantissa >= 2**30).all()
    np.testing.assert_allclose(mantissa / 2.0**shift, multipliers, rtol=2**-30)
    found = rounding_shift(values * mantissa, shift)
    for value, m, s, got in zip(values, mantissa, shift, found, strict=True):
        exact = int(value) * int(m)  # Python's round of a fraction is half to even
        expected = exact << -int(s) if s < 0 else round_half_even(exact, int(s))
        assert got == expected
    x, w = tensor(14, (5, 40), "uint8"), tensor(15, (40, 6), axis=1)
    plain_qvalues = bw.quant.qmatmul(x, w, output=OUTPUTS[1]).qvalues().astype(int)
    fixed = bw.quant.qmatmul(x, w, output=OUTPUTS[1], fixed_point=True).qvalues().astype(int)
    assert np.abs(plain_qvalues - fixed).max() <= 1


def round_half_even(value, shift):
    quotient, rest = divmod(value, 1 << shift)
    twice = 2 * rest - (1 << shift)
    return quotient + (twice > 0 or (twice == 0 and quotient % 2 == 1))


def test_float_and_logarithmic_types_warn_that_they_compute_in_f32():
    warn.forget()
    x = quantize_tensor(np.linspace(-1, 1, 12).reshape(3, 4), "f8e4m3fn")
    w = tensor(16, (4, 2))
    with pytest.warns(
        warn.BitwrightWarning, match="qmatmul of symmetric f8e4m3fn.*computed in f32"
    ):
        found = bw.quant.qmatmul(x, w)
    np.testing.assert_allclose(found, x.dequantize() @ w.dequantize(), rtol=1e-5)
    warn.forget()
    logs = quantize_tensor(np.linspace(-1, 1, 12).reshape(3, 4), "int8", scheme="logarithmic")
    with pytest.warns(warn.BitwrightWarning, match="logarithmic int8"):
        qvalues = bw.quant.qadd(logs, logs, OUTPUTS[0])
    np.testing.assert_allclose(qvalues.dequantize(), 2 * logs.dequantize(), atol=0.06)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bw.quant.qmatmul(tensor(1, (2, 4)), w)


def test_int32_overflow_is_an_error():
    size = 40_000
    ones = bw.QuantizedTensor.from_qvalues(np.full((1, size), 255), P.asymmetric("uint8", 1.0, 0))
    with pytest.raises(QuantizationError, match="a sum overflows int32"):
        bw.quant.qmatmul(ones, ones.transpose())
    assert bw.quant.qmatmul(ones, tensor(0, (size, 1), "int16")).shape == (1, 1)


def test_errors_of_operands():
    with pytest.raises(QuantizationError, match="matrix shapes do not match"):
        bw.quant.qmatmul(tensor(0, (2, 3)), tensor(0, (2, 3)))
    with pytest.raises(QuantizationError, match="axis 1, which is contracted"):
        bw.quant.qconv2d(tensor(0, (1, 2, 3, 3), axis=1), tensor(0, (1, 2, 1, 1)))
    with pytest.raises(QuantizationError, match="wrong rank"):
        bw.quant.qmax_pool2d(tensor(0, (2, 3)), (1, 1))
    with pytest.raises(BitwrightError, match="groups"):
        bw.quant.qconv2d(tensor(0, (1, 2, 3, 3)), tensor(0, (1, 2, 1, 1)), groups=3)
    with pytest.raises(QuantizationError, match="no tensors to concatenate"):
        bw.quant.qconcat([], 0)
