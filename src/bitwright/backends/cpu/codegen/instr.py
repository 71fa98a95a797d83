"""Target instructions without a generic LLVM form: dot products of narrow integers and of bf16,
saturating packs, and lookups in one or two vectors.

Each `Instr` has its LLVM name, required features, types, and its meaning in numpy; tests compare it
with the hardware lane by lane. Kernels select by target:

    dot = dot_u8s8(f.target)                       # None if the target has no such instruction
    acc = dot(f, acc, a, b)                        # acc[i] += sum of a[4i + j] * b[4i + j], j < 4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Function, Type, Value, bf16, f32, i8, i16, i32
from bitwright.errors import CompileError
from bitwright.target import Target

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Instr:
    llvm_name: str
    needs: tuple[str, ...]
    """The required target features."""
    result: Type
    operands: tuple[Type, ...]
    mnemonic: str
    """The name in assembly."""
    meaning: Callable[..., Array]
    """The result as a function of the operands' lanes (signed integers; f32 for bf16)."""

    def __call__(self, f: Function, *operands: Value) -> Value:
        if not f.target.has(*self.needs):
            raise CompileError(
                f"{self.mnemonic} does not exist on {f.target}", expected=", ".join(self.needs)
            )
        values = [
            f.as_value(operand, type_)
            for operand, type_ in zip(operands, self.operands, strict=True)
        ]
        return f.intrinsic(self.llvm_name, self.result, *values)


def _group_sums(a: Array, b: Array, group: int) -> Array:
    """Exact sums of `group` neighbouring products."""
    sums: Array = (a.astype(np.int64) * b.astype(np.int64)).reshape(-1, group).sum(1)
    return sums


def _dot4(acc: Array, a: Array, b: Array) -> Array:
    """Sums of four products added to 32-bit lanes, wrapping."""
    return (acc.astype(np.int64) + _group_sums(a, b, 4)).astype(np.int32)


def _u8s8(acc: Array, a: Array, b: Array) -> Array:
    return _dot4(acc, a.view(np.uint8), b)


def _u8s8_saturating(acc: Array, a: Array, b: Array) -> Array:
    total: Array = acc.astype(np.int64) + _group_sums(a.view(np.uint8), b, 4)
    return np.clip(total, -(2**31), 2**31 - 1).astype(np.int32)


def _u8u8(acc: Array, a: Array, b: Array) -> Array:
    return _dot4(acc, a.view(np.uint8), b.view(np.uint8))


def _s16(acc: Array, a: Array, b: Array) -> Array:
    return (acc.astype(np.int64) + _group_sums(a, b, 2)).astype(np.int32)


def _pairs_s16(a: Array, b: Array) -> Array:
    """Sums of two 16-bit products; wraps only where all four factors are -32768."""
    return _group_sums(a, b, 2).astype(np.int32)


def _pairs_u8s8(a: Array, b: Array) -> Array:
    """Sums of two products, saturated to 16 bits, hence not exact for all operands."""
    sums = _group_sums(a.view(np.uint8), b, 2)
    return np.clip(sums, -(2**15), 2**15 - 1).astype(np.int16)


def _packed(a: Array, b: Array, low: int, high: int, to: type) -> Array:
    """Per 16 bytes: the elements of a saturated to half as many bits, then those of b."""
    parts = [np.clip(x, low, high).reshape(-1, 16 // x.itemsize) for x in (a, b)]
    return np.concatenate(parts, axis=1).reshape(-1).astype(to)


def _pack_words(a: Array, b: Array) -> Array:
    return _packed(a, b, -(2**15), 2**15 - 1, np.int16)


def _pack_u8(a: Array, b: Array) -> Array:
    return _packed(a, b, 0, 255, np.uint8).view(np.int8)


def _pack_i8(a: Array, b: Array) -> Array:
    return _packed(a, b, -128, 127, np.int8)


def _shuffled(table: Array, places: Array) -> Array:
    """Bytes looked up within each 16 bytes; 0 where the top bit of the index is set."""
    parts, at = table.reshape(-1, 16), places.view(np.uint8).reshape(-1, 16)
    picked = np.take_along_axis(parts, (at & 15).astype(np.intp), axis=1)
    return np.where(at & 0x80, 0, picked).reshape(-1).astype(table.dtype)


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def _bf16_dot(acc: Array, a: Array, b: Array) -> Array:
    """acc + a1 b1 + a0 b0, the odd lane first, each step fused; denormals are flushed."""
    a, b = _flushed(a).astype(np.float64), _flushed(b).astype(np.float64)
    first = _flushed((_flushed(acc).astype(np.float64) + a[1::2] * b[1::2]).astype(np.float32))
    return _flushed((first.astype(np.float64) + a[::2] * b[::2]).astype(np.float32))


def _x86_dots(width: int, needs: tuple[str, ...], suffix: str) -> list[Instr]:
    lanes = width // 32
    acc, byte, word = i32.vector(lanes), i8.vector(4 * lanes), i16.vector(2 * lanes)
    rows: tuple[tuple[str, Type, Callable[..., Array]], ...] = (
        ("vpdpbusd", byte, _u8s8),
        ("vpdpbusds", byte, _u8s8_saturating),
        ("vpdpwssd", word, _s16),
    )
    return [
        Instr(f"llvm.x86.avx512.{name}.{suffix}", needs, acc, (acc, part, part), name, meaning)
        for name, part, meaning in rows
    ]


def _x86_pairs(lanes: int, needs: tuple[str, ...], wide: str, narrow: str) -> list[Instr]:
    """vpmaddwd (16-bit pairs to `lanes` of 32) and vpmaddubsw (8-bit pairs to 16)."""
    word, byte = i16.vector(2 * lanes), i8.vector(4 * lanes)
    return [
        Instr(wide, needs, i32.vector(lanes), (word, word), "vpmaddwd", _pairs_s16),
        Instr(narrow, needs, word, (byte, byte), "vpmaddubsw", _pairs_u8s8),
    ]


def _x86_packs(lanes: int, needs: tuple[str, ...], place: str, suffix: str, v: str) -> list[Instr]:
    """vpackssdw (i32 to i16), vpackuswb and vpacksswb (i16 to u8 and i8) for `lanes` of 32 bits."""
    wide, word, byte = i32.vector(lanes), i16.vector(2 * lanes), i8.vector(4 * lanes)
    rows: tuple[tuple[str, Type, Type, Callable[..., Array]], ...] = (
        ("packssdw", wide, word, _pack_words),
        ("packuswb", word, byte, _pack_u8),
        ("packsswb", word, byte, _pack_i8),
    )
    return [
        Instr(f"llvm.x86.{place}.{name}{suffix}", needs, to, (part, part), v + name, meaning)
        for name, part, to, meaning in rows
    ]


def _neon(name: str, needs: tuple[str, ...], meaning: Callable[..., Array]) -> Instr:
    acc, byte = i32.vector(4), i8.vector(16)
    return Instr(
        f"llvm.aarch64.neon.{name}.v4i32.v16i8", needs, acc, (acc, byte, byte), name, meaning
    )


_VNNI_512 = _x86_dots(512, ("avx512vnni",), "512")
_VNNI_256 = _x86_dots(256, ("avx512vnni", "avx512vl"), "256")
_AVX_VNNI = _x86_dots(256, ("avxvnni",), "256")
_MADD_512 = _x86_pairs(
    16, ("avx512bw",), "llvm.x86.avx512.pmaddw.d.512", "llvm.x86.avx512.pmaddubs.w.512"
)
_MADD_256 = _x86_pairs(8, ("avx2",), "llvm.x86.avx2.pmadd.wd", "llvm.x86.avx2.pmadd.ub.sw")
_MADD_128 = Instr(
    "llvm.x86.sse2.pmadd.wd", ("sse2",), i32.vector(4), (i16.vector(8),) * 2, "pmaddwd", _pairs_s16
)
_PACKS_512 = _x86_packs(16, ("avx512bw",), "avx512", ".512", "v")
_PACKS_256 = _x86_packs(8, ("avx2",), "avx2", "", "v")
_PACKS_128 = _x86_packs(4, ("sse2",), "sse2", ".128", "")
_BF16_512 = Instr(
    "llvm.x86.avx512bf16.dpbf16ps.512",
    ("avx512bf16",),
    f32.vector(16),
    (f32.vector(16), bf16.vector(32), bf16.vector(32)),
    "vdpbf16ps",
    _bf16_dot,
)
_LOOKUP_512 = Instr(
    "llvm.x86.avx512.permvar.sf.512",
    ("avx512f",),
    f32.vector(16),
    (f32.vector(16), i32.vector(16)),
    "vpermps",
    lambda table, places: table[places & 15],
)
_PICK_512 = Instr(
    "llvm.x86.avx512.vpermi2var.qi.512",
    ("avx512vbmi",),
    i8.vector(64),
    (i8.vector(64), i8.vector(64), i8.vector(64)),
    "vperm",
    lambda low, places, high: np.concatenate([low, high])[places & 127],
)
_SHUFFLE_256 = Instr(
    "llvm.x86.avx2.pshuf.b",
    ("avx2",),
    i8.vector(32),
    (i8.vector(32), i8.vector(32)),
    "vpshufb",
    lambda table, places: _shuffled(table, places),
)
_SIGN_256 = Instr(
    "llvm.x86.avx2.psign.b",
    ("avx2",),
    i8.vector(32),
    (i8.vector(32), i8.vector(32)),
    "vpsignb",
    lambda a, b: (a.astype(np.int64) * np.sign(b)).astype(np.int8),
)
_NEON_DOTS = [
    _neon("sdot", ("dotprod",), _dot4),
    _neon("udot", ("dotprod",), _u8u8),
    _neon("usdot", ("i8mm",), _u8s8),
]

ALL = (
    *_VNNI_512, *_VNNI_256, *_AVX_VNNI, *_MADD_512, *_MADD_256, _MADD_128, *_PACKS_512, *_PACKS_256,
    *_PACKS_128, _BF16_512, _LOOKUP_512, _PICK_512, _SHUFFLE_256, _SIGN_256,
    *_NEON_DOTS,
)  # fmt: skip


def _first(target: Target, *choices: Instr) -> Instr | None:
    return next((choice for choice in choices if target.has(*choice.needs)), None)


def dot_u8s8(target: Target) -> Instr | None:
    """acc[i] += Σ a[4i+j] b[4i+j] with a unsigned and b signed, at the target's widest vectors."""
    return _first(target, _VNNI_512[0], _AVX_VNNI[0], _VNNI_256[0], _NEON_DOTS[2])


def dot_s8s8(target: Target) -> Instr | None:
    """acc[i] += Σ a[4i+j] b[4i+j] with both signed."""
    return _first(target, _NEON_DOTS[0])


def dot_s16s16(target: Target) -> Instr | None:
    """acc[i] += Σ a[2i+j] b[2i+j] of 16-bit integers."""
    return _first(target, _VNNI_512[2], _AVX_VNNI[2], _VNNI_256[2])


def pairs_s16s16(target: Target) -> Instr | None:
    """Σ a[2i+j] b[2i+j] of 16-bit integers as a 32-bit one, without an accumulator."""
    return _first(target, _MADD_512[0], _MADD_256[0], _MADD_128)


def pairs_u8s8(target: Target) -> Instr | None:
    """Σ a[2i+j] b[2i+j] of 8-bit integers, saturated to 16 bits."""
    return _first(target, _MADD_512[1], _MADD_256[1])


def dot_bf16(target: Target) -> Instr | None:
    """acc[i] += a[2i+1] b[2i+1] + a[2i] b[2i] in f32, from bf16."""
    return _first(target, _BF16_512)


def lookup_f32(target: Target) -> Instr | None:
    """table[index & 15] of 16 numbers, lane by lane."""
    return _first(target, _LOOKUP_512)


def packs(target: Target, lanes: int, signed: bool) -> tuple[Instr, Instr] | None:
    """Saturating packs of two vectors of `lanes` 32-bit integers to 16 bits, and of two such to
    8 bits; each interleaves its operands by 16 bytes."""
    found = {16: _PACKS_512, 8: _PACKS_256, 4: _PACKS_128}.get(lanes)
    if found is None or not target.has(*found[0].needs):
        return None
    return found[0], found[2 if signed else 1]


def pick_bytes(target: Target) -> Instr | None:
    """Byte lookup in two vectors of 64 entries by the lower seven bits of each index."""
    return _first(target, _PICK_512)


def shuffle_bytes(target: Target) -> Instr | None:
    """Byte lookup within each 16 bytes by the lower four bits; 0 where the top bit is set."""
    return _first(target, _SHUFFLE_256)


def with_signs(target: Target) -> Instr | None:
    """Bytes of a times the signs of b."""
    return _first(target, _SIGN_256)
