"""Shared by the kernel of attention's gradients and its lowering: parameters, tiles, work memory.

A thread keeps the scores of a block of queries with all visible keys, and the gradients of one key
head, in a part of the work buffer (offsets in elements, `rows` keys):

    keys [rows][features]   values [rows][value features]    k and v in the computed type
    dk, dv                  the same shapes: sums over queries
    p, dp [rows][queries]   scores, then weights; their gradients;  slope: derivatives of the cap
    q, dy, dq               [queries][features] of a block
    qt, dyt                 [features][queries]: transposed, q times the scale
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Signature
from bitwright.backends.cpu.kernels.attention import spec
from bitwright.ir.dim import Size
from bitwright.target import Target

ROW_UNIT = 48
"""Work buffers have room for this many keys past the last: tiles are whole."""
MAX_PARTS = 64
"""Parts of the work buffer; no more threads than this take part."""


@dataclass(frozen=True)
class BackwardTiles:
    """Register tiles and the block of queries on a target."""

    lanes: int
    vectors: int
    """Vectors of queries in a block."""
    sums: int
    """Vector registers for the sums of a tile."""
    columns: int
    """Vectors of a tile's row, at most."""

    @property
    def queries(self) -> int:
        return self.lanes * self.vectors

    def rows(self, columns: int, even: bool = False) -> int:
        """Rows of a tile of `columns` vectors; a divisor of the block of queries if `even`."""
        most = self.sums // columns
        return min(most, 8 if columns <= 2 else 4) if even else min(most, 12)


def backward_tiles(target: Target, kernel: spec.Attention) -> BackwardTiles:
    lanes = target.lanes(kernel.type.bits)
    wide = target.vector_registers >= 32
    return BackwardTiles(lanes, 4, 24 if wide else 12, 4 if wide else 2)


@dataclass(frozen=True)
class Work:
    """The parts of a thread's work buffer: fixed ones, then those with `rows` rows."""

    kernel: spec.Attention
    tiles: BackwardTiles

    def _whole(self, features: int) -> int:
        lanes = self.tiles.lanes
        return -(-features // lanes) * lanes

    @property
    def width(self) -> int:
        """Features of q and k, padded to whole vectors."""
        return self._whole(self.kernel.features)

    @property
    def value_width(self) -> int:
        return self._whole(self.kernel.value_features)

    @property
    def fixed(self) -> dict[str, int]:
        """Elements of the parts of a block of queries."""
        queries = self.tiles.queries
        return {
            "q": queries * self.width,
            "dy": queries * self.value_width,
            "dq": queries * self.width,
            "qt": queries * self.width,
            "dyt": queries * self.value_width,
        }

    @property
    def per_key(self) -> dict[str, int]:
        """Elements per key of the other parts."""
        queries = self.tiles.queries
        found = {
            "keys": self.width,
            "values": self.value_width,
            "dk": self.width,
            "dv": self.value_width,
            "p": queries,
            "dp": queries,
        }
        return found | ({"slope": queries} if self.kernel.softcap > 0 else {})

    def size(self, rows: Size) -> Size:
        """Elements of one thread's part."""
        return sum(self.fixed.values()) + rows * sum(self.per_key.values())


@dataclass(frozen=True)
class Backward:
    """The compile-time parameters: those of attention, and the gradients that are wanted."""

    kernel: spec.Attention
    wanted: tuple[str, ...]
    """Those of dq, dk and dv."""

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.kernel.key, self.wanted)

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("q", "k", "v", "dy", *self.wanted)

    @property
    def signature(self) -> Signature:
        pointers = [*self.tensors, "work"]
        sizes = ["batches", "heads", "group", "queries", "keys", "offset"]
        sizes += ["rows", "parts", "part"]
        if self.kernel.mask != spec.NO_MASK:
            pointers.append("mask")
            sizes += ["limit", *(f"mask.{axis}" for axis in range(4))]
        if self.kernel.has_lengths:
            pointers.append("lengths")
        sizes += [f"{name}.{axis}" for name in self.tensors for axis in range(3)]
        return Signature(pointers, sizes)
