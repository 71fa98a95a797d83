"""Between numbers and codes: what every scheme does to an array.

    integers      q = saturate(rne(x / scale) + zero_point)      x = (q - zero_point) * scale
    floats        q = the nearest finite value to x / scale      x = q * scale
    logarithmic   q = sign(x) * (k + 1), k = rne(-log(|x| / scale) / log(base)), 0 if too small
    binary        q = x >= 0                                     x = scale or -scale

The quotient and the product are f32, as in ONNX, so the integer results are those of the ops
`quantize` and `dequantize` to the bit. Infinities saturate, nothing wraps; NaN is an error in
strict mode and otherwise becomes the code of 0 (the op `quantize`: the lowest code).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir.dtype import DType, f8e8m0, f32
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.numeric import narrow
from bitwright.ops.math.cast import cast
from bitwright.ops.quant.quantize import spread
from bitwright.quant.core.levels import magnitudes
from bitwright.quant.core.parameters import QuantizationParameters, require_qvalues_for
from bitwright.quant.core.types import MIXED, Scheme

Array = np.ndarray[Any, Any]


def encode(x: Array, parameters: QuantizationParameters, strict: bool = True) -> Array:
    """The codes of x, one a numpy element."""
    parameters.validate(x.shape)
    x = as_f32(x, strict)
    missing = np.isnan(x)
    if missing.any():
        x = np.where(missing, np.float32(0), x)
    kind = parameters.dtype
    require_qvalues_for(kind, parameters.scheme, x)
    if parameters.scheme is Scheme.binary:
        return (x >= 0).view(np.uint8)
    with np.errstate(over="ignore"):  # to infinity, which saturates
        ratio = np.asarray(x / spread_scale(parameters, x.shape))
    if parameters.scheme is Scheme.logarithmic:
        return _logarithmic_qvalues(ratio, parameters)
    if not kind.is_integer:
        return cast(np.clip(ratio, kind.min, kind.max), kind.element)
    return _integer_qvalues(ratio, parameters)


def as_f32(x: Array, strict: bool = True) -> Array:
    """x in f32. Strict, NaN and finite numbers beyond f32 are errors; else the latter become
    infinities.
    """
    with np.errstate(over="ignore"):
        narrow_x = x.astype(np.float32, copy=False)
    if not strict:
        return narrow_x
    missing = np.isnan(narrow_x)
    if missing.any():
        raise QuantizationError(
            "NaN has no code",
            expected="numbers",
            found=f"{int(missing.sum())} NaN among {x.size} values",
            hint="strict=False takes them for 0",
        )
    if x.dtype == np.float64:
        beyond = np.isinf(narrow_x) & np.isfinite(x)
        if beyond.any():
            raise QuantizationError(
                "a number is beyond f32, which quantizing computes in",
                expected=f"magnitudes up to {np.finfo(np.float32).max:.4g}",
                found=f"{x[beyond].flat[0]:g}, one of {int(beyond.sum())}",
                hint="Clip or rescale the data; strict=False takes them for infinities",
            )
    return narrow_x


def _integer_qvalues(ratio: Array, parameters: QuantizationParameters) -> Array:
    """In f32: whole numbers beyond its exact range saturate whatever is added to them."""
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


def _logarithmic_qvalues(ratio: Array, parameters: QuantizationParameters) -> Array:
    most = magnitudes(parameters.dtype)
    per_octave = 1.0 / np.log2(parameters.base)
    with np.errstate(divide="ignore"):
        k = np.rint(-np.log2(np.abs(ratio.astype(np.float64))) * per_octave)
    qvalues = np.where(k > most - 1, 0.0, np.maximum(k, 0) + 1)
    return narrow(np.copysign(qvalues, ratio), parameters.dtype.element)


def decode(qvalues: Array, parameters: QuantizationParameters, to: DType = f32) -> Array:
    """The numbers that codes stand for."""
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
    if parameters.scale_type == f8e8m0:  # rounded up, so that the largest code may be beyond f32
        with np.errstate(over="ignore"):
            values *= scale
        np.clip(values, f32.min, f32.max, out=values)
    else:
        values *= scale
    return narrow(values, to)


def spread_scale(parameters: QuantizationParameters, shape: tuple[int, ...]) -> Array:
    """The scales in f32, ready to broadcast over a tensor of this shape."""
    found = spread(parameters.effective_scale, shape, parameters.axis, parameters.block)
    assert found is not None
    return found


def spread_zero_point(parameters: QuantizationParameters, shape: tuple[int, ...]) -> Array:
    found = spread(parameters.zero_point, shape, parameters.axis, parameters.block)
    assert found is not None
    return found


def along(values: Array, rank: int, axis: int) -> Array:
    """A vector as a tensor that broadcasts along one axis."""
    at = normalize_axis(axis, rank)
    return values.reshape([-1 if i == at else 1 for i in range(rank)])
