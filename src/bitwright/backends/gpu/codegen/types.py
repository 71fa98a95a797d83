"""Element types in Triton: how they are stored and what they are computed in."""

from __future__ import annotations

from bitwright.errors import CompileError
from bitwright.ir.dtype import (
    DType,
    bf16,
    bool_,
    f4e2m1,
    f8e4m3fn,
    f8e5m2,
    f16,
    f32,
    f64,
    i2,
    i4,
    i8,
    i16,
    i32,
    i64,
    u2,
    u4,
    u8,
    u16,
    u32,
    u64,
)

_NAMES: dict[DType, tuple[str, str]] = {
    f64: ("tl.float64", "fp64"),
    f32: ("tl.float32", "fp32"),
    f16: ("tl.float16", "fp16"),
    bf16: ("tl.bfloat16", "bf16"),
    f8e4m3fn: ("tl.float8e4nv", "fp8e4nv"),
    f8e5m2: ("tl.float8e5", "fp8e5"),
    i64: ("tl.int64", "i64"),
    i32: ("tl.int32", "i32"),
    i16: ("tl.int16", "i16"),
    i8: ("tl.int8", "i8"),
    u64: ("tl.uint64", "u64"),
    u32: ("tl.uint32", "u32"),
    u16: ("tl.uint16", "u16"),
    u8: ("tl.uint8", "u8"),
    bool_: ("tl.int1", "i1"),
    # one element per byte
    i4: ("tl.int8", "i8"),
    i2: ("tl.int8", "i8"),
    u4: ("tl.uint8", "u8"),
    u2: ("tl.uint8", "u8"),
    f4e2m1: ("tl.uint8", "u8"),
}
_HALF = (f16, bf16)


def is_stored(dtype: DType) -> bool:
    """Whether buffers on the device can hold this type."""
    return dtype in _NAMES


def triton_type(dtype: DType) -> str:
    """The type in Triton source, such as "tl.float32"."""
    return _known(dtype)[0]


def signature_type(dtype: DType) -> str:
    """The type in a kernel's signature, such as "fp32"; a pointer has "*" before it."""
    return _known(dtype)[1]


def widened(dtype: DType) -> DType:
    """The type that elements are computed in: f32 for shorter floats."""
    return f32 if dtype in _HALF else dtype


def _known(dtype: DType) -> tuple[str, str]:
    if dtype not in _NAMES:
        raise CompileError("the GPU backend has no such element type", found=dtype)
    return _NAMES[dtype]
