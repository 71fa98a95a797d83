"""Types of emitted values: i1 … i64, f16, bf16, f32, f64, ptr, and fixed vectors of them.

Types are unique objects, compared with `is`. `f32.vector(16)` is `<16 x float>`; a vector of one
lane is the scalar, so a kernel written for any number of lanes also covers scalars.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import ml_dtypes
import numpy as np

from bitwright.errors import CompileError
from bitwright.ir.dtype import DType


class Type:
    __slots__ = ("_vectors", "bits", "is_float", "is_int", "lanes", "mangled", "scalar", "text")

    def __init__(self, text: str, mangled: str, bits: int, is_int: bool, is_float: bool) -> None:
        self.text, self.mangled, self.bits = text, mangled, bits
        self.is_int, self.is_float = is_int, is_float
        self.lanes = 1
        self.scalar = self
        """The type of one lane."""
        self._vectors: dict[int, Type] = {1: self}

    def vector(self, lanes: int) -> Type:
        """A vector with lanes of this scalar type."""
        found = self.scalar._vectors.get(lanes)
        if found is None:
            scalar = self.scalar
            kind = (scalar.bits, scalar.is_int, scalar.is_float)
            found = Type(f"<{lanes} x {scalar.text}>", f"v{lanes}{scalar.mangled}", *kind)
            found.lanes, found.scalar, found._vectors = lanes, scalar, scalar._vectors
            scalar._vectors[lanes] = found
        return found

    def of(self, scalar: Type) -> Type:
        """A type with the same lanes of another scalar type."""
        return scalar.vector(self.lanes)

    @property
    def bytes(self) -> int:
        """Bytes of one lane in memory."""
        return max(1, self.bits // 8)

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.lanes

    @property
    def is_vector(self) -> bool:
        return self.lanes > 1

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__


void = Type("void", "void", 0, False, False)
ptr = Type("ptr", "p0", 64, False, False)
i1, i8, i16, i32, i64 = (Type(f"i{n}", f"i{n}", n, True, False) for n in (1, 8, 16, 32, 64))
f16 = Type("half", "f16", 16, False, True)
bf16 = Type("bfloat", "bf16", 16, False, True)
f32 = Type("float", "f32", 32, False, True)
f64 = Type("double", "f64", 64, False, True)

_STORED = {
    **{"f64": f64, "f32": f32, "f16": f16, "bf16": bf16},
    **{f"{sign}{type_.bits}": type_ for sign in "iu" for type_ in (i64, i32, i16, i8)},
    "bool": i8,
}


def storage_type(dtype: DType) -> Type:
    """The type of a tensor element in memory (a bool is a byte; signedness is in the ops)."""
    if dtype.name not in _STORED:
        raise CompileError(
            f"elements of type {dtype} are not supported on the CPU", expected=", ".join(_STORED)
        )
    return _STORED[dtype.name]


def computed(dtype: DType) -> Type:
    """The type that elements are computed in: f32 for half floats, i1 for bools."""
    if dtype.name in ("f16", "bf16"):
        return f32
    return i1 if dtype.name == "bool" else storage_type(dtype)


@lru_cache(4096)
def literal(scalar: Type, number: float, negative_zero: bool) -> str:
    """The text of a scalar constant; `negative_zero` separates -0.0 from 0.0 in the cache."""
    if scalar.is_int:
        if scalar is i1:
            return "true" if number else "false"
        wrapped = int(number) & ((1 << scalar.bits) - 1)
        return str(wrapped - (1 << scalar.bits) if wrapped >> (scalar.bits - 1) else wrapped)
    if scalar is ptr:
        if number == 0:
            return "null"
        raise CompileError("a pointer constant can only be 0", found=number)
    if scalar is f16:
        return f"0xH{int(np.float16(number).view(np.uint16)):04X}"
    if scalar is bf16:
        return f"0xR{int(np.asarray(number, ml_dtypes.bfloat16).view(np.uint16)):04X}"
    if scalar is f32:
        with np.errstate(over="ignore"):
            number = float(np.float32(number))
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def constant(type_: Type, number: float) -> str:
    """The text of a constant, the same number in every lane."""
    text = literal(type_.scalar, number, number == 0 and math.copysign(1, number) < 0)
    return f"splat ({type_.scalar.text} {text})" if type_.lanes > 1 else text
