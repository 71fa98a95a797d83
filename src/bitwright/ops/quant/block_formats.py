"""Block formats of stored weights, as GGUF files define them.

    w = scale * q - minimum         per element of a block

A format says how many elements and bytes a block has, and `split` returns the parts of blocks:
quantized values, and scales and minimums per run of `run` elements. K formats have two levels:
each is a float of the block times a small integer of the run. F32, F16 and BF16 are plain.

    FORMATS["Q4_K"].dequantize(blocks)      # u8[..., bytes] -> f32[..., elements]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.graph import nearest

Array = np.ndarray[Any, Any]
RUN = 32
"""Elements of a row of activations that share a scale."""


@dataclass(frozen=True)
class Parts:
    """The parts of n blocks; scales as they are stored, so that kernels may store them too."""

    unpack: Callable[[], Array]
    """Computes `q`, which a kernel's packing may not need."""
    scale: Array
    """f16 or f32 [n]"""
    minimum: Array | None = None
    """f16[n]"""
    scale_steps: Array | None = None
    """i8[n, runs]: factors of the scale."""
    minimum_steps: Array | None = None
    """u8[n, runs]: factors of the minimum."""

    @property
    def q(self) -> Array:
        """u8[n, elements]: values plus `zero`, or indices of the table."""
        return self.unpack()

    def scales(self) -> Array:
        """f32[n, runs]"""
        return _levels(self.scale, self.scale_steps)

    def minimums(self) -> Array | None:
        """f32[n, runs], or None where every minimum is 0."""
        return None if self.minimum is None else _levels(self.minimum, self.minimum_steps)


def _levels(whole: Array, steps: Array | None) -> Array:
    factor = whole.astype(np.float32)[:, None]
    return factor if steps is None else factor * steps.astype(np.float32)


@dataclass(frozen=True)
class BlockFormat:
    """A format of stored weights."""

    name: str
    elements: int
    nbytes: int
    bits: int
    """Bits of a quantized value; 16 or 32 for floats."""
    zero: int = 0
    """What is added to values so that none is negative; a power of two or 0."""
    run: int = RUN
    """Elements that share a scale."""
    table: tuple[int, ...] = ()
    """The value of each index, plus `zero`."""
    plain_at: int | None = None
    """Where values of 4 or 8 bits begin in a block, if each 32 are stored in the common order:
    bytes, or nibbles of elements i and i + 16."""
    split: Callable[[Array], Parts] | None = None
    """The parts of blocks u8[n, nbytes]; None for floats."""
    has_minimum: bool = False
    has_steps: bool = False
    """Whether scales have two levels."""

    @property
    def is_float(self) -> bool:
        return self.split is None

    @cached_property
    def values(self) -> Array | None:
        """The table as an array."""
        return np.array(self.table, np.uint8) if self.table else None

    def row_bytes(self, count: int) -> int:
        """The bytes of a row of `count` elements."""
        if count % self.elements:
            raise BitwrightError(
                f"a row of {self.name} has no whole number of blocks",
                expected=f"a multiple of {self.elements} elements",
                found=count,
            )
        return count // self.elements * self.nbytes

    def dequantize(self, blocks: Array) -> Array:
        """The weights of rows of blocks: u8[..., bytes] to f32[..., elements]."""
        data = np.ascontiguousarray(blocks)
        rows, width = data.shape[:-1], data.shape[-1]
        if width % self.nbytes:
            raise BitwrightError(
                f"a row of {self.name} has no whole number of blocks",
                expected=f"a multiple of {self.nbytes} bytes",
                found=width,
            )
        shape = (*rows, width // self.nbytes * self.elements)
        if self.split is None:
            return _floats(self.name, data).reshape(shape)
        parts = self.split(data.reshape(-1, self.nbytes))
        values = parts.q
        if self.values is not None:
            values = self.values[values]
        q = values.astype(np.float32) - np.float32(self.zero)
        runs = q.reshape(len(q), self.elements // self.run, self.run)
        with np.errstate(invalid="ignore", over="ignore"):
            found = _spread(parts.scales(), runs) * runs
            minimums = parts.minimums()
            if minimums is not None:
                found = found - _spread(minimums, runs)
        return np.asarray(found, np.float32).reshape(shape)


def _spread(per_run: Array, runs: Array) -> Array:
    return np.broadcast_to(per_run, runs.shape[:2])[..., None]


def _floats(name: str, data: Array) -> Array:
    if name == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if name == "F16" else np.float32).astype(np.float32)


def _half(blocks: Array, start: int) -> Array:
    """The f16 number at a place of every block."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)[:, 0]


def _nibbles(packed: Array, width: int) -> Array:
    """Low halves of `width` bytes, then their high halves, and so on."""
    return _bits(packed, width, 4)


def _bits(packed: Array, width: int, bits: int) -> Array:
    """As `_nibbles` for fields of any width."""
    count, size = packed.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    fields = (packed.reshape(count, size // width, 1, width) >> shifts) & ((1 << bits) - 1)
    return np.asarray(fields.reshape(count, size * 8 // bits))


def _q4_0(blocks: Array) -> Parts:
    return Parts(lambda: _nibbles(blocks[:, 2:], 16), _half(blocks, 0))


def _q4_1(blocks: Array) -> Parts:
    return Parts(lambda: _nibbles(blocks[:, 4:], 16), _half(blocks, 0), -_half(blocks, 2))


def _fifth_bits(blocks: Array, start: int) -> Array:
    """One bit per element from four bytes, in the place of the fifth bit."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4


def _q5_0(blocks: Array) -> Parts:
    q = lambda: _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return Parts(q, _half(blocks, 0))


def _q5_1(blocks: Array) -> Parts:
    q = lambda: _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return Parts(q, _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: Array) -> Parts:
    return Parts(lambda: blocks[:, 2:] ^ 0x80, _half(blocks, 0))


def _q2_k(blocks: Array) -> Parts:
    steps = blocks[:, :16]
    return Parts(
        lambda: _bits(blocks[:, 16:80], 32, 2),
        _half(blocks, 80),
        _half(blocks, 82),
        (steps & 15).view(np.int8),
        steps >> 4,
    )


def _q3_k(blocks: Array) -> Parts:
    q = lambda: _bits(blocks[:, 32:96], 32, 2) | (_bits(blocks[:, :32], 32, 1) << 2)
    low = _nibbles(blocks[:, 96:104], 8)
    high = _bits(blocks[:, 104:108], 4, 2)
    steps = (low | (high << 4)).astype(np.int8) - np.int8(32)
    return Parts(q, _half(blocks, 108), scale_steps=steps)


def _six_bit_steps(packed: Array) -> tuple[Array, Array]:
    """Eight steps of scales and eight of minimums from twelve bytes."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    return scales.view(np.int8), minimums


def _q4_k(blocks: Array) -> Parts:
    q = lambda: _nibbles(blocks[:, 16:], 32)
    return Parts(q, _half(blocks, 0), _half(blocks, 2), *_six_bit_steps(blocks[:, 4:16]))


def _q5_k(blocks: Array) -> Parts:
    q = lambda: _nibbles(blocks[:, 48:], 32) | (_bits(blocks[:, 16:48], 32, 1) << 4)
    return Parts(q, _half(blocks, 0), _half(blocks, 2), *_six_bit_steps(blocks[:, 4:16]))


def _q6_k(blocks: Array) -> Parts:
    q = lambda: _nibbles(blocks[:, :128], 64) | (_bits(blocks[:, 128:192], 32, 2) << 4)
    steps = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Parts(q, _half(blocks, 208), scale_steps=steps)


def _iq4_xs(blocks: Array) -> Parts:
    fields = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    high = (fields >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    packed = blocks[:, 4:8]
    low = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(blocks), 8)
    steps = (low | (high.astype(np.uint8) << 4)).astype(np.int8) - np.int8(32)
    return Parts(lambda: _nibbles(blocks[:, 8:], 16), _half(blocks, 0), scale_steps=steps)


def _mxfp4(blocks: Array) -> Parts:
    e = blocks[:, 0].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x200000) << e, (e - np.uint32(1)) << np.uint32(23))
    return Parts(lambda: _nibbles(blocks[:, 1:], 16), bits.astype(np.uint32).view(np.float32))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4_TABLE = tuple(value + 128 for value in _IQ4)
_FP4_TABLE = tuple(value + 16 for value in _FP4)
_STEPS = partial(BlockFormat, has_steps=True)
_BOTH = partial(BlockFormat, has_steps=True, has_minimum=True)

FORMATS = {
    form.name: form
    for form in (
        BlockFormat("F32", 1, 4, 32),
        BlockFormat("F16", 1, 2, 16),
        BlockFormat("BF16", 1, 2, 16),
        BlockFormat("Q4_0", 32, 18, 4, 8, plain_at=2, split=_q4_0),
        BlockFormat("Q4_1", 32, 20, 4, plain_at=4, split=_q4_1, has_minimum=True),
        BlockFormat("Q5_0", 32, 22, 5, 16, split=_q5_0),
        BlockFormat("Q5_1", 32, 24, 5, split=_q5_1, has_minimum=True),
        BlockFormat("Q8_0", 32, 34, 8, 128, plain_at=2, split=_q8_0),
        _BOTH("Q2_K", 256, 84, 2, run=16, split=_q2_k),
        _STEPS("Q3_K", 256, 110, 3, 4, run=16, split=_q3_k),
        _BOTH("Q4_K", 256, 144, 4, split=_q4_k),
        _BOTH("Q5_K", 256, 176, 5, split=_q5_k),
        _STEPS("Q6_K", 256, 210, 6, 32, run=16, split=_q6_k),
        BlockFormat("IQ4_NL", 32, 18, 4, 128, table=_IQ4_TABLE, plain_at=2, split=_q4_0),
        _STEPS("IQ4_XS", 256, 136, 4, 128, table=_IQ4_TABLE, split=_iq4_xs),
        BlockFormat("MXFP4", 32, 17, 4, 16, table=_FP4_TABLE, plain_at=1, split=_mxfp4),
    )
}


def format_named(name: str) -> BlockFormat:
    """The format of this name; an error lists the known ones."""
    if name not in FORMATS:
        raise BitwrightError(
            f"no block format is named {name!r}",
            expected=", ".join(FORMATS),
            hint=nearest(name, FORMATS),
        )
    return FORMATS[name]


def dequantize(blocks: Array, name: str) -> Array:
    """The weights of rows of blocks in f32."""
    return format_named(name).dequantize(blocks)


TINY = np.float32(2.0**-119)
"""127 / peak overflows f32 for smaller peaks."""
OUTLIER = 8.0
"""Runs whose peak is beyond this multiple of their row's root mean square get a second level.

A few channels of most models are this large. In SmolLM2-135M these are 5% of the runs; they cause
two thirds of the error of all products in front of the head."""
LEVEL = 256
"""The scale of the first level over that of the second one."""


def quantize_runs(x: Array, outlier: float = OUTLIER) -> tuple[Array, Array, Array]:
    """Activations f32[..., K] per run of 32: two levels i8[..., K / 32, 32], and f32 scales.

    q = rint(x 127 / peak), scale = peak / 127; a run that is not finite has a scale of NaN. The
    second level holds what rounding removed, in units of scale / 256, of runs with outliers; it is
    0 elsewhere.
    """
    rows = np.asarray(x, np.float32)
    runs = rows.reshape(*x.shape[:-1], x.shape[-1] // RUN, RUN)
    peak = np.abs(runs).max(axis=-1, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        finite = np.isfinite(peak)
        inverse = np.where(finite & (peak >= TINY), np.float32(127) / peak, np.float32(0))
        scale = np.where(finite, peak / np.float32(127), np.float32(np.nan))
        exact = np.where(np.isfinite(runs), runs, 0) * inverse
        q = np.rint(exact)
        square = np.float32(outlier) * np.float32(outlier) * np.square(rows).mean(axis=-1)
        is_large = peak * peak > (square[..., None, None] if outlier else 0)
        rest = np.clip(np.rint((exact - q) * LEVEL), -127, 127) * is_large
    return q.astype(np.int8), rest.astype(np.int8), scale[..., 0]
