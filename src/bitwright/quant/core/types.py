"""What a code can be: the quantized element types and the schemes that give codes a meaning.

    symmetric     x = q * scale                          asymmetric   x = (q - zero_point) * scale
    logarithmic   x = sign(q) * scale * base**(1 - |q|), 0 for q = 0
    binary        x = scale where the bit is set, else -scale

COMBINATIONS is the one table of what exists; everything else is an error.
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
    f8e5m2,
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


class Granularity(Enum):
    per_tensor = "per tensor"
    per_axis = "per axis"
    per_block = "per block"

    @staticmethod
    def of(axis: int | None, block: int) -> Granularity:
        """That of scales along an axis (or none) for `block` indices (0: one)."""
        if axis is None:
            return Granularity.per_tensor
        return Granularity.per_block if block else Granularity.per_axis

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class QuantType:
    """A quantized element type; `element` is how numpy and the IR hold one code."""

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
        """Of the bytes of f32, without scales and zero points."""
        return 1 - self.bits / 32

    def nbytes(self, count: int) -> int:
        """Bytes that `count` codes take when packed."""
        return (count * self.bits + 7) // 8


_INTEGERS = (
    QuantType("int8", 8, i8),
    QuantType("uint8", 8, u8),
    QuantType("int16", 16, i16),
    QuantType("uint16", 16, u16),
    QuantType("int4", 4, i4),
    QuantType("uint4", 4, u4),
    QuantType("int2", 2, i2),
    QuantType("uint2", 2, u2),
)
_FLOATS = (
    QuantType("f8e4m3fn", 8, f8e4m3fn),
    QuantType("f8e5m2", 8, f8e5m2),
    QuantType("f4e2m1", 4, f4e2m1),
)
BINARY = QuantType("binary", 1, u8)
MIXED = QuantType("mixed", 8, i8)  # at most 8 bits, a width of its own for each channel
WIDTHS = (2, 4, 8)  # of the channels of `mixed`

TYPES = {one.name: one for one in (*_INTEGERS, *_FLOATS, BINARY, MIXED)}
_ALIASES = {
    **{one.element.name: one for one in (*_INTEGERS, *_FLOATS)},
    "float8_e4m3fn": TYPES["f8e4m3fn"],
    "float8_e5m2": TYPES["f8e5m2"],
    "float4_e2m1": TYPES["f4e2m1"],
}


@dataclass(frozen=True)
class BlockFormat:
    """A float type in blocks, with scales of a narrow type."""

    element: str
    block: int
    scale: str


FORMATS = {
    "f8": BlockFormat("f8e4m3fn", 128, "f32"),
    "mxfp4": BlockFormat("f4e2m1", 32, "f8e8m0"),
    "mxfp8": BlockFormat("f8e4m3fn", 32, "f8e8m0"),
    "mxfp8e5m2": BlockFormat("f8e5m2", 32, "f8e8m0"),
    "nvfp4": BlockFormat("f4e2m1", 16, "f8e4m3fn"),
}

_ALL = frozenset(Granularity)
COMBINATIONS: dict[tuple[str, Scheme], frozenset[Granularity]] = {
    **{(one.name, Scheme.symmetric): _ALL for one in (*_INTEGERS, *_FLOATS)},
    **{(one.name, Scheme.asymmetric): _ALL for one in _INTEGERS},
    **{(one.name, Scheme.logarithmic): _ALL for one in _INTEGERS},
    ("binary", Scheme.binary): _ALL,
    ("mixed", Scheme.symmetric): frozenset({Granularity.per_axis}),
}


def get(name: str | QuantType | DType) -> QuantType:
    """The type of this name: "int8", or the element type's own name, "i8"."""
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
    """The scheme of this name; None is the type's usual one, "linear" the asymmetric one."""
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
    """Raise unless the table holds this combination."""
    allowed = COMBINATIONS.get((of.name, by))
    if allowed is None:
        schemes = [str(one) for name, one in COMBINATIONS if name == of.name]
        raise QuantizationError(
            f"{of} has no {by} scheme", expected=" or ".join(schemes), found=str(by)
        )
    if granularity not in allowed:
        raise QuantizationError(
            f"{by} {of} is not quantized {granularity}",
            expected=" or ".join(sorted(map(str, allowed))),
            found=str(granularity),
        )
