"""Quantize and dequantize arrays, for every scheme.

    integers      q = saturate(rne(x / scale) + zero_point)      x = (q - zero_point) * scale
    floats        q = the nearest finite value to x / scale      x = q * scale
    logarithmic   q = sign(x) * (k + 1), k = rne(-log(|x| / scale) / log(base)), 0 if too small
    binary        q = x >= 0                                     x = scale or -scale

The quotient and the product are f32, as in ONNX, so integer results equal those of the ops
`quantize` and `dequantize` bit for bit. Infinities saturate. NaN is an error in strict mode;
otherwise it quantizes as 0 (the op `quantize` maps it to the lowest value).
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, f8e8m0, f32
from bitwright.ir.quant_params import QuantParams, require_negative_values
from bitwright.ir.quant_types import MIXED, Scheme
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.numeric import narrow
from bitwright.ops.math.cast import cast
from bitwright.ops.quant.quantize import spread
from bitwright.quant.core.levels import magnitudes


def quantize_values(x: Array, parameters: QuantParams, strict: bool = True) -> Array:
    """Quantized x, one value per numpy element (not packed)."""
    parameters.validate(x.shape)
    x = as_f32(x, strict)
    missing = np.isnan(x)
    if missing.any():
        x = np.where(missing, np.float32(0), x)
    kind = parameters.dtype
    require_negative_values(kind, parameters.scheme, x)
    if parameters.scheme is Scheme.binary:
        return (x >= 0).view(np.uint8)
    with np.errstate(over="ignore"):  # infinity saturates
        ratio = np.asarray(x / spread_scale(parameters, x.shape))
    if parameters.scheme is Scheme.logarithmic:
        return _logarithmic_qvalues(ratio, parameters)
    if not kind.is_integer:
        return cast(np.clip(ratio, kind.min, kind.max), kind.element)
    return _integer_qvalues(ratio, parameters)


def as_f32(x: Array, strict: bool = True) -> Array:
    """x in f32. In strict mode NaN and finite numbers beyond f32 are errors; otherwise the latter
    become infinite.
    """
    with np.errstate(over="ignore"):
        narrow_x = x.astype(np.float32, copy=False)
    if not strict:
        return narrow_x
    missing = np.isnan(narrow_x)
    if missing.any():
        raise QuantizationError(
            "NaN cannot be quantized",
            expected="numbers",
            found=f"{int(missing.sum())} NaN among {x.size} values",
            hint="strict=False quantizes NaN as 0",
        )
    if x.dtype == np.float64:
        beyond = np.isinf(narrow_x) & np.isfinite(x)
        if beyond.any():
            raise QuantizationError(
                "a number exceeds f32, the type that quantization computes in",
                expected=f"magnitudes up to {np.finfo(np.float32).max:.4g}",
                found=f"{x[beyond].flat[0]:g}, one of {int(beyond.sum())}",
                hint="Clip or rescale the data; strict=False saturates them",
            )
    return narrow_x


def _integer_qvalues(ratio: Array, parameters: QuantParams) -> Array:
    """Round, add the zero point and clip in f32: numbers beyond 2**24 saturate in any case."""
    kind = parameters.dtype
    np.rint(ratio, out=ratio)
    if parameters.scheme is Scheme.asymmetric:
        ratio += spread_zero_point(parameters, ratio.shape).astype(np.float32)
    low, high = np.array(kind.min, np.float32), np.array(kind.max, np.float32)
    if kind == MIXED:
        assert parameters.axis is not None
        half = np.float32(2) ** (np.asarray(parameters.widths, np.float32) - 1)
        half = along(half, ratio.ndim, parameters.axis)
        low, high = -half, half - 1
    np.clip(ratio, low, high, out=ratio)
    return narrow(ratio, kind.element)


def _logarithmic_qvalues(ratio: Array, parameters: QuantParams) -> Array:
    most = magnitudes(parameters.dtype)
    per_octave = 1.0 / np.log2(parameters.base)
    with np.errstate(divide="ignore"):
        k = np.rint(-np.log2(np.abs(ratio.astype(np.float64))) * per_octave)
    qvalues = np.where(k > most - 1, 0.0, np.maximum(k, 0) + 1)
    return narrow(np.copysign(qvalues, ratio), parameters.dtype.element)


def dequantize_values(qvalues: Array, parameters: QuantParams, to: DType = f32) -> Array:
    """Dequantized values in the type `to`."""
    scale = spread_scale(parameters, qvalues.shape)
    if parameters.scheme is Scheme.binary:
        return narrow(np.where(qvalues != 0, scale, -scale), to)
    if parameters.scheme is Scheme.logarithmic:
        whole = qvalues.astype(np.float64)
        size = parameters.base ** (1 - np.abs(whole))
        return narrow(narrow(np.sign(whole) * size * scale, f32), to)
    values = qvalues.astype(np.float32)
    if parameters.scheme is Scheme.asymmetric:
        values -= spread_zero_point(parameters, qvalues.shape).astype(np.float32)
    if parameters.scale_type == f8e8m0:  # scales are rounded up, so products may exceed f32
        with np.errstate(over="ignore"):
            values *= scale
        np.clip(values, f32.min, f32.max, out=values)
    else:
        values *= scale
    return narrow(values, to)


def spread_scale(parameters: QuantParams, shape: tuple[int, ...]) -> Array:
    """Scales in f32, broadcastable to a tensor of this shape."""
    found = spread(parameters.effective_scale, shape, parameters.axis, parameters.block)
    assert found is not None
    return found


def spread_zero_point(parameters: QuantParams, shape: tuple[int, ...]) -> Array:
    """Zero points, broadcastable to a tensor of this shape."""
    found = spread(parameters.zero_point, shape, parameters.axis, parameters.block)
    assert found is not None
    return found


def along(values: Array, rank: int, axis: int) -> Array:
    """Reshape a vector to broadcast along one axis."""
    at = normalize_axis(axis, rank)
    return values.reshape([-1 if i == at else 1 for i in range(rank)])
