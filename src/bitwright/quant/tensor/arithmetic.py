"""Integer arithmetic on quantized values: centred operands, exact accumulation, requantization.

    operand   q - zero_point, an integer (a bit of `binary` is +1 or -1)
    acc       sums of products, int32 up to 8 bits, int64 for 16 bits; overflow is an error
    m         f32(s) for an f32 result, f32(s / s_y) for a quantized one: f64, rounded once
    t         f32(acc) * m                          q_y = saturate(rne(t) + zero_point_y)

In fixed point, m is an int32 mantissa with a shift: q_y = saturate(rne(acc * M / 2**shift) + zp_y).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir.arrays import Array
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import BINARY, Scheme
from bitwright.ops.core.numeric import narrow
from bitwright.quant.core.quantize_values import spread_scale, spread_zero_point
from bitwright.quant.tensor.tensor import QuantizedTensor

Result = QuantizedTensor | Array

_MANTISSA_BITS = 31


def is_integer_quantized(parameters: QuantParams) -> bool:
    """Whether values are integer multiples of a scale."""
    linear = (Scheme.symmetric, Scheme.asymmetric, Scheme.binary)
    return parameters.dtype.is_integer and parameters.scheme in linear


def centred(tensor: QuantizedTensor) -> Array:
    """q - zero_point: i16 for types of up to 8 bits, else i32."""
    parameters, qvalues = tensor.parameters, tensor.qvalues()
    wide = np.dtype(np.int16 if parameters.dtype.bits <= 8 else np.int32)
    if parameters.dtype == BINARY:
        return (2 * qvalues.astype(np.int8) - 1).astype(wide)
    values = qvalues.astype(wide)
    if parameters.scheme is not Scheme.asymmetric:
        return values
    return np.asarray(values - spread_zero_point(parameters, tensor.shape).astype(wide))


def accumulator(*operands: QuantizedTensor) -> np.dtype[Any]:
    """The accumulator type for products of these operands."""
    wide = any(operand.parameters.dtype.bits > 8 for operand in operands)
    return np.dtype(np.int64 if wide else np.int32)


def exact(sums: Array, element: np.dtype[Any], where: str) -> Array:
    """Convert int64 sums to the accumulator type; raises on overflow."""
    limit = np.iinfo(element)
    if sums.size and (sums.min() < limit.min or sums.max() > limit.max):
        raise QuantizationError(
            f"a sum overflows {element}",
            where=where,
            expected=f"{limit.min}..{limit.max}",
            found=f"{sums.min()}..{sums.max()}",
            hint="Split the contraction, or use a wider type",
        )
    return sums.astype(element)


def scale_of(tensor: QuantizedTensor) -> Array:
    """Scales in f64, broadcastable to the tensor."""
    return spread_scale(tensor.parameters, tensor.shape).astype(np.float64)


def terms(acc: Array, scale: Array, output: QuantParams | None) -> Array:
    """t = f32(acc) * m: real values, or values in units of the output scale."""
    if output is not None:
        scale = scale / spread_scale(output, acc.shape).astype(np.float64)
    with np.errstate(over="ignore"):
        return np.asarray(acc.astype(np.float32) * scale.astype(np.float32))


def rounded(t: Array, output: QuantParams) -> QuantizedTensor:
    """saturate(rne(t) + zero_point), for t in units of the output scale."""
    return _saturated(np.rint(t.astype(np.float64)), output)


def _saturated(rounded: Array, output: QuantParams) -> QuantizedTensor:
    kind = output.dtype
    qvalues = rounded + spread_zero_point(output, rounded.shape).astype(np.float64)
    qvalues = np.clip(qvalues, float(kind.min), float(kind.max))
    return QuantizedTensor.from_qvalues(narrow(qvalues, kind.element), output)


def finish(
    acc: Array, scale: Array, output: QuantParams | None, fixed_point: bool = False
) -> Result:
    """The result of an exact sum in units of `scale`: f32, or quantized with `output`."""
    if output is not None:
        output.validate(acc.shape)
    if output is None or not is_linear(output):
        values = terms(acc, scale, None)
        return values if output is None else QuantizedTensor.quantize(values, output)
    if not fixed_point:
        return rounded(terms(acc, scale, output), output)
    if acc.dtype != np.int32:
        raise QuantizationError("fixed point needs int32 sums", found=acc.dtype)
    multiplier = scale / spread_scale(output, acc.shape).astype(np.float64)
    mantissa, shift = fixed_point_of(np.broadcast_to(multiplier, acc.shape))
    shifted = rounding_shift(acc.astype(np.int64) * mantissa, shift)
    return _saturated(shifted.astype(np.float64), output)


def is_linear(output: QuantParams) -> bool:
    """Whether results are rounded from values in units of the output scale."""
    return is_integer_quantized(output) and output.dtype != BINARY and not output.widths


def fixed_point_of(multiplier: Array) -> tuple[Array, Array]:
    """Mantissa below 2**31 and shift, with multiplier ≈ mantissa / 2**shift."""
    fraction, exponent = np.frexp(np.asarray(multiplier, np.float64))
    mantissa = np.rint(np.ldexp(fraction, _MANTISSA_BITS)).astype(np.int64)
    carried = mantissa == 1 << _MANTISSA_BITS
    mantissa = np.where(carried, mantissa >> 1, mantissa)
    return mantissa, _MANTISSA_BITS - exponent.astype(np.int64) - carried


def rounding_shift(values: Array, shift: Array) -> Array:
    """values / 2**shift, half to even; a negative shift multiplies, and saturates at 2**62."""
    right = np.clip(shift, 0, 62)
    floor = values >> right
    rest = values - (floor << right)
    half = np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), 1)
    up = (rest > half) | ((rest == half) & (floor & 1 == 1))
    near = np.where(shift > 62, 0, floor + (up & (right > 0)))
    left = np.clip(-shift, 0, 62)
    most = np.int64(1 << 62) >> left
    return np.where(shift < 0, np.clip(values, -most, most) << left, near)
