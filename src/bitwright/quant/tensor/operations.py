"""Operations on quantized tensors, in exact integer arithmetic (see `arithmetic` for the rules).

    qmatmul qconv2d qadd qmul   return f32, or a QuantizedTensor if `output` has its parameters
    qrelu qmax_pool2d           keep the parameters, no rounding
    qaverage_pool2d             quantized with x's parameters, or with `output`
    qconcat requantize          quantized with `output`

Scales may vary along any axis that is not contracted. Where they vary along the contracted axis,
each piece with constant scales is accumulated exactly, and the f32 terms of the pieces are added in
order. Float and logarithmic types have no integer arithmetic: they are dequantized, computed in
f32, and a warning is issued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import dtype
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import PerAxis, Scheme
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.math.matmul import multiply
from bitwright.ops.nn.conv import convolve, infer_conv
from bitwright.ops.nn.windows import make_windows
from bitwright.quant.core.quantize_values import along, spread_scale, spread_zero_point
from bitwright.quant.tensor import arithmetic
from bitwright.quant.tensor.arithmetic import Result, accumulator, centred, exact, finish, scale_of
from bitwright.quant.tensor.compiled_elementwise import elementwise
from bitwright.quant.tensor.compiled_products import Product, compiled
from bitwright.quant.tensor.tensor import QuantizedTensor
from bitwright.warn import warn_once

_INT32 = np.iinfo(np.int32)


def requantize(
    x: QuantizedTensor, output: QuantParams, fixed_point: bool = False
) -> QuantizedTensor:
    if not arithmetic.is_integer_quantized(x.parameters):
        return QuantizedTensor.quantize(x.dequantize(), output)
    direct = None if fixed_point else elementwise("requantize", (x,), output)
    if isinstance(direct, QuantizedTensor):
        return direct
    acc = centred(x).astype(np.int32)
    found = finish(acc, scale_of(x), output, fixed_point)
    assert isinstance(found, QuantizedTensor)
    return found


def qmatmul(
    x: QuantizedTensor,
    w: QuantizedTensor,
    bias: Array | None = None,
    output: QuantParams | None = None,
    fixed_point: bool = False,
) -> Result:
    """x[..., M, K] @ w[..., K, N] + bias[N].

    An integer bias is in units of both scales. A float bias is added in f32 to an f32 result; for a
    quantized result it is first rounded to those units, as the kernels do.
    """
    if x.ndim < 2 or w.ndim < 2 or x.shape[-1] != w.shape[-2]:
        raise QuantizationError(
            "the matrix shapes do not match",
            where="qmatmul",
            expected="[..., M, K] and [..., K, N]",
            found=f"{list(x.shape)} and {list(w.shape)}",
        )
    if not _all_integer("qmatmul", x, w):
        return _in_f32(_matmul_f32, output, x, w, bias)
    block = _common_block(x, w)
    element = accumulator(x, w)
    if block == 0:
        _require_constant_scale("qmatmul", x, x.ndim - 1)
        _require_constant_scale("qmatmul", w, w.ndim - 2)
        scale = scale_of(x) * scale_of(w)
        shape = (*x.shape[:-1], w.shape[-1])
        found = _compiled("integer_matmul", x, w, {}, shape, scale, bias, output, fixed_point)
        if found is not None:
            return found
        acc = exact(multiply(centred(x), centred(w)), element, "qmatmul")
        return _with_bias(acc, scale, bias, output, fixed_point, -1)
    factors = centred(x), centred(w)
    total: Any = np.float32(0)
    for start in range(0, x.shape[-1], block):
        own = slice(start, start + block)
        acc = exact(multiply(factors[0][..., own], factors[1][..., own, :]), element, "qmatmul")
        scale = _piece_scale(x, x.ndim - 1, start) * _piece_scale(w, w.ndim - 2, start)
        total = total + _terms(acc, scale, output)
    return _finish_terms(np.asarray(total), bias, output)


def qconv2d(
    x: QuantizedTensor,
    w: QuantizedTensor,
    bias: Array | None = None,
    output: QuantParams | None = None,
    *,
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    groups: int = 1,
    fixed_point: bool = False,
) -> Result:
    """x[N, C, H, W] with w[M, C/groups, kh, kw] and bias[M] as in `qmatmul`; padding is 0."""
    if x.ndim != 4 or w.ndim != 4:
        raise QuantizationError(
            "an operand has the wrong rank",
            where="qconv2d",
            expected="x[N, C, H, W] and w[M, C/groups, kh, kw]",
            found=f"{list(x.shape)} and {list(w.shape)}",
        )
    images, kernels = (TensorType(dtype(np.int8), one.shape) for one in (x, w))
    windows = {"strides": strides, "pads": pads, "dilations": dilations}
    shape = infer_conv(images, kernels, None, groups, **windows).shape

    def convolved(images: Array, kernels: Array) -> Array:
        return convolve(images, kernels, None, groups, **windows)

    if not _all_integer("qconv2d", x, w):
        add = 0 if bias is None else np.asarray(bias)[:, None, None]
        return _in_f32(lambda a, b: convolved(a, b) + add, output, x, w)
    for axis in (1, 2, 3):
        _require_constant_scale("qconv2d", x, axis)
        _require_constant_scale("qconv2d", w, axis)
    given = {name: tuple(value) for name, value in windows.items() if value is not None}
    attrs: dict[str, Any] = {**given, "groups": groups}
    channels = scale_of(w)
    scale = scale_of(x) * (channels.reshape(1, -1, 1, 1) if channels.ndim else channels)
    found = _compiled("integer_conv", x, w, attrs, shape, scale, bias, output, fixed_point)
    if found is not None:
        return found
    acc = exact(convolved(centred(x), centred(w)), accumulator(x, w), "qconv2d")
    return _with_bias(acc, scale, bias, output, fixed_point, 1)


def _compiled(
    op: str,
    x: QuantizedTensor,
    w: QuantizedTensor,
    attrs: dict[str, Any],
    shape: tuple[Any, ...],
    scale: Array,
    bias: Array | None,
    output: QuantParams | None,
    fixed_point: bool,
) -> Result | None:
    """The product by a compiled kernel; None if no kernel supports it."""
    if fixed_point:
        return None
    integer, axis = None, -1 if op == "integer_matmul" else 1
    if bias is not None:
        bias = np.asarray(bias).reshape(-1)
        if bias.size != shape[axis]:
            return None
        if output is not None or bias.dtype.kind in "iu":
            integer = _integer_bias(bias, scale)
            if integer is None:
                return None
    found = compiled(Product(op, x, w, attrs, shape, scale, integer, output))
    if bias is None or integer is not None or found is None:
        return found
    assert isinstance(found, np.ndarray)
    return _finish_terms(found, along(bias, found.ndim, axis), None)


def qadd(x: QuantizedTensor, y: QuantizedTensor, output: QuantParams | None = None) -> Result:
    """x + y with broadcasting: both rescaled to the output scale, added in f32, rounded once."""
    if not _all_integer("qadd", x, y):
        return _in_f32(np.add, output, x, y)
    direct = elementwise("add", (x, y), output)
    if direct is not None:
        return direct
    shape = np.broadcast_shapes(x.shape, y.shape)
    parts = []
    for one in (x, y):
        scale = scale_of(one)
        scale = scale.reshape((1,) * (len(shape) - scale.ndim) + scale.shape)
        parts.append(_terms(np.broadcast_to(centred(one), shape), scale, output))
    return _finish_terms(parts[0] + parts[1], None, output)


def qmul(x: QuantizedTensor, y: QuantizedTensor, output: QuantParams | None = None) -> Result:
    """x * y with broadcasting; the integer product is exact."""
    if not _all_integer("qmul", x, y):
        return _in_f32(np.multiply, output, x, y)
    direct = elementwise("mul", (x, y), output)
    if direct is not None:
        return direct
    product = centred(x).astype(np.int64) * centred(y)
    acc = exact(product, accumulator(x, y), "qmul")
    return finish(acc, scale_of(x) * scale_of(y), output)


def qrelu(x: QuantizedTensor) -> QuantizedTensor:
    """max(x, 0), computed as max(q, zero_point)."""
    parameters = x.parameters
    if parameters.scheme is Scheme.binary:
        raise QuantizationError("binary cannot represent 0", where="qrelu", hint="Dequantize first")
    qvalues = x.qvalues()
    if not parameters.dtype.is_integer:
        zero = np.zeros((), qvalues.dtype)
        return QuantizedTensor.from_qvalues(np.where(qvalues > zero, qvalues, zero), parameters)
    zero = spread_zero_point(parameters, x.shape).astype(np.int32)
    return QuantizedTensor.from_qvalues(np.maximum(qvalues.astype(np.int32), zero), parameters)


def qmax_pool2d(
    x: QuantizedTensor,
    kernel: Sequence[int],
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    ceil: bool = False,
) -> QuantizedTensor:
    """Max pooling; padding is ignored."""
    _require_images("qmax_pool2d", x)
    windows = make_windows(2, kernel, strides, pads, dilations)
    counts: Any = windows.counts(x.shape[2:], ceil)
    if not _all_integer("qmax_pool2d", x):
        values = windows.pad(x.dequantize(), counts, -np.inf)
        best = windows.reduce(values, counts, np.maximum)
        return QuantizedTensor.quantize(best, x.parameters)
    qvalues = x.qvalues().astype(np.int32)
    best = windows.reduce(windows.pad(qvalues, counts, _INT32.min), counts, np.maximum)
    return QuantizedTensor.from_qvalues(best, x.parameters)


def qaverage_pool2d(
    x: QuantizedTensor,
    kernel: Sequence[int],
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    output: QuantParams | None = None,
    ceil: bool = False,
) -> QuantizedTensor:
    """Average pooling without padding: an exact sum, divided once."""
    _require_images("qaverage_pool2d", x)
    windows = make_windows(2, kernel, strides, pads, None)
    counts: Any = windows.counts(x.shape[2:], ceil)

    def summed(values: Array) -> Array:
        return np.asarray(windows.reduce(windows.pad(values, counts, 0), counts, np.add))

    cells = np.maximum(summed(np.ones((1, 1, *x.shape[2:]), np.int64)), 1)
    output = output or x.parameters
    if not _all_integer("qaverage_pool2d", x):
        return QuantizedTensor.quantize(summed(x.dequantize()) / cells, output)
    acc = exact(summed(centred(x).astype(np.int64)), accumulator(x), "qaverage_pool2d")
    found = finish(acc, scale_of(x) / cells, output)
    assert isinstance(found, QuantizedTensor)
    return found


def qconcat(
    parts: Sequence[QuantizedTensor], axis: int, output: QuantParams | None = None
) -> QuantizedTensor:
    """Concatenate; parts with equal parameters are not requantized."""
    if not parts:
        raise QuantizationError("there are no tensors to concatenate", where="qconcat")
    at = normalize_axis(axis, parts[0].ndim)
    if output is None:
        output = _joined_parameters(parts, at)
    else:
        parts = [one if one.parameters == output else requantize(one, output) for one in parts]
    return QuantizedTensor.from_qvalues(
        np.concatenate([one.qvalues() for one in parts], at), output
    )


def _joined_parameters(parts: Sequence[QuantizedTensor], at: int) -> QuantParams:
    given = [one.parameters for one in parts]
    first = given[0]
    own_axis = None if first.axis is None else normalize_axis(first.axis, parts[0].ndim)
    are_alike = len({(one.dtype, one.scheme, one.axis) for one in given}) == 1
    if are_alike and isinstance(first.granularity, PerAxis) and own_axis == at:
        return replace(
            first,
            scale=np.concatenate([one.scale for one in given]),
            zero_point=np.concatenate([one.zero_point for one in given]),
            widths=tuple(width for one in given for width in one.widths),
            minimum=None,
            maximum=None,
        )
    if all(one == first for one in given):
        return first
    raise QuantizationError(
        "the parts have different parameters",
        where="qconcat",
        hint="Pass `output` to requantize them",
    )


# Helpers


def _terms(acc: Array, scale: Array, output: QuantParams | None) -> Array:
    """f32 terms: in units of the output scale, or real values."""
    return arithmetic.terms(acc, scale, output if output and arithmetic.is_linear(output) else None)


def _finish_terms(total: Array, bias: Array | None, output: QuantParams | None) -> Result:
    """The result of a sum of f32 terms plus a float bias."""
    if bias is not None:
        unit = (
            spread_scale(output, total.shape)
            if output and arithmetic.is_linear(output)
            else np.float64(1)
        )
        total = total + (np.asarray(bias, np.float64) / unit).astype(np.float32)
    if output is None:
        return total
    output.validate(total.shape)
    return (
        arithmetic.rounded(total, output)
        if arithmetic.is_linear(output)
        else QuantizedTensor.quantize(total, output)
    )


def _with_bias(
    acc: Array,
    scale: Array,
    bias: Array | None,
    output: QuantParams | None,
    fixed_point: bool,
    axis: int,
) -> Result:
    """Add a bias along an axis: in the accumulator if each channel has one scale, else in f32."""
    if bias is None:
        return finish(acc, scale, output, fixed_point)
    bias = along(np.asarray(bias), acc.ndim, axis)
    integer = None
    if output is not None or bias.dtype.kind in "iu":
        integer = _integer_bias(bias, scale)
    if integer is None:
        return _finish_terms(_terms(acc, scale, output), bias, output)
    total = exact(acc.astype(np.int64) + integer, acc.dtype, "the bias")
    return finish(total, scale, output, fixed_point)


def _integer_bias(bias: Array, scale: Array) -> Array | None:
    """The bias in units of the scale; None if a channel has more than one scale."""
    if bias.dtype.kind in "iu":
        return bias.astype(np.int64)
    if scale.size not in (1, bias.size):
        return None
    unit = scale.astype(np.float64).reshape(bias.shape if scale.size > 1 else ())
    return np.clip(np.rint(bias / unit), _INT32.min, _INT32.max).astype(np.int64)


def _all_integer(name: str, *tensors: QuantizedTensor) -> bool:
    for one in tensors:
        if not arithmetic.is_integer_quantized(one.parameters):
            what = f"{name} of {one.parameters.scheme} {one.parameters.dtype}"
            warn_once(what, "this type has no integer arithmetic; dequantized and computed in f32")
            return False
    return True


def _in_f32(
    function: Callable[..., Array],
    output: QuantParams | None,
    x: QuantizedTensor,
    y: QuantizedTensor,
    *more: Any,
) -> Result:
    found = np.asarray(function(x.dequantize(), y.dequantize(), *more), np.float32)
    return found if output is None else QuantizedTensor.quantize(found, output)


def _matmul_f32(x: Array, w: Array, bias: Array | None) -> Array:
    y = np.asarray(np.matmul(x, w))
    return y if bias is None else y + np.asarray(bias)


def _require_constant_scale(name: str, x: QuantizedTensor, axis: int) -> None:
    """Raise if scales vary along an axis that is contracted."""
    scale = spread_scale(x.parameters, x.shape)
    if scale.ndim and scale.shape[axis] != 1:
        raise QuantizationError(
            f"the scales vary along axis {axis}, which is contracted",
            where=name,
            expected="scales per tensor, or along another axis",
            found=f"{list(x.parameters.scale.shape)} for {list(x.shape)}",
        )


def _common_block(x: QuantizedTensor, w: QuantizedTensor) -> int:
    """The length of pieces of the contracted axis with constant scales; 0: the whole axis."""
    found = 0
    for one, contracted in ((x, x.ndim - 1), (w, w.ndim - 2)):
        parameters = one.parameters
        if parameters.axis is None or normalize_axis(parameters.axis, one.ndim) != contracted:
            if parameters.block:
                _require_constant_scale("qmatmul", one, contracted)
            continue
        own = parameters.block or 1
        found = math.gcd(found, own) if found else own
    return found


def _piece_scale(x: QuantizedTensor, axis: int, start: int) -> Array:
    """Scales of the piece of the contracted axis at `start`; the axis has size 1."""
    scale = scale_of(x)
    if scale.ndim == 0 or scale.shape[axis] == 1:
        return scale
    return np.asarray(scale.take([start], axis))


def _require_images(name: str, x: QuantizedTensor) -> None:
    if x.ndim != 4:
        raise QuantizationError(
            "x has the wrong rank", where=name, expected="x[N, C, H, W]", found=list(x.shape)
        )
    for axis in (2, 3):
        _require_constant_scale(name, x, axis)
