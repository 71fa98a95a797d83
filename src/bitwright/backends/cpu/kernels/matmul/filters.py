"""Packing and dot products of constant weights in matmuls and convolutions, by element type."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from bitwright.backends.cpu.kernels.matmul.dot.amx import (
    BLOCK,
    AmxSplitF16Dot,
    amx_bf16_dot,
    amx_split_f16_dot,
    pack_split,
    pack_tiles,
)
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import F32_DOT, DotProduct
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import (
    choose_half_dot,
    half_tiles,
    pack_half,
)
from bitwright.backends.cpu.kernels.matmul.dot.split_half_dot import MOST_DEPTH
from bitwright.backends.cpu.kernels.matmul.matmul import pack
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, candidate_tiles
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, bf16, f16, f32
from bitwright.lir.buffer import View
from bitwright.target import Target

Array = np.ndarray[Any, Any]
FLOAT_TYPES = (f32, f16, bf16)
FEW_ROWS, MANY_ROWS, MANY_COLUMNS = 4, 32, 128


class Filter(Protocol):
    """Packing and dot product of constant weights."""

    item_bytes: int

    def dot(self, target: Target, run: int) -> DotProduct:
        """The dot product for rows that are read in runs of this length."""

    def tiles(self, target: Target, columns: int, dot: DotProduct) -> list[Tile]:
        """Candidates for the register tile, the static choice first."""

    def line_tile(
        self,
        target: Target,
        columns: int,
        dot: DotProduct,
        line: int,
        steps: int,
        tile: Tile,
        is_flat: bool,
    ) -> Tile | None:
        """A tile within one line of pixels, where it is faster than `tile`."""

    def pack(self, runs: Array, tile: Tile, dot: DotProduct) -> Array:
        """Packs w[runs, run, columns] in panels."""

    def pointers(self, ctx: Lowering, name: str, tile: Tile) -> dict[str, View]:
        """The slots that the dot product reads."""


class F32Filter:
    """f32 weights."""

    item_bytes, products_at_once = 4, 1

    def dot(self, target: Target, run: int) -> DotProduct:
        return F32_DOT

    def tiles(self, target: Target, columns: int, dot: DotProduct) -> list[Tile]:
        return candidate_tiles(target, columns)

    def line_tile(self, *_: Any) -> Tile | None:
        return None

    def pack(self, runs: Array, tile: Tile, dot: DotProduct) -> Array:
        lines, run, columns = runs.shape
        return pack(runs.reshape(lines * run, columns), tile)

    def pointers(self, ctx: Lowering, name: str, tile: Tile) -> dict[str, View]:
        return {}


class HalfFilter(F32Filter):
    """bf16 or f16 weights, summed in f32; `use_amx` permits AMX where the target has it."""

    item_bytes = 2

    def __init__(self, target: Target, half: DType, use_amx: bool) -> None:
        self.half, self.use_amx = half, use_amx
        self.products_at_once = self.dot(target, 2).group

    def dot(self, target: Target, run: int) -> DotProduct:
        dots = amx_bf16_dot if self.half == bf16 else amx_split_f16_dot
        tiles = dots(target) if self.use_amx else None
        return tiles or choose_half_dot(target, self.half, run)

    def tiles(self, target: Target, columns: int, dot: DotProduct) -> list[Tile]:
        return [BLOCK] if dot.tiles else half_tiles(target, columns, dot)

    def pack(self, runs: Array, tile: Tile, dot: DotProduct) -> Array:
        if isinstance(dot, AmxSplitF16Dot):
            return pack_split(runs)
        return pack_tiles(runs) if dot.tiles else pack_half(runs, tile, dot)


def has_filter(x: DType, w: DType, result: DType) -> bool:
    """Whether the kernels with packed weights support these types."""
    require_elements(result)
    return x == w and x in FLOAT_TYPES


def filter_of(
    target: Target, element: DType, weight: Array | None = None, rows: Size | None = None
) -> F32Filter:
    """The filter of a matmul with this constant weight and `rows` rows, or of a convolution where
    no weight is given.

    AMX blocks are inefficient for few rows. f16 is split into planes of bf16 first, which takes
    some columns to amortize and doubles the bytes of the weights, which bound products with few
    rows. Windows of an image overlap, so that a convolution would split each element many times.
    """
    if element == f32:
        return F32Filter()
    if element == bf16:
        return HalfFilter(target, element, has_many_rows(rows))
    few = isinstance(rows, int) and rows < MANY_ROWS
    if few or weight is None or weight.shape[1] < MANY_COLUMNS or len(weight) > MOST_DEPTH:
        return HalfFilter(target, element, False)
    return HalfFilter(target, element, bool(np.isfinite(weight).all()))


def has_many_rows(rows: Size | None) -> bool:
    """Whether a product has, or may have, enough rows for AMX blocks."""
    return not isinstance(rows, int) or rows > FEW_ROWS
