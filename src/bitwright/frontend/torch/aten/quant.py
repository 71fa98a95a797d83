"""Quantization ops of torchao and PT2E, and fake quantization."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.dtype import DType, f32, i32
from bitwright.ir.graph import Value

_SPACE = "quantized_decomposed"


def _check_range(ctx: Context, low: int, high: int, element: DType) -> None:
    if (low, high) != (element.min, element.max):
        raise ctx.refuse(
            f"quantized values from {low} to {high} in a type of {element.min} to {element.max}"
        )


def _scale(ctx: Context, scale: Any) -> Value:
    return ctx.operand(scale, f32)


@maps("quantize_per_tensor.default", "quantize_per_tensor.tensor", namespace=_SPACE)
@maps("quantize_per_tensor.tensor2", namespace=_SPACE)
def quantize(
    ctx: Context, x: Value, scale: Any, zero_point: Any, low: Any, high: Any, dtype: DType
) -> Value:
    least, most = ctx.static([low, high], "the range of quantized values")
    _check_range(ctx, least, most, dtype)
    return ctx.b.quantize(x, _scale(ctx, scale), ctx.operand(zero_point, dtype), to=dtype)


@maps("dequantize_per_tensor.default", "dequantize_per_tensor.tensor", namespace=_SPACE)
@maps("dequantize_per_tensor.tensor2", namespace=_SPACE)
def dequantize(
    ctx: Context,
    x: Value,
    scale: Any,
    zero_point: Any,
    low: Any,
    high: Any,
    dtype: DType,
    out_dtype: DType | None = None,
) -> Value:
    offset = ctx.operand(zero_point, x.dtype)
    return ctx.b.dequantize(x, _scale(ctx, scale), offset, to=ctx.element)


@maps("quantize_per_channel.default", namespace=_SPACE)
def quantize_channels(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value,
    axis: int,
    low: int,
    high: int,
    dtype: DType,
) -> Value:
    _check_range(ctx, low, high, dtype)
    offsets = ctx.operand(zero_points, dtype)
    return ctx.b.quantize(x, _scale(ctx, scales), offsets, axis=axis, to=dtype)


@maps("dequantize_per_channel.default", namespace=_SPACE)
def dequantize_channels(
    ctx: Context,
    x: Value,
    scales: Value,
    zero_points: Value | None,
    axis: int,
    low: int,
    high: int,
    dtype: DType,
    out_dtype: DType | None = None,
) -> Value:
    offsets = None if zero_points is None else ctx.operand(zero_points, x.dtype)
    return ctx.b.dequantize(x, _scale(ctx, scales), offsets, axis=axis, to=ctx.element)


@maps("fake_quantize_per_tensor_affine.default", "fake_quantize_per_tensor_affine.tensor_qparams")
def fake_quantize(
    ctx: Context, x: Value, scale: Any, zero_point: Any, low: int, high: int
) -> Value:
    offset = ctx.operand(zero_point, i32)
    return ctx.b.fake_quantize(x, _scale(ctx, scale), offset, low=low, high=high)


@maps("fake_quantize_per_channel_affine.default")
def fake_quantize_channels(
    ctx: Context, x: Value, scale: Value, zero_point: Value, axis: int, low: int, high: int
) -> Value:
    offset = ctx.operand(zero_point, i32)
    return ctx.b.fake_quantize(x, _scale(ctx, scale), offset, axis=axis, low=low, high=high)
