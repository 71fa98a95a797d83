"""Convolution of integers. ONNX has one op for it: 8-bit codes minus zero points, in i32.

Operands that are such codes are found behind their widening, `cast(q) - cast(zero)`. Others are cut
into bytes, x = x0 + 2^8 x1 + …, and the convolutions of bytes add up to theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import DType, i8, i32, i64, u8
from bitwright.ir.graph import Value

Codes = tuple[Ref, Ref | None]


def eight_bits(element: DType) -> DType:
    """The 8-bit type that holds every value of a narrower one."""
    return i8 if element.is_signed else u8


def integer_conv(
    e: Scope, x: Ref, w: Ref, values: Sequence[Value | None], attrs: Mapping[str, Any]
) -> Ref:
    """The convolution of `x` and `w`; `values` are the bitwright values that they are, if any."""
    found = [_qvalues(e, ref, value) for ref, value in zip((x, w), values, strict=True)]
    qvalues = [pair for pair in found if pair is not None]
    if len(qvalues) == 2:
        (x_code, x_zero), (w_code, w_zero) = qvalues
        return e.ConvInteger(x_code, w_code, x_zero, w_zero, **attrs)
    if max(x.element.bits, w.element.bits) > 32:
        raise e.reject("ConvInteger adds in 32 bits")
    total: Ref | None = None
    for i, x_byte in enumerate(_bytes(e, x)):
        for j, w_byte in enumerate(_bytes(e, w)):
            part = e.cast(e.ConvInteger(x_byte, w_byte, **attrs), i64)
            part = e.Mul(part, e.scalar(256 ** (i + j), part)) if i + j else part
            total = part if total is None else e.Add(total, part)
    assert total is not None
    return total


def _qvalues(e: Scope, ref: Ref, value: Value | None) -> Codes | None:
    """8-bit codes and their zero point that give the value, if it has such a form."""
    if value is None:
        return None
    if value.dtype.bits <= 8:
        return e.cast(ref, eight_bits(value.dtype)), None
    wide, zero = value, None
    if value.node.op == "sub" and value.dtype == i32:
        wide, zero = value.node.operands
    code, offset = _narrow(e, wide), None if zero is None else _narrow(e, zero)
    if code is None or wide.shape != value.shape:
        return None
    if zero is None:
        return code, None
    is_scalar = offset is not None and zero.tensor.count == 1 and offset.element == code.element
    return (code, offset) if is_scalar else None


def _narrow(e: Scope, wide: Value) -> Ref | None:
    """The 8-bit value that was widened to this one."""
    node = wide.node
    if node.op == "reshape" and wide.tensor.count == 1:
        node = next(node.operands).node
    narrow = next(node.operands) if node.op == "cast" else wide
    return e.values[narrow] if narrow.dtype in (i8, u8) else None


def _bytes(e: Scope, x: Ref) -> list[Ref]:
    """The bytes of a two's complement number, lowest first; the last one carries the sign."""
    count = -(-x.element.bits // 8)
    rest, parts = e.cast(x, i32), []
    for _ in range(count - 1):
        parts.append(e.cast(rest, u8))
        rest = e.Div(e.Sub(rest, e.cast(parts[-1], i32)), e.scalar(256, rest))
    return [*parts, e.cast(rest, eight_bits(x.element))]
