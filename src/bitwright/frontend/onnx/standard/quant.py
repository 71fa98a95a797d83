"""QuantizeLinear, DequantizeLinear and integer products.

MatMulInteger  (A - a_zero) @ (B - b_zero) in i32
QLinearMatMul  quantize(dequantize(A) @ dequantize(B)), with the product in i32
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, imports
from bitwright.frontend.onnx.standard.nn import conv_attrs
from bitwright.frontend.onnx.tensor import element_type
from bitwright.ir import DType, Value
from bitwright.ir.dtype import u8
from bitwright.ir.types import normalize_axis


def _granularity(node: OnnxNode, x: Value, scale: Value) -> dict[str, Any]:
    """The attributes for per-tensor, per-axis or blockwise scales."""
    block = node.integer("block_size", 0)
    axis = node.integer("axis", 1)
    if block:
        return {"axis": normalize_axis(axis, x.rank), "block": block}
    if scale.rank == 0 or (scale.rank == 1 and scale.shape == (1,) and not _is_single(x, axis)):
        return {"axis": None}
    if scale.rank != 1:
        raise ImportModelError(
            "the scale has the wrong rank", where=node.where, expected="0 or 1", found=scale.type
        )
    return {"axis": normalize_axis(axis, x.rank)}


def _is_single(x: Value, axis: int) -> bool:
    """Whether the axis has size 1, so that one scale is per axis."""
    return -x.rank <= axis < x.rank and x.shape[axis] == 1


def _element(node: OnnxNode, name: str) -> DType | None:
    number = node.integer(name, 0)
    return None if number == TensorProto.UNDEFINED else element_type(number, node.where)


def require_scale(ctx: Context, node: OnnxNode, scale: Value, divides: bool = False) -> None:
    """Raise if a constant scale is not finite, or not positive where it `divides`.

    Some tools write a scale of 0 for channels whose weights are all zero.
    """
    known = ctx.array(scale)
    if known is None or not scale.dtype.is_float:
        return
    wide = known.astype(np.float64).reshape(-1)
    wrong = ~np.isfinite(wide) | (wide <= 0 if divides else False)
    if wrong.any():
        at = int(wrong.argmax())
        raise ImportModelError(
            f"the scale {scale.name!r} is not valid",
            where=node.where,
            expected="positive finite numbers" if divides else "finite numbers",
            found=f"{wide[at]:g}" + (f" at {at}" if wide.size > 1 else ""),
        )


@imports("QuantizeLinear")
def quantize_linear(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale, zero = inputs[0], inputs[1], inputs[2]
    require_scale(ctx, node, scale, divides=True)
    target = zero.dtype if zero is not None else _element(node, "output_dtype") or u8
    return ctx.b.quantize(
        x,
        scale,
        zero,
        to=target,
        saturate=node.flag("saturate", 1),
        precision=_element(node, "precision"),
        **_granularity(node, x, scale),
    )


@imports("DequantizeLinear")
def dequantize_linear(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale, zero = inputs[0], inputs[1], inputs[2]
    require_scale(ctx, node, scale)
    target = _element(node, "output_dtype")
    return ctx.b.dequantize(x, scale, zero, to=target, **_granularity(node, x, scale))


@imports("DynamicQuantizeLinear")
def dynamic_quantize_linear(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return list(ctx.b.dynamic_quantize(inputs[0], to=u8))


def centred(ctx: Context, x: Value, zero: Value | None, axis: int | None = None) -> Value:
    """Quantized values minus their zero point, in i32; zero points may be per `axis`."""
    wide = ctx.cast(x, "i32")
    if zero is None:
        return wide
    offset = ctx.cast(zero, "i32")
    if offset.rank == 1 and axis is not None:
        offset = along(ctx, offset, x.rank, axis)
    return ctx.b.sub(wide, offset)


def along(ctx: Context, x: Value, rank: int, axis: int) -> Value:
    """A vector reshaped to broadcast along one axis of a tensor of this rank."""
    if x.rank != 1:
        return x
    if x.shape == (1,):
        return ctx.reshape(x, [])
    at = normalize_axis(axis, rank)
    return ctx.reshape(x, [x.shape[0] if i == at else 1 for i in range(rank)])


def _integer_matmul(
    ctx: Context, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None
) -> Value:
    rows = centred(ctx, x, x_zero, -2 if x.rank > 1 else None)
    return ctx.b.matmul(rows, centred(ctx, w, w_zero, -1))


@imports("MatMulInteger")
def matmul_integer(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _integer_matmul(ctx, *(inputs[i] for i in range(4)))


def _integer_conv(
    ctx: Context, node: OnnxNode, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None
) -> Value:
    """The convolution of centred values, in i32; padding is 0 after centring."""
    attrs = conv_attrs(node, x, w)
    return ctx.b.conv(centred(ctx, x, x_zero), centred(ctx, w, w_zero, 0), **attrs)


@imports("ConvInteger")
def conv_integer(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _integer_conv(ctx, node, *(inputs[i] for i in range(4)))


@imports("QLinearMatMul")
def qlinear_matmul(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = inputs
    _require_scales(ctx, node, x_scale, w_scale, y_scale)
    total = _integer_matmul(ctx, x, w, x_zero, w_zero)
    x_scale, w_scale = along(ctx, x_scale, x.rank, -2), along(ctx, w_scale, w.rank, -1)
    return _requantize(ctx, total, ctx.b.mul(x_scale, w_scale), y_scale, y_zero)


@imports("QLinearConv")
def qlinear_conv(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = (inputs[i] for i in range(9))
    _require_scales(ctx, node, x_scale, w_scale, y_scale)
    total = _integer_conv(ctx, node, x, w, x_zero, w_zero)
    if bias is not None:
        total = ctx.b.add(total, along(ctx, bias, total.rank, 1))
    factor = ctx.b.mul(ctx.reshape(x_scale, []), along(ctx, w_scale, total.rank, 1))
    return _requantize(ctx, total, factor, y_scale, y_zero)


def _require_scales(
    ctx: Context, node: OnnxNode, x_scale: Value, w_scale: Value, y_scale: Value
) -> None:
    for scale in (x_scale, w_scale):
        require_scale(ctx, node, scale)
    require_scale(ctx, node, y_scale, divides=True)


def _requantize(ctx: Context, total: Value, factor: Value, y_scale: Value, y_zero: Value) -> Value:
    """saturate(rne(total * factor / y_scale) + y_zero)"""
    real = ctx.b.mul(ctx.cast(total, "f32"), ctx.cast(factor, "f32"))
    if y_scale.shape == (1,):
        y_scale, y_zero = ctx.reshape(y_scale, []), ctx.reshape(y_zero, [])
    axis = None if y_scale.rank == 0 else total.rank - 2
    return ctx.b.quantize(real, ctx.cast(y_scale, "f32"), y_zero, to=y_zero.dtype, axis=axis)
