"""Conversion between any two element types, as ONNX Cast defines it.

    to a float       rounds to nearest even; out of range becomes infinite
    to float8        saturates to the largest finite value, infinities included, if `saturate`
    to e8m0          a power of two, rounded from f32 up, down or to the nearest; saturates, or NaN
    to an integer    floats lose their fraction; integers keep their low bits (two's complement)
    to bool          zero is false, all else true
    strings          numbers as Python writes and reads them; "true" and "false" read as booleans

Where ONNX is undefined, the result is that of x86 processors: a float outside the range of an
integer type is converted to i32 (for types up to 32 bits) or i64, where every float that does not
fit becomes the lowest value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.dim import Dim, Size
from bitwright.ir.dtype import (
    DType,
    Family,
    bool_,
    dtype,
    f8e4m3fn,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    f8e8m0,
    i32,
    i64,
    u64,
)
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.decide import below, decided, equal, negated
from bitwright.ops.core.numeric import narrow, wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import is_differentiable

_SATURATING = (f8e4m3fn, f8e4m3fnuz, f8e5m2, f8e5m2fnuz)
_E8M0_BIAS = 127
_E8M0_NAN = 255


def cast(x: Array, to: DType, saturate: bool = True, round_mode: str = "up") -> Array:
    source = dtype(x.dtype).family
    if to.family is Family.STRING:
        return _to_text(x)
    if source is Family.STRING:
        x = _from_text(x, to)
        source = dtype(x.dtype).family
    if to == bool_:
        return x.astype(np.bool_)
    if source is Family.COMPLEX and not to.is_complex:
        x, source = x.real, Family.FLOAT
    if to.is_integer:
        return _truncated(wide(x), to) if source is Family.FLOAT else narrow(wide(x), to)
    if to == f8e8m0:
        return _power_of_two(x.astype(np.float32), saturate, round_mode)
    if to in _SATURATING and saturate:
        return np.clip(x.astype(np.float64), to.min, to.max).astype(to.numpy)
    if x.dtype.itemsize == 1:  # fits f32, and not every pair of narrow types converts directly
        x = x.astype(np.float32)
    return x.astype(to.numpy)


def _truncated(x: Array, to: DType) -> Array:
    """Integers from f64; the module docstring defines those out of range."""
    if to == u64:  # the upper half also goes through i64, shifted by 2**63
        upper = x >= 2.0**63
        low = _truncated(np.where(upper, x - 2.0**63, x), i64).astype(np.uint64)
        return low ^ (upper.astype(np.uint64) << np.uint64(63))
    is_short = to.bits < 32 or to == i32
    limit = 2.0**31 if is_short else 2.0**63
    whole = np.trunc(x)
    fits = (whole >= -limit) & (whole < limit)
    return narrow(np.where(fits, whole, -limit).astype(np.int64), to)


def _power_of_two(x: Array, saturate: bool, round_mode: str) -> Array:
    """x rounded to e8m0, which holds 2**-127 to 2**127 and NaN, no sign and no zero."""
    bounded = np.clip(x.astype(np.float64), 2.0**-_E8M0_BIAS, 2.0**_E8M0_BIAS)
    fraction, exponent = np.frexp(bounded)  # bounded = fraction * 2**exponent, 1/2 <= fraction < 1
    carries = {"up": fraction > 0.5, "down": False, "nearest": fraction >= 0.75}[round_mode]
    valid = ~np.isnan(x) if saturate else bounded == x
    bits = np.where(valid, exponent - 1 + carries + _E8M0_BIAS, _E8M0_NAN)
    return bits.astype(np.uint8).view(f8e8m0.numpy)


def _to_text(x: Array) -> Array:
    if dtype(x.dtype).family is Family.STRING:
        return x.astype(object)
    return _each(x, str, object)


def _from_text(x: Array, to: DType) -> Array:
    """The numbers that strings spell, in a type wide enough for `to`."""
    if to == bool_:
        return _each(x, _truth, np.bool_)
    if to.is_integer:  # the low 64 bits, whatever the sign
        return _each(x, lambda text: _whole(text) % 2**64, np.uint64)
    if to.is_complex:
        return _each(x, _reader(complex), np.complex128)
    return _each(x, _reader(float), np.float64)


def _each(x: Array, function: Callable[[Any], Any], element: Any) -> Array:
    found = np.empty(x.size, element)
    for i, item in enumerate(x.reshape(-1)):
        found[i] = function(item)
    return found.reshape(x.shape)


def _reader(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A function that parses text or bytes and raises a `RunError`."""

    def read(item: Any) -> Any:
        text = item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item)
        try:
            return parse(text.strip())
        except (ValueError, OverflowError):
            raise RunError(f"the string {text!r} is cast to a number it does not spell") from None

    return read


def _parse_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(float(text))


def _parse_truth(text: str) -> bool:
    words = {"true": True, "false": False}
    return words[text.lower()] if text.lower() in words else float(text) != 0


_whole, _truth = _reader(_parse_whole), _reader(_parse_truth)


def _cast_size(size: Size, to: DType, **_: Any) -> Size | bool | None:
    """The size itself, if the integer type can hold every size."""
    if to == bool_:
        return negated(equal(size, 0))
    if not to.is_integer:
        return None
    if isinstance(size, Dim):
        return size if to.bits >= 32 and (to.is_signed or below(size, 0) is False) else None
    lowest = int(to.min)
    return lowest + (int(size) - lowest) % (1 << to.bits)


def _infer(x: TensorType, to: DType, **_: Any) -> TensorType:
    return x.with_dtype(to)


def _samples() -> list[Sample]:
    pairs = ["f32 f16", "f32 bf16", "f32 i8", "f64 u8", "i64 i4", "u4 f32", "i8 bool", "bool f32"]
    pairs += ["f32 f8e4m3fn", "f16 f4e2m1", "f8e5m2 f32", "c64 f32", "i32 c128", "f32 u64"]
    found = [sample(draw(3, 5, dtype=one), to=to) for one, to in map(str.split, pairs)]
    return [
        *found,
        sample(draw(), to="f64"),
        sample(draw(0, 3), to="i64"),
        sample(draw(7, high=1e6), to="f8e4m3fnuz", saturate=False),
        sample(draw(7, low=0.1, high=9), to="f8e8m0", round_mode="nearest"),
        sample(np.array(["3.14", "-INF", "1e-5"], object), to="f32"),
        sample(np.array([["12"], ["-7"]], object), to="i16"),
    ]


def _grad(b: Builder, node: Node, dys: list[Any]) -> list[Any]:
    (x,) = node.operands
    return [b.cast(dys[0], to=x.dtype) if is_differentiable(x) else None]


OPDEFS = [
    OpDef(
        "cast",
        Kind.ELEMENTWISE,
        "x",
        infer=_infer,
        reference=cast,
        grad=_grad,
        samples=_samples,
        attrs={
            "to": Attr("dtype"),
            "saturate": Attr("bool", True),
            "round_mode": Attr("str", "up", ("up", "down", "nearest")),
        },
        sizes=decided(_cast_size),
        doc="x in another element type; saturate affects float8, round_mode only e8m0",
    )
]
