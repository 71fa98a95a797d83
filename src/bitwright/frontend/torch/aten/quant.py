"""Quantization ops of torchao and PT2E, and fake quantization."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.dtype import DType, f32, i32
from bitwright.ir.graph import Value

_SPACE = "quantized_decomposed"


@maps("quantize_per_channel.default", namespace=_SPACE)
def quantize(
    ctx: Context, x: Value, scale: Any, zero: Any, axis: Any, low: Any, high: Any, dtype: DType
) -> Value:
    least, most = ctx.static([low, high], "the range of quantized values")
    if (least, most) != (dtype.min, dtype.max):
        raise ctx.refuse(
            f"quantized values from {least} to {most} in a type of {dtype.min} to {dtype.max}"
        )
    offset = ctx.operand(zero, dtype)
    return ctx.b.quantize(x, ctx.operand(scale, f32), offset, axis=axis, to=dtype)


@maps("dequantize_per_channel.default", namespace=_SPACE)
def dequantize(
    ctx: Context, x: Value, scale: Any, zero: Any, axis: int | None, *_: Any, **__: Any
) -> Value:
    offset = None if zero is None else ctx.operand(zero, x.dtype)
    return ctx.b.dequantize(x, ctx.operand(scale, f32), offset, axis=axis, to=ctx.element)


@maps("fake_quantize_per_channel_affine.default")
def fake_quantize(
    ctx: Context, x: Value, scale: Any, zero: Any, axis: int | None, low: int, high: int
) -> Value:
    scale, offset = ctx.operand(scale, f32), ctx.operand(zero, i32)
    return ctx.b.fake_quantize(x, scale, offset, axis=axis, low=low, high=high)


def _per_tensor(function: Any) -> Any:
    """The mapping for one scale: its arguments lack the axis."""

    def mapping(ctx: Context, x: Value, scale: Any, zero: Any, *rest: Any, **options: Any) -> Value:
        y: Value = function(ctx, x, scale, zero, None, *rest, **options)
        return y

    return mapping


for _kind in ("default", "tensor", "tensor2"):
    maps(f"quantize_per_tensor.{_kind}", namespace=_SPACE)(_per_tensor(quantize))
    maps(f"dequantize_per_tensor.{_kind}", namespace=_SPACE)(_per_tensor(dequantize))
for _kind in ("default", "tensor_qparams"):
    maps(f"fake_quantize_per_tensor_affine.{_kind}")(_per_tensor(fake_quantize))
