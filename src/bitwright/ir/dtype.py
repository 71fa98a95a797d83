"""Element types: their names, widths, ranges and numpy forms.

Numpy arrays hold types narrower than a byte with one value per byte (ml_dtypes). Packing belongs to
storage, not to the type.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from bitwright.errors import GraphError


class Family(Enum):
    FLOAT = "float"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    BOOL = "bool"
    COMPLEX = "complex"
    STRING = "string"


@dataclass(frozen=True, eq=False)
class DType:
    """An element type. There is one object per type, so types compare by identity."""

    name: str
    bits: int
    family: Family
    numpy: np.dtype[Any]

    def __reduce__(self) -> Any:
        return dtype, (self.name,)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def is_float(self) -> bool:
        return self.family is Family.FLOAT

    @cached_property
    def is_integer(self) -> bool:
        return self.family in (Family.SIGNED, Family.UNSIGNED)

    @cached_property
    def is_signed(self) -> bool:
        return self.family in (Family.SIGNED, Family.FLOAT)

    @cached_property
    def is_complex(self) -> bool:
        return self.family is Family.COMPLEX

    @property
    def values_per_byte(self) -> int:
        return max(1, 8 // self.bits) if self.bits else 1

    @property
    def min(self) -> float | int:
        """The lowest finite value."""
        return self._range[0]

    @property
    def max(self) -> float | int:
        """The highest finite value."""
        return self._range[1]

    @cached_property
    def _range(self) -> tuple[float | int, float | int]:
        if self.family is Family.BOOL:
            return 0, 1
        if self.is_integer:
            whole = ml_dtypes.iinfo(self.numpy)  # type: ignore[no-untyped-call]
            return int(whole.min), int(whole.max)
        real = ml_dtypes.finfo(self.numpy)  # type: ignore[no-untyped-call]
        return float(real.min), float(real.max)

    def nbytes(self, count: int) -> int:
        """Bytes that `count` values take when packed."""
        return (count * self.bits + 7) // 8


def _make(name: str, bits: int, family: Family, numpy: object) -> DType:
    return DType(name, bits, family, np.dtype(numpy))  # type: ignore[call-overload]


f64 = _make("f64", 64, Family.FLOAT, np.float64)
f32 = _make("f32", 32, Family.FLOAT, np.float32)
f16 = _make("f16", 16, Family.FLOAT, np.float16)
bf16 = _make("bf16", 16, Family.FLOAT, ml_dtypes.bfloat16)
f8e4m3fn = _make("f8e4m3fn", 8, Family.FLOAT, ml_dtypes.float8_e4m3fn)
f8e5m2 = _make("f8e5m2", 8, Family.FLOAT, ml_dtypes.float8_e5m2)
f8e4m3fnuz = _make("f8e4m3fnuz", 8, Family.FLOAT, ml_dtypes.float8_e4m3fnuz)
f8e5m2fnuz = _make("f8e5m2fnuz", 8, Family.FLOAT, ml_dtypes.float8_e5m2fnuz)
f8e8m0 = _make("f8e8m0", 8, Family.FLOAT, ml_dtypes.float8_e8m0fnu)
f4e2m1 = _make("f4e2m1", 4, Family.FLOAT, ml_dtypes.float4_e2m1fn)
i64 = _make("i64", 64, Family.SIGNED, np.int64)
i32 = _make("i32", 32, Family.SIGNED, np.int32)
i16 = _make("i16", 16, Family.SIGNED, np.int16)
i8 = _make("i8", 8, Family.SIGNED, np.int8)
i4 = _make("i4", 4, Family.SIGNED, ml_dtypes.int4)
i2 = _make("i2", 2, Family.SIGNED, ml_dtypes.int2)
u64 = _make("u64", 64, Family.UNSIGNED, np.uint64)
u32 = _make("u32", 32, Family.UNSIGNED, np.uint32)
u16 = _make("u16", 16, Family.UNSIGNED, np.uint16)
u8 = _make("u8", 8, Family.UNSIGNED, np.uint8)
u4 = _make("u4", 4, Family.UNSIGNED, ml_dtypes.uint4)
u2 = _make("u2", 2, Family.UNSIGNED, ml_dtypes.uint2)
bool_ = _make("bool", 8, Family.BOOL, np.bool_)
c64 = _make("c64", 64, Family.COMPLEX, np.complex64)
c128 = _make("c128", 128, Family.COMPLEX, np.complex128)
string = _make("string", 0, Family.STRING, object)

DTYPES = {value.name: value for value in list(globals().values()) if isinstance(value, DType)}
_FROM_NUMPY = {dtype.numpy: dtype for dtype in DTYPES.values()}

FLOATS = tuple(dtype for dtype in DTYPES.values() if dtype.is_float)
INTEGERS = tuple(dtype for dtype in DTYPES.values() if dtype.is_integer)


def dtype(name: str | DType | np.dtype[Any] | type) -> DType:
    """The element type of this name or numpy dtype."""
    if isinstance(name, DType):
        return name
    if isinstance(name, str):
        if name in DTYPES:
            return DTYPES[name]
        raise GraphError(f"no element type is named {name!r}", expected=", ".join(DTYPES))
    found = np.dtype(name)
    if found.kind in "US":
        return string
    if found in _FROM_NUMPY:
        return _FROM_NUMPY[found]
    raise GraphError(f"numpy dtype {found} has no element type here")


def holds_exactly(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if wide == narrow:
        return True
    plain = {"f64": (53, 11), "f32": (24, 8), "f16": (11, 5), "bf16": (8, 8)}
    if wide.name in plain and narrow.name in plain:
        return all(w >= n for w, n in zip(plain[wide.name], plain[narrow.name], strict=True))
    if wide.name in plain and narrow.is_integer:
        return narrow.bits <= plain[wide.name][0]
    if wide.is_integer and narrow.is_integer:
        if wide.family is narrow.family:
            return wide.bits >= narrow.bits
        return wide.family is Family.SIGNED and wide.bits > narrow.bits
    return narrow.family is Family.BOOL and (wide.is_integer or wide.name in plain)
