"""How constant weights of a product or convolution are packed and multiplied, by element type."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from bitwright.backends.cpu.kernels.matmul.dot.amx import (
    BLOCK,
    SplitDots,
    pack_split,
    pack_tiles,
    split_dots,
    tile_dots,
)
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import REAL, Numbers
from bitwright.backends.cpu.kernels.matmul.dot.half_dot import best_halves, halves_tile, pack_halves
from bitwright.backends.cpu.kernels.matmul.dot.split_half_dot import MOST_DEPTH
from bitwright.backends.cpu.kernels.matmul.matmul import Tile, best_tile, pack
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, bf16, f16, f32
from bitwright.lir.buffer import View
from bitwright.target import Target

Array = np.ndarray[Any, Any]
REALS = (f32, f16, bf16)
FEW_ROWS, MANY_ROWS, MANY_COLUMNS = 4, 32, 128


class Filter(Protocol):
    """How a filter is multiplied."""

    family: str
    item_bytes: int

    def numbers(self, target: Target, run: int) -> Numbers:
        """The numbers of rows that are read in runs of this length."""

    def tile(self, target: Target, columns: int, numbers: Any) -> Tile: ...

    def line_tile(
        self,
        target: Target,
        columns: int,
        numbers: Any,
        line: int,
        steps: int,
        tile: Tile,
        is_flat: bool,
    ) -> Tile | None:
        """A tile that is part of a line of pixels, where it takes less time than the other."""

    def pack(self, runs: Array, tile: Tile, numbers: Any) -> Array:
        """w[runs, run, columns] in panels."""

    def pointers(self, ctx: Lowering, name: str, tile: Tile) -> dict[str, View]:
        """The slots that `numbers` reads."""


class RealFilter:
    """f32."""

    family, item_bytes, products_at_once = "conv_f32", 4, 1

    def numbers(self, target: Target, run: int) -> Numbers:
        return REAL

    def tile(self, target: Target, columns: int, numbers: Numbers) -> Tile:
        return best_tile(target, columns)

    def line_tile(self, *_: Any) -> Tile | None:
        return None

    def pack(self, runs: Array, tile: Tile, numbers: Numbers) -> Array:
        lines, run, columns = runs.shape
        return pack(runs.reshape(lines * run, columns), tile)

    def pointers(self, ctx: Lowering, name: str, tile: Tile) -> dict[str, View]:
        return {}


class HalfFilter(RealFilter):
    """bf16 or f16, summed in f32; `in_tiles` says whether tiles are worth it where there are."""

    item_bytes = 2

    def __init__(self, target: Target, half: DType, in_tiles: bool) -> None:
        self.half, self.family, self.in_tiles = half, f"conv_{half}", in_tiles
        self.products_at_once = self.numbers(target, 2).group

    def numbers(self, target: Target, run: int) -> Numbers:
        dots = tile_dots if self.half == bf16 else split_dots
        tiles = dots(target) if self.in_tiles else None
        return tiles or best_halves(target, self.half, run)

    def tile(self, target: Target, columns: int, numbers: Any) -> Tile:
        return BLOCK if numbers.tiles else halves_tile(target, columns, numbers)

    def pack(self, runs: Array, tile: Tile, numbers: Any) -> Array:
        if isinstance(numbers, SplitDots):
            return pack_split(runs)
        return pack_tiles(runs) if numbers.tiles else pack_halves(runs, tile, numbers)


def has_filter(x: DType, w: DType, result: DType) -> bool:
    """Whether operands and result are of types that the packed kernels take."""
    require_elements(result)
    return x == w and x in REALS


def filter_of(
    target: Target, element: DType, weight: Array | None = None, rows: Size | None = None
) -> RealFilter:
    """For a constant matrix, or an image where none is given, that `rows` rows are multiplied with.

    A block of tiles is wasted on a few rows. f16 becomes planes of bf16 first, which takes some
    columns to pay, and its weights are twice as many bytes then: a few rows would wait for them.
    Windows of an image overlap: each number would be made planes of many times.
    """
    if element == f32:
        return RealFilter()
    if element == bf16:
        return HalfFilter(target, element, are_many(rows))
    few = isinstance(rows, int) and rows < MANY_ROWS
    if few or weight is None or weight.shape[1] < MANY_COLUMNS or len(weight) > MOST_DEPTH:
        return HalfFilter(target, element, False)
    return HalfFilter(target, element, bool(np.isfinite(weight).all()))


def are_many(rows: Size | None) -> bool:
    """Whether a product has, or may have, rows enough for blocks of tiles."""
    return not isinstance(rows, int) or rows > FEW_ROWS
