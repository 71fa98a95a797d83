"""Quantized weights q[N, K] as 32-bit words in groups of 32 weights, packed at compile time.

    4 bits    4 words a group: byte i of word j holds weights 8j + i (low) and 8j + 4 + i (high)
    8 bits    8 words a group: byte i of word j holds weight 4j + i

So `word & 0x0F0F0F0F` and `(word >> 4) & 0x0F0F0F0F` are four consecutive weights each, as `dp4a`
takes them. Integers of 4 bits are stored as q + 8 (signed) or q; those of 8 bits as q or q - 128
(unsigned): `offset` is what has to be subtracted besides the zero point. 2-bit integers are
stored in 4 bits. K is padded with zeros to whole groups; activations are 0 there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import DType, dtype, f4e2m1, f8e4m3fn, f8e5m2, i2, i4, i8, u2, u4, u8

Array = np.ndarray[Any, Any]
GROUP = 32
NARROW = (i4, u4, i2, u2, f4e2m1)
BYTES = (i8, u8, f8e4m3fn, f8e5m2)


@dataclass(frozen=True)
class PackedWeight:
    kind: DType
    words: Array
    """i32[N, groups * words_per_group]."""
    scale: Array
    """[N, blocks]."""
    zero: Array | None
    """[N, blocks], i8, u8 or f32."""
    block: int
    offset: int

    @property
    def is_narrow(self) -> bool:
        """Whether a weight has 4 bits."""
        return self.kind in NARROW

    @property
    def per_group(self) -> int:
        return GROUP // 8 if self.is_narrow else GROUP // 4

    @property
    def groups(self) -> int:
        return int(self.words.shape[1]) // self.per_group

    @property
    def is_integer(self) -> bool:
        """Whether sums are those of integers."""
        whole = self.zero is None or self.zero.dtype.kind in "iu"
        return self.kind.is_integer and whole


def why_not_pack(kind: DType, block: int, depth: int) -> str:
    """Why weights have no packed form, or ""."""
    if kind not in (*NARROW, *BYTES):
        return f"weights of {kind} have no packed form"
    if block % GROUP and block < depth:
        return f"blocks of {block} are not whole groups of {GROUP}"
    return ""


def pack(q: Array, scale: Array, zero: Array | None, block: int) -> PackedWeight:
    """The packed form of weights that `why_not_pack` accepts."""
    kind = dtype(q.dtype)
    rows, depth = q.shape
    groups = max(-(-depth // GROUP), 1)
    offset, values = _as_bytes(q, kind)
    padded = np.zeros((rows, groups * GROUP), np.uint8)
    padded[:, :depth] = values
    if kind in NARROW:
        parts = padded.reshape(rows, groups * GROUP // 8, 2, 4)
        padded = parts[:, :, 0] | (parts[:, :, 1] << 4)
    words = np.ascontiguousarray(padded).reshape(rows, -1).view(np.int32)
    if zero is not None:
        zero = _as_zero(zero)
    return PackedWeight(kind, words, _as_scale(scale), zero, max(block, GROUP), offset)


def unpack(packed: PackedWeight, depth: int) -> Array:
    """The bytes of the stored weights, [N, K]; the inverse of `pack`."""
    stored = packed.words.view(np.uint8).reshape(len(packed.words), -1)
    if packed.is_narrow:
        parts = stored.reshape(len(stored), -1, 4)
        stored = np.stack([parts & 15, parts >> 4], 2).reshape(len(stored), -1)
    return np.ascontiguousarray(stored[:, :depth])


def _as_bytes(q: Array, kind: DType) -> tuple[int, Array]:
    """The offset of the stored weights, and their bytes."""
    if kind in (i4, i2):
        return 8, (q.astype(np.int8) + 8).astype(np.uint8)
    if kind in (u4, u2):
        return 0, q.astype(np.uint8)
    if kind == u8:
        return -128, (q.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
    return 0, q.view(np.uint8)


def _as_scale(scale: Array) -> Array:
    kept = dtype(scale.dtype).name in ("f32", "f16", "bf16")
    return np.ascontiguousarray(scale if kept else scale.astype(np.float32))


def _as_zero(zero: Array) -> Array:
    kind = dtype(zero.dtype)
    if kind.is_float:
        return zero.astype(np.float32)
    return zero.astype(np.int8 if kind.is_signed else np.uint8)
