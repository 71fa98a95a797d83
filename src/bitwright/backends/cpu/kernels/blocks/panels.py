"""Packed panels: the weights of 16 columns, in the order in which a kernel reads them.

    panel      [blocks] of
    block      scale [16], minimum [16], scale steps [runs][16], minimum steps [runs][16], chunks
    chunk      32 elements of K: planes of words; a word is 4 consecutive elements of a column
    plane      [words][16 columns][4 elements]

A plane of 8 bits has a word for each group of 4 elements. Fields of 4 bits hold groups g and g + 4
in the word g, fields of 2 bits groups 4h … 4h + 3 in the word h, fields of 1 bit all 8 groups.
Values of 3, 5 and 6 bits are split between two planes. Nothing is rounded again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ops.quant.block_formats import RUN, BlockFormat, Parts

Array = np.ndarray[Any, Any]
COLUMNS = 16
GROUPS = RUN // 4
WORD_BYTES = 4 * COLUMNS
PIECE_BYTES = 16 << 20
_ALIGN = 64
PACKED_ROWS = 1 << 11
"""Rows that are packed at a time, which bounds temporary memory."""


@dataclass(frozen=True)
class PanelLayout:
    """Where the parts of a block are in a panel."""

    form: BlockFormat

    def __repr__(self) -> str:
        return f"PanelLayout({self.form.name})"

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits per element of each plane, the low bits first."""
        return {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}[self.form.bits]

    @property
    def runs(self) -> int:
        """Runs with their own steps; 0 for scales of one level."""
        return self.form.elements // self.form.run if self.form.has_steps else 0

    @property
    def minimum_at(self) -> int:
        return 2 * COLUMNS

    @property
    def steps_at(self) -> int:
        return self.minimum_at * (2 if self.form.has_minimum else 1)

    @property
    def minimum_steps_at(self) -> int:
        return self.steps_at + self.runs * COLUMNS

    @property
    def chunks_at(self) -> int:
        return self.minimum_steps_at + (self.runs * COLUMNS if self.form.has_minimum else 0)

    @property
    def chunks(self) -> int:
        """Chunks per block."""
        return self.form.elements // RUN

    @property
    def chunk_bytes(self) -> int:
        return sum(self.plane_words(bits) for bits in self.planes) * WORD_BYTES

    @property
    def block_bytes(self) -> int:
        return self.chunks_at + self.chunks * self.chunk_bytes

    @property
    def scale_is_bf16(self) -> bool:
        """Whether scales are powers of two beyond the range of f16."""
        return self.form.name == "MXFP4"

    @staticmethod
    def plane_words(bits: int) -> int:
        return GROUPS * bits // 8


class PanelMemory:
    """Memory for panels in pieces of many megabytes, which the system maps with large pages."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Array:
        """Room for `nbytes`, 64-byte aligned."""
        needed = -(-nbytes // _ALIGN) * _ALIGN
        if needed > PIECE_BYTES:
            return self._piece(needed)[:nbytes]
        if needed > len(self._free):
            self._free = self._piece(PIECE_BYTES)
        found, self._free = self._free[:nbytes], self._free[needed:]
        return found

    @staticmethod
    def _piece(nbytes: int) -> Array:
        room = np.empty(nbytes + _ALIGN, np.uint8)
        start = -room.ctypes.data % _ALIGN
        return room[start : start + nbytes]


def panel_bytes(form: BlockFormat, depth: int) -> int:
    """The bytes of a panel of rows with `depth` elements."""
    if form.is_float:
        return depth * COLUMNS * form.nbytes
    return depth // form.elements * PanelLayout(form).block_bytes


def pack_panels(blocks: Array, form: BlockFormat, memory: PanelMemory | None = None) -> Array:
    """Panels u8[..., panels, bytes] of rows of blocks u8[..., N, bytes]; missing columns are 0."""
    *outer, count, width = blocks.shape
    depth = width // form.nbytes * form.elements
    shape = (*outer, -(-count // COLUMNS), panel_bytes(form, depth))
    room = (memory or PanelMemory()).take(math.prod(shape))
    if not room.size:
        return room.reshape(shape)
    outermost = math.prod(outer)
    found = room.reshape(outermost, *shape[-2:])
    for part, target in zip(blocks.reshape(outermost, count, width), found, strict=True):
        if form.is_float:
            _pack_floats(part, form, target)
        else:
            _pack_blocks(part, form, target)
    return room.reshape(shape)


def _pack_blocks(blocks: Array, form: BlockFormat, out: Array) -> None:
    """Fills out[panels, bytes], some rows at a time."""
    layout, panels = PanelLayout(form), len(out)
    found = out.reshape(panels, -1, layout.block_bytes)
    for start in range(0, panels * COLUMNS, PACKED_ROWS):
        rows = blocks[start : start + PACKED_ROWS]
        whole = -(-len(rows) // COLUMNS)
        missing = whole * COLUMNS - len(rows)
        if missing:
            rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.uint8)])
        first = start // COLUMNS
        _pack(rows, layout, found[first : first + whole])


def _pack_floats(blocks: Array, form: BlockFormat, out: Array) -> None:
    """Fills out[panels, bytes] with [K][16] elements per panel."""
    rows = np.ascontiguousarray(blocks).view(np.dtype(f"u{form.nbytes}"))
    count, depth = rows.shape
    target = out.view(rows.dtype).reshape(len(out), depth, COLUMNS)
    whole = count // COLUMNS
    target[:whole] = rows[: whole * COLUMNS].reshape(whole, COLUMNS, depth).transpose(0, 2, 1)
    if whole < len(out):
        target[whole] = 0
        target[whole, :, : count - whole * COLUMNS] = rows[whole * COLUMNS :].T


def _pack(rows: Array, layout: PanelLayout, out: Array) -> None:
    """Fills out[panels, blocks, bytes] with the panels of whole groups of rows."""
    form = layout.form
    assert form.split is not None
    panels, count = out.shape[:2]
    parts = form.split(np.ascontiguousarray(rows).reshape(-1, form.nbytes))
    for start, part in _numbers(parts, layout):
        numbers = part.reshape(panels, COLUMNS, count, -1).transpose(0, 2, 3, 1)
        data = np.ascontiguousarray(numbers).view(np.uint8).reshape(panels, count, -1)
        out[:, :, start : start + data.shape[2]] = data
    if form.plain_at is not None:
        _pack_plain(rows, layout, out)
    else:
        _pack_planes(parts.q, layout, out)


def _pack_plain(rows: Array, layout: PanelLayout, out: Array) -> None:
    """Moves words of values that are stored as panels hold them."""
    form, (panels, count) = layout.form, out.shape[:2]
    assert form.plain_at is not None
    width = layout.chunk_bytes // COLUMNS
    blocks = rows.reshape(panels, COLUMNS, count, form.nbytes)
    words = np.ascontiguousarray(blocks[..., form.plain_at : form.plain_at + width])
    words = words.view(np.uint32).transpose(0, 2, 3, 1)
    target = out.view(np.uint32)[:, :, layout.chunks_at // 4 :].reshape(words.shape)
    if form.bits == 8:
        np.bitwise_xor(words, np.uint32(0x80808080), out=target)
    else:
        target[...] = words


def _pack_planes(q: Array, layout: PanelLayout, out: Array) -> None:
    """Packs values u8[blocks, elements] in planes of bits."""
    panels, count = out.shape[:2]
    words = np.ascontiguousarray(q).view(np.uint32)
    words = words.reshape(panels, COLUMNS, count, layout.chunks, GROUPS).transpose(0, 2, 3, 4, 1)
    groups = np.ascontiguousarray(words)
    target = out[:, :, layout.chunks_at :]
    target = target.reshape(panels, count, layout.chunks, layout.chunk_bytes)
    at = shift = 0
    for bits in layout.planes:
        fields = (groups >> np.uint32(shift)) & np.uint32(((1 << bits) - 1) * 0x01010101)
        plane = _plane(fields, bits).view(np.uint8)
        width = layout.plane_words(bits) * WORD_BYTES
        target[..., at : at + width] = plane.reshape(*target.shape[:3], width)
        at, shift = at + width, shift + bits


def _plane(fields: Array, bits: int) -> Array:
    """Fields [..., 8 groups, 16] of few bits as words [..., bits, 16]."""
    if bits == 8:
        return fields
    each = 8 // bits
    if bits == 4:  # groups g and g + 4
        parts = [fields[..., :4, :], fields[..., 4:, :]]
    elif bits == 2:  # groups 4h … 4h + 3
        parts = [fields[..., i::4, :] for i in range(4)]
    else:
        parts = [fields[..., i : i + 1, :] for i in range(8)]
    word = parts[0].copy()
    for i in range(1, each):
        word |= parts[i] << np.uint32(bits * i)
    return word


def _numbers(parts: Parts, layout: PanelLayout) -> list[tuple[int, Array]]:
    """The place of each kind of number in a block, and the numbers [blocks, ...]."""
    scale = parts.scale
    if layout.scale_is_bf16:
        scale = (scale.view(np.uint32) >> 16).astype(np.uint16)
    found = [(0, scale)]
    if parts.minimum is not None:
        found.append((layout.minimum_at, parts.minimum))
    if parts.scale_steps is not None:
        found.append((layout.steps_at, parts.scale_steps))
    if parts.minimum_steps is not None:
        found.append((layout.minimum_steps_at, parts.minimum_steps))
    return found
