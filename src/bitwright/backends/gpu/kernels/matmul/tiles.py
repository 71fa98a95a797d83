"""Tiles of matrix products: candidates by form and element type, the best by estimate first.

The tables hold what compiles without spills for capability 9.0 and 8.0
(`benchmarks/gpu_static.py --all` compiles them). The estimate orders them for a shape;
tuning measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.gpu.codegen.source import Config, cdiv
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, f8e4m3fn, f8e5m2, f32, f64

UNKNOWN_ROWS = 4096
"""What a symbolic number of rows counts as."""


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    depth: int
    """In bytes of an operand."""
    warps: int
    stages: int
    per_processor: int = 1
    """Programs that share a multiprocessor."""
    persistent: bool = True
    """Whether a program of the TMA form loops over tiles."""
    flatten: bool = True
    rate: float = 1.0
    """The share of the peak that the inner loop reaches, by estimate."""


TMA = (
    Tile(128, 256, 128, 8, 3, rate=1.0),
    Tile(128, 256, 128, 8, 4, rate=0.99),
    Tile(128, 128, 128, 8, 4, rate=0.9),
    Tile(128, 128, 64, 4, 4, 2, rate=0.89),
    Tile(128, 128, 128, 4, 4, rate=0.85),
    Tile(256, 128, 128, 8, 3, rate=0.95),
    Tile(64, 256, 128, 4, 3, rate=0.8),
    Tile(64, 128, 128, 4, 4, 2, rate=0.7),
    Tile(64, 64, 128, 4, 4, 2, rate=0.5),
    Tile(64, 32, 128, 4, 5, 2, rate=0.3),
    Tile(64, 16, 128, 4, 6, 2, rate=0.18),
)
TMA_F8 = (
    Tile(128, 128, 128, 8, 4, rate=0.95),
    Tile(128, 128, 128, 8, 3, rate=0.94),
    Tile(64, 256, 128, 8, 3, rate=0.9),
    Tile(64, 128, 128, 4, 4, 2, rate=0.75),
    Tile(64, 64, 128, 4, 4, 2, rate=0.5),
    Tile(64, 32, 128, 4, 5, 2, rate=0.3),
    Tile(64, 16, 128, 4, 6, 2, rate=0.18),
)
PIPELINED = (
    Tile(128, 256, 128, 8, 3, rate=0.8),
    Tile(128, 128, 128, 8, 3, rate=0.75),
    Tile(128, 128, 64, 4, 4, rate=0.75),
    Tile(64, 128, 128, 4, 3, rate=0.6),
    Tile(64, 64, 128, 4, 4, rate=0.45),
    Tile(32, 64, 128, 4, 4, rate=0.25),
    Tile(16, 64, 128, 4, 5, rate=0.13),
    Tile(16, 32, 256, 4, 4, rate=0.08),
)
PIPELINED_F8 = tuple(tile for tile in PIPELINED if tile.rows * tile.columns < 128 * 256)
WIDE = (
    Tile(64, 64, 128, 4, 3, rate=0.5),
    Tile(128, 64, 64, 8, 3, rate=0.6),
    Tile(32, 32, 128, 4, 3, rate=0.3),
    Tile(16, 32, 128, 4, 3, rate=0.15),
)
"""For f32 and f64, which have no tensor-core form of full precision (f64 has a slow one)."""
PRODUCTS_PER_CLOCK = 4096.0
"""Of bytes, per multiprocessor of capability 9.0; 16-bit products count double."""
BYTES_PER_CLOCK = 64.0
"""From the L2 cache to one multiprocessor."""
LEAST_STEP = 120.0
TAIL_CLOCKS = 0.12
"""Of one element in an epilogue and its store."""


def candidates(
    machine: Machine, x: DType, rows: Size, columns: Size, depth: Size, tma: bool
) -> list[Tile]:
    """Tiles that fit the device, those with the least estimated time first."""
    f8 = x in (f8e4m3fn, f8e5m2)
    table = WIDE if x in (f32, f64) else PIPELINED_F8 if f8 else PIPELINED
    if tma:
        table = TMA_F8 if f8 else TMA
    fitting = [tile for tile in table if _shared_bytes(tile) <= machine.shared_bytes]
    m, n, k = (_known(size) for size in (rows, columns, depth))
    return sorted(fitting or table[-1:], key=lambda tile: _cost(machine, tile, m, n, k, x))


def pieces_of(tile: Tile, weight: int) -> int:
    """On how many column ranges of a tile a tail of this weight runs, so that nothing spills.

    Read off the compiler's reports: with 128 sums per thread, activation functions need two ranges,
    and operands of the result's shape four.
    """
    per_thread = tile.rows * tile.columns // (32 * tile.warps)
    pieces = (1, 2, 4)[min(weight, 2)] if per_thread >= 128 else 1
    if 64 <= per_thread < 128 and weight > 1:
        pieces = 2
    return min(pieces, max(tile.columns // 16, 1))


def config(
    tile: Tile, x: DType, machine: Machine, tma: bool, parts: int = 0, weight: int = 0
) -> Config:
    """The constants of a tile; `weight` is that of the tail (`pieces_of`)."""
    item = max(x.bits // 8, 1)
    constants = {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": max(tile.depth // item, 16),
        "GROUP": 8,
        "SUB": pieces_of(tile, weight),
    }
    if tma:
        constants |= {
            "PERSISTENT": machine.multiprocessors * tile.per_processor * tile.persistent,
            "FLATTEN": int(tile.flatten),
            "PIECE": tile.columns // constants["SUB"],
        }
    else:
        constants["PARTS"] = max(parts, 1)
    return Config(constants, tile.warps, tile.stages)


def sum_configs(parts: int) -> tuple[Config, ...]:
    """Tiles of the kernel that adds the parts of a split product."""
    return tuple(
        Config({"BM": rows, "BN": columns, "PARTS": parts}, 4, 1)
        for rows, columns in ((4, 128), (1, 256), (8, 64))
    )


def parts_of(machine: Machine, tile: Tile, x: DType, rows: Size, columns: Size, depth: Size) -> int:
    """Into how many parts K is split so that the device has work for most multiprocessors."""
    m, n, k = (_known(size) for size in (rows, columns, depth))
    tiles = cdiv(m, tile.rows) * cdiv(n, tile.columns)
    steps = cdiv(k * max(x.bits // 8, 1), tile.depth)
    if tiles * 3 > machine.multiprocessors or steps < 8:
        return 1
    return max(min(machine.multiprocessors // tiles, steps // 4, 16), 1)


def _cost(machine: Machine, tile: Tile, m: int, n: int, k: int, x: DType) -> float:
    """The estimated clocks: waves of tiles times those of one tile.

    A step moves a tile's operands through the L2 cache and multiplies them; the tail computes and
    stores. Two programs per multiprocessor overlap the steps of one with the tail of the other.
    """
    tiles = cdiv(max(m, 1), tile.rows) * cdiv(max(n, 1), tile.columns)
    area, item = tile.rows * tile.columns, max(x.bits // 8, 1)
    product = area * tile.depth / PRODUCTS_PER_CLOCK / tile.rate
    moved = (tile.rows + tile.columns) * tile.depth / BYTES_PER_CLOCK
    steps = cdiv(max(k, 1) * item, tile.depth) * max(product, moved, LEAST_STEP)
    tail = area * TAIL_CLOCKS
    if tile.per_processor == 1:
        return cdiv(tiles, machine.multiprocessors) * (steps + tail)
    waves = cdiv(tiles, machine.multiprocessors * tile.per_processor)
    overlapped = max(steps, tail) * tile.per_processor + min(steps, tail)
    return waves * overlapped if tiles > machine.multiprocessors else steps + tail


def _shared_bytes(tile: Tile) -> int:
    return tile.stages * (tile.rows + tile.columns) * tile.depth


def _known(size: Size) -> int:
    return size if isinstance(size, int) else UNKNOWN_ROWS
