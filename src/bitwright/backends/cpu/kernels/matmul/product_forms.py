"""Candidates for the tile and the cache block of a product, which `bw.tune_kernels` measures."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.kernels.matmul.epilogue import is_light
from bitwright.backends.cpu.kernels.matmul.matmul import row_tiles_in_cache
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.lowering.region import Part
from bitwright.ir.dim import Size
from bitwright.target import Target


def product_forms(
    target: Target, tiles: Sequence[Tile], row_bytes: int
) -> dict[str, tuple[Tile, int]]:
    """Tiles with their cache blocks (`row_tiles_in_cache`), and other blocks of the first tile."""
    pairs = [(tile, row_tiles_in_cache(target, tile, row_bytes)) for tile in tiles]
    first, block = pairs[0]
    pairs += [(first, max(1, block // 2)), (first, block * 2)] if len(tiles) > 1 else []
    return {f"{tile.rows}x{tile.vectors} block {size}": (tile, size) for tile, size in pairs}


def choice_point(family: str, after: Part, rows: Size, columns: int, depth: int) -> str:
    """What determines the fastest form of a product: its types, sizes and epilogue."""
    epilogue = "light" if is_light(after.expression) else "heavy"
    return f"{family}->{after.dtype} {epilogue} rows={rows} columns={columns} depth={depth}"
