"""Convolution of integers as ConvInteger: 8-bit values minus zero points, summed in i32.

Operands of the form `cast(q) - cast(zero)` are passed as q and zero. Others are split into bytes,
x = x0 + 2^8 x1 + …, and the convolutions of the bytes are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import DType, i8, i32, i64, u8
from bitwright.ir.graph import Value

Quantized = tuple[Ref, Ref | None]
"""8-bit values, and their zero point."""


def eight_bits(element: DType) -> DType:
    """The 8-bit type that holds every value of a narrower one."""
    return i8 if element.is_signed else u8


def integer_conv(
    e: Scope, x: Ref, w: Ref, values: Sequence[Value | None], attrs: Mapping[str, Any]
) -> Ref:
    """The convolution of `x` and `w`; `values` are the bitwright values of the two, if any."""
    found = [_as_quantized(e, ref, value) for ref, value in zip((x, w), values, strict=True)]
    quantized = [pair for pair in found if pair is not None]
    if len(quantized) == 2:
        (x8, x_zero), (w8, w_zero) = quantized
        return e.ConvInteger(x8, w8, x_zero, w_zero, **attrs)
    if max(x.element.bits, w.element.bits) > 32:
        raise e.reject("ConvInteger sums in 32 bits")
    total: Ref | None = None
    for i, x_byte in enumerate(_bytes(e, x)):
        for j, w_byte in enumerate(_bytes(e, w)):
            part = e.cast(e.ConvInteger(x_byte, w_byte, **attrs), i64)
            part = e.Mul(part, e.scalar(256 ** (i + j), part)) if i + j else part
            total = part if total is None else e.Add(total, part)
    assert total is not None
    return total


def _as_quantized(e: Scope, ref: Ref, value: Value | None) -> Quantized | None:
    """The 8-bit values and the zero point of a widened value, if it has that form."""
    if value is None:
        return None
    if value.dtype.bits <= 8:
        return e.cast(ref, eight_bits(value.dtype)), None
    wide, zero = value, None
    if value.node.op == "sub" and value.dtype == i32:
        wide, zero = value.node.operands
    narrow, offset = _narrow(e, wide), None if zero is None else _narrow(e, zero)
    if narrow is None or wide.shape != value.shape:
        return None
    if zero is None:
        return narrow, None
    is_scalar = offset is not None and zero.tensor.count == 1 and offset.element == narrow.element
    return (narrow, offset) if is_scalar else None


def _narrow(e: Scope, wide: Value) -> Ref | None:
    """The 8-bit value before the cast, if there is one."""
    node = wide.node
    if node.op == "reshape" and wide.tensor.count == 1:
        node = next(node.operands).node
    narrow = next(node.operands) if node.op == "cast" else wide
    return e.values[narrow] if narrow.dtype in (i8, u8) else None


def _bytes(e: Scope, x: Ref) -> list[Ref]:
    """The bytes of a two's complement number, lowest first; the last one is signed."""
    count = -(-x.element.bits // 8)
    rest, parts = e.cast(x, i32), []
    for _ in range(count - 1):
        parts.append(e.cast(rest, u8))
        rest = e.Div(e.Sub(rest, e.cast(parts[-1], i32)), e.scalar(256, rest))
    return [*parts, e.cast(rest, eight_bits(x.element))]
