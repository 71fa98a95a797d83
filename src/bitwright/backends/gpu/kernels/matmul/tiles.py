"""Tiles of matrix products: candidates by form and element type, the best by estimate first.

A tile's estimate has the terms of a fit to times on an H200 with operands in device memory (10
sizes from 4096x768x768 to 4096x4096x4096, bf16 and int8, error at most 25%):

    start + tiles per multiprocessor * (steps * step + tail + function + operand)

All forms move and multiply bytes, so one table serves 16-bit and 8-bit operands. The estimate
orders the tiles for a shape; tuning measures the first `CANDIDATES`, among which was the fastest
of 40, or one within 2%, for each of the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.gpu.codegen.source import Config, cdiv
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, f8e4m3fn, f8e5m2, f32, f64

UNKNOWN_ROWS = 4096
"""What a symbolic number of rows counts as."""
FEW_ROWS = 64
"""The other number of rows that candidates for a symbolic number are chosen for."""
CANDIDATES = 7
F8_SHORT_SUM = 1024
"""Products of float8 over at most so many terms are summed by the tensor cores alone; see
`product`."""


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
    persistent: bool = False
    """Whether a program of the TMA form loops over tiles."""
    start: float = 2.0
    """Microseconds: what is not proportional to the tiles."""
    step: float = 0.3
    """Per step of `depth` bytes along K."""
    tail: float = 1.0
    """Per tile: the first loads, scales, the store."""
    function: float = 0.4
    """Per tile: an activation function."""
    operand: float = 0.2
    """Per tile: an operand of the result's shape."""


TMA = (
    Tile(128, 256, 128, 8, 3, 1, True, 4.49, 0.693, 1.58, 0.81, 2.0),
    Tile(128, 128, 128, 4, 3, 2, True, 2.44, 0.32, 1.66, 0.53, 0.3),
    Tile(128, 128, 128, 4, 2, 3, True, 6.75, 0.419, 0.0, 0.64, 0.16),
    Tile(128, 128, 128, 4, 3, 2, False, 1.09, 0.316, 1.88, 0.61, 0.52),
    Tile(128, 128, 64, 4, 4, 2, False, 2.72, 0.209, 0.92, 0.65, 0.34),
    Tile(128, 128, 128, 4, 2, 3, False, 6.3, 0.424, 0.21, 0.52, 0.31),
    Tile(64, 128, 128, 4, 3, 3, False, 1.46, 0.211, 0.725, 0.36, 0.36),
    Tile(128, 64, 128, 4, 3, 3, False, 2.58, 0.233, 0.51, 0.33, 0.14),
    Tile(64, 128, 128, 4, 2, 3, True, 3.81, 0.321, 0.03, 0.36, 2.88),
    Tile(64, 64, 128, 4, 4, 3, False, 2.0, 0.2, 0.35, 0.2, 0.1),
    Tile(64, 32, 128, 4, 6, 3, False, 2.0, 0.15, 0.3, 0.1, 0.1),
    Tile(64, 16, 128, 4, 6, 3, False, 1.7, 0.14, 0.25, 0.1, 0.1),
)
TMA_F8_LONG = (
    Tile(128, 128, 128, 4, 3, 2, True, 1.65, 0.406, 1.6, 1.1, 0.3),
    Tile(128, 128, 128, 4, 3, 2, False, 0.1, 0.422, 2.21, 0.47, 0.1),
    Tile(64, 128, 128, 4, 3, 3, False, 1.46, 0.224, 0.76, 0.47, 0.2),
    Tile(128, 64, 128, 4, 3, 3, False, 1.42, 0.258, 0.74, 0.46, 0.1),
    Tile(64, 128, 128, 4, 2, 3, True, 3.14, 0.329, 0.25, 0.32, 2.88),
    *(tile for tile in TMA if tile.rows * tile.columns <= 64 * 64),
)
"""For sums of float8 products that are added in f32 every 128 terms."""
PIPELINED = (
    Tile(128, 256, 128, 8, 3, 1, False, 3.6, 0.76, 4.2, 1.0, 2.0),
    Tile(128, 128, 128, 8, 3, 1, False, 3.57, 0.38, 2.11, 0.5, 0.5),
    Tile(128, 128, 64, 4, 4, 2, False, 1.78, 0.192, 2.05, 0.52, 1.43),
    Tile(64, 128, 128, 4, 3, 2, False, 1.49, 0.228, 0.9, 0.35, 0.3),
    Tile(64, 64, 128, 4, 5, 2, False, 1.9, 0.211, 0.3, 0.2, 0.2),
    Tile(64, 32, 128, 4, 5, 2, False, 1.93, 0.161, 0.1, 0.1, 0.1),
    Tile(64, 32, 128, 4, 7, 2, False, 2.15, 0.115, 0.1, 0.1, 0.1),
    Tile(64, 16, 128, 4, 8, 2, False, 1.69, 0.126, 0.1, 0.1, 0.1),
    Tile(64, 16, 256, 4, 4, 2, False, 1.38, 0.267, 0.1, 0.1, 0.1),
    Tile(32, 32, 128, 4, 5, 2, False, 1.54, 0.197, 0.1, 0.1, 0.1),
    Tile(32, 64, 128, 4, 4, 2, False, 1.79, 0.305, 0.1, 0.1, 0.1),
    Tile(16, 64, 128, 4, 5, 2, False, 1.5, 0.202, 0.1, 0.1, 0.1),
    Tile(16, 32, 256, 4, 4, 2, False, 1.48, 0.346, 0.1, 0.1, 0.1),
)
WIDE = (
    Tile(64, 64, 128, 4, 3, step=1.2, tail=0.5),
    Tile(128, 64, 64, 8, 3, step=1.0, tail=1.0),
    Tile(32, 32, 128, 4, 3, step=0.5, tail=0.2),
    Tile(16, 32, 128, 4, 3, step=0.4, tail=0.15),
)
"""For f32 and f64, which have no tensor-core form of full precision (f64 has a slow one)."""


def candidates(
    machine: Machine,
    x: DType,
    rows: Size,
    columns: Size,
    depth: Size,
    tma: bool,
    weight: int = 0,
) -> list[Tile]:
    """Tiles that fit the device, those with the least estimated time first."""
    table = _table(x, depth, tma)
    fitting = [tile for tile in table if _shared_bytes(tile) <= machine.shared_bytes]
    n, k = (_known(size) for size in (columns, depth))

    def best(m: int, count: int) -> list[Tile]:
        def cost(tile: Tile) -> float:
            return estimate(machine, tile, x, m, n, k, weight)

        return sorted(fitting or table[-1:], key=cost)[:count]

    if isinstance(rows, int):
        return best(rows, CANDIDATES)
    many = best(UNKNOWN_ROWS, CANDIDATES)
    return many + [tile for tile in best(FEW_ROWS, CANDIDATES // 2) if tile not in many]


def prefers_tma(
    machine: Machine, x: DType, rows: Size, columns: Size, depth: Size, weight: int
) -> bool:
    """Whether the TMA form is expected to be the faster one; small products are not."""
    m, n, k = (_known(size) for size in (rows, columns, depth))
    times = [
        min(estimate(machine, tile, x, m, n, k, weight) for tile in _table(x, depth, tma))
        for tma in (True, False)
    ]
    return times[0] < 1.05 * times[1]


def estimate(
    machine: Machine, tile: Tile, x: DType, rows: int, columns: int, depth: int, weight: int
) -> float:
    """The expected microseconds of a product; `weight` is that of its tail."""
    tiles = cdiv(max(rows, 1), tile.rows) * cdiv(max(columns, 1), tile.columns)
    count = cdiv(tiles, machine.multiprocessors)
    steps = cdiv(max(depth, 1) * max(x.bits // 8, 1), tile.depth)
    extra = (0.0, tile.function, tile.operand)[min(weight, 2)]
    return tile.start + count * (steps * tile.step + tile.tail + extra)


def sums_alone(x: DType, depth: Size) -> bool:
    """Whether the tensor cores sum float8 products of this length without help."""
    return is_f8(x) and isinstance(depth, int) and depth <= F8_SHORT_SUM


def is_f8(x: DType) -> bool:
    return x in (f8e4m3fn, f8e5m2)


def _table(x: DType, depth: Size, tma: bool) -> tuple[Tile, ...]:
    if x in (f32, f64):
        return WIDE
    is_long = is_f8(x) and not sums_alone(x, depth)
    if tma:
        return TMA_F8_LONG if is_long else TMA
    if is_long:  # two accumulators per sum
        return tuple(t for t in PIPELINED if t.rows * t.columns < 128 * 256 and t.depth >= 128)
    return PIPELINED


def pieces_of(
    tile: Tile, weight: int, tma: bool = False, item: int = 4, shared: int = 227 << 10
) -> int:
    """On how many column ranges of a tile a tail runs, so that nothing spills and so that what it
    keeps in shared memory fits; `item` is the size of a result's element.

    Read off the compiler's reports: with 128 sums per thread, functions need two ranges and
    operands of the result's shape, read through pointers, four. A TMA form with one tile per
    program reuses the memory of its operands for the tail, and has registers for all of it unless
    three programs share them; one program per multiprocessor has them too.
    """
    per_thread = tile.rows * tile.columns // (32 * tile.warps)
    pieces = 1
    if not tma:
        many = (1, 2, 4) if per_thread >= 128 else (1, 1, 2) if per_thread >= 64 else (1, 1, 1)
        pieces = many[min(weight, 2)]
    elif per_thread >= 128 and tile.per_processor > 1:
        pieces = 2 if tile.per_processor > 2 or (weight and tile.persistent) else 1
    most = max(min(tile.columns // 16, 4), 1)
    pieces = min(pieces, most)
    if not tma:
        return pieces
    room = (shared + 1024) // tile.per_processor - 2048
    while pieces < most and _tail_bytes(tile, pieces, weight, item) > room:
        pieces *= 2
    return pieces


def config(
    tile: Tile,
    x: DType,
    machine: Machine,
    tma: bool,
    parts: int = 0,
    weight: int = 0,
    item: int = 4,
) -> Config:
    """The constants of a tile; `weight` is that of the tail (`pieces_of`)."""
    pieces = pieces_of(tile, weight, tma, item, machine.shared_bytes)
    constants = {
        "BM": tile.rows,
        "BN": tile.columns,
        "BK": max(tile.depth // max(x.bits // 8, 1), 16),
        "GROUP": 8,
        "SUB": pieces,
    }
    if tma:
        programs = machine.multiprocessors * tile.per_processor
        constants |= {
            "PERSISTENT": programs if tile.persistent else 0,
            "PIECE": tile.columns // pieces,
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


def _shared_bytes(tile: Tile) -> int:
    return tile.stages * (tile.rows + tile.columns) * tile.depth


def _tail_bytes(tile: Tile, pieces: int, weight: int, item: int) -> int:
    """The shared memory of a TMA form whose tail moves pieces through it."""
    own = (2 if weight > 1 else 1) * tile.rows * (tile.columns // pieces) * item
    return _shared_bytes(tile) + own if tile.persistent else max(_shared_bytes(tile), own)


def _known(size: Size) -> int:
    return size if isinstance(size, int) else UNKNOWN_ROWS
