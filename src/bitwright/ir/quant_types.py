"""Quantized element types, schemes and granularities.

    symmetric     x = q * scale                          asymmetric   x = (q - zero_point) * scale
    logarithmic   x = sign(q) * scale * base**(1 - |q|), 0 for q = 0
    binary        x = scale where the bit is set, else -scale

COMBINATIONS lists every supported combination; any other is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from bitwright.errors import QuantizationError
from bitwright.ir.dtype import (
    DType,
    f4e2m1,
    f8e4m3fn,
    f8e4m3fnuz,
    f8e5m2,
    f8e5m2fnuz,
    i2,
    i4,
    i8,
    i16,
    u2,
    u4,
    u8,
    u16,
)


class Scheme(Enum):
    symmetric = "symmetric"
    asymmetric = "asymmetric"
    logarithmic = "logarithmic"
    binary = "binary"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class PerTensor:
    """One scale for the tensor."""

    def __str__(self) -> str:
        return "per tensor"


@dataclass(frozen=True)
class PerAxis:
    """One scale for each index of an axis."""

    axis: int

    def __str__(self) -> str:
        return "per axis"


@dataclass(frozen=True)
class PerGroup:
    """One scale for each group of `size` consecutive indices of an axis, at each other index."""

    size: int
    axis: int = -1

    def __str__(self) -> str:
        return "per group"


@dataclass(frozen=True)
class PerToken:
    """One scale for each row of the last axis, computed at run time."""

    def __str__(self) -> str:
        return "per token"


Granularity = PerTensor | PerAxis | PerGroup
GRANULARITIES: tuple[type[Granularity], ...] = (PerTensor, PerAxis, PerGroup)


def granularity(axis: int | None, block: int = 0) -> Granularity:
    """The granularity of scales along an axis (None: one scale), in blocks (0: no blocks)."""
    if axis is None:
        return PerTensor()
    return PerGroup(block, axis) if block else PerAxis(axis)


@dataclass(frozen=True)
class QuantType:
    """A quantized element type; `element` is the IR type of one quantized value."""

    name: str
    bits: int
    element: DType

    def __str__(self) -> str:
        return self.name

    @property
    def is_integer(self) -> bool:
        return self.element.is_integer

    @property
    def is_signed(self) -> bool:
        return self.element.is_signed or self.name == "binary"

    @cached_property
    def min(self) -> float | int:
        return 0 if self.name == "binary" else self.element.min

    @cached_property
    def max(self) -> float | int:
        return 1 if self.name == "binary" else self.element.max

    @property
    def values_per_byte(self) -> int:
        return max(1, 8 // self.bits)

    @property
    def ideal_saving(self) -> float:
        """The fraction of f32's bytes that is saved, without scales and zero points."""
        return 1 - self.bits / 32

    def nbytes(self, count: int) -> int:
        """Bytes of `count` packed values."""
        return (count * self.bits + 7) // 8


_INTEGERS = tuple(
    QuantType(f"{word}{element.bits}", element.bits, element)
    for word, element in (
        *(("int", i8), ("uint", u8), ("int", i16), ("uint", u16)),
        *(("int", i4), ("uint", u4), ("int", i2), ("uint", u2)),
    )
)
_FLOATS = tuple(
    QuantType(element.name, element.bits, element)
    for element in (f8e4m3fn, f8e5m2, f8e4m3fnuz, f8e5m2fnuz, f4e2m1)
)
BINARY = QuantType("binary", 1, u8)
MIXED = QuantType("mixed", 8, i8)  # at most 8 bits, a width for each channel
WIDTHS = (2, 4, 8)  # of the channels of `mixed`

TYPES = {one.name: one for one in (*_INTEGERS, *_FLOATS, BINARY, MIXED)}
_ALIASES = {
    **{one.element.name: one for one in _INTEGERS},
    "float8_e4m3fn": TYPES["f8e4m3fn"],
    "float8_e5m2": TYPES["f8e5m2"],
    "float4_e2m1": TYPES["f4e2m1"],
}

_ALL = frozenset(GRANULARITIES)
COMBINATIONS: dict[tuple[str, Scheme], frozenset[type[Granularity]]] = {
    **{(one.name, Scheme.symmetric): _ALL for one in (*_INTEGERS, *_FLOATS)},
    **{(one.name, Scheme.asymmetric): _ALL for one in _INTEGERS},
    **{(one.name, Scheme.logarithmic): _ALL for one in _INTEGERS},
    ("binary", Scheme.binary): _ALL,
    ("mixed", Scheme.symmetric): frozenset({PerAxis}),
}


def get(name: str | QuantType | DType) -> QuantType:
    """The type of this name: "int8", or the element type's name, "i8"."""
    if isinstance(name, QuantType):
        return name
    text = name.name if isinstance(name, DType) else name
    found = TYPES.get(text) or _ALIASES.get(text)
    if found is None:
        raise QuantizationError(
            f"no quantized type is named {text!r}", expected=", ".join(TYPES), found=text
        )
    return found


def scheme(name: str | Scheme | None, of: QuantType) -> Scheme:
    """The scheme of this name; None is the type's default, "linear" is asymmetric."""
    if isinstance(name, Scheme):
        return name
    if name is None:
        if of == BINARY:
            return Scheme.binary
        return Scheme.symmetric if of.is_signed else Scheme.asymmetric
    if name == "linear":
        return Scheme.asymmetric
    try:
        return Scheme(name)
    except ValueError:
        raise QuantizationError(
            f"no scheme is named {name!r}", expected=", ".join(map(str, Scheme)), found=name
        ) from None


def check(of: QuantType, by: Scheme, granularity: Granularity) -> None:
    """Raise unless COMBINATIONS has this combination."""
    allowed = COMBINATIONS.get((of.name, by))
    if allowed is None:
        schemes = [str(one) for name, one in COMBINATIONS if name == of.name]
        raise QuantizationError(
            f"{of} has no {by} scheme", expected=" or ".join(schemes), found=str(by)
        )
    if type(granularity) not in allowed:
        names = {PerTensor: "per tensor", PerAxis: "per axis", PerGroup: "per group"}
        raise QuantizationError(
            f"{by} {of} is not quantized {granularity}",
            expected=" or ".join(sorted(names[one] for one in allowed)),
            found=str(granularity),
        )
