"""Convolutions whose image tiles are boxes that TMA loads, for capability 9.0.

The image is described to TMA with the axes (spatial..., images, channels). A tile of the product is
a box of B0 × B1 positions of BI images; a step of its loop is BK channels of one tap, a load of the
same box at shifted positions. Pixels outside of the image arrive as zeros, so padding costs
nothing. A box of a single position in each of BI images needs no further step: such a tile goes
from shared memory to the tensor cores, with any strides. Other boxes pass through registers; with
strides, they need sizes that the strides divide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import numpy as np

from bitwright.backends.gpu.codegen.source import Config, Descriptor, Grid, cdiv
from bitwright.backends.gpu.kernels.conv.geometry import Geometry
from bitwright.backends.gpu.kernels.matmul import tiles
from bitwright.backends.gpu.kernels.matmul.product import Product, in_pieces
from bitwright.backends.gpu.lowering.context import Machine
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType

Array = np.ndarray[Any, Any]
MAX_RANK = 3
"""Of windows; TMA has five axes."""
LEAST_SAVED = 8
"""Steps that split sums must save, for the kernel that adds them."""
MOST_CONFIGS = 6
MOST_WASTE = 4.0
"""Positions that are computed for one of the result, where the other form is better."""
UNKNOWN_IMAGES = 4
"""What a symbolic number of images counts as."""
UNKNOWN_SIZE = 64
DEPTHS = (128, 64, 32)
"""Bytes of a step, the longest first."""


@dataclass(frozen=True)
class BoxTile:
    positions: int
    columns: int
    warps: int
    stages: int
    per_processor: int
    is_single: bool = False
    """Whether a box is one position of many images."""


TILES = (
    BoxTile(128, 128, 8, 4, 1),
    BoxTile(128, 128, 4, 3, 2),
    BoxTile(128, 256, 8, 3, 1),
    BoxTile(128, 64, 4, 4, 2),
    BoxTile(64, 64, 4, 4, 3),
    BoxTile(64, 128, 4, 4, 2),
    BoxTile(64, 32, 4, 5, 3),
    BoxTile(64, 256, 8, 4, 1, is_single=True),
    BoxTile(64, 128, 4, 4, 2, is_single=True),
    BoxTile(64, 128, 4, 3, 3, is_single=True),
    BoxTile(64, 64, 4, 4, 3, is_single=True),
    BoxTile(64, 32, 4, 5, 3, is_single=True),
    BoxTile(128, 128, 4, 3, 2, is_single=True),
)
LINE_CLOCKS = (2.6, 2.4)
"""To load a row of a step, measured on an H200: of boxes, and of boxes of one position."""
PRODUCT_CLOCKS = (2.5, 1.6)
"""Of the product of a step, relative to the peak; measured likewise."""
PRODUCTS_PER_CLOCK = 4096.0
"""Of bytes, per multiprocessor."""
STEP_CLOCKS = 200.0
"""Of the shortest step."""
TAIL_CLOCKS = 0.1
"""Of one element of the result."""
ALONE = 1.25
"""How much longer a program takes whose waits no other program fills."""


PART = """
part = tl.program_id(1)
per_part: tl.constexpr = (TAPS * BLOCKS + PARTS - 1) // PARTS
first = part * per_part
last = tl.minimum(first + per_part, TAPS * BLOCKS)
"""
PARTIAL = """
result = partial + part.to(tl.int64) * (IMAGES * POSITIONS * N)
tl.store(result + row * N + column, acc, mask=inside & (column < N))
"""


def depth_of(geometry: Geometry, x: DType) -> int:
    """Channels of a step; 0 if no length of a step divides those of a group."""
    item = x.bits // 8
    for size in DEPTHS:
        if geometry.per_group % (size // item) == 0:
            return size // item
    return 0


def has_views(geometry: Geometry) -> bool:
    """Whether positions are those of a view of the image with larger strides."""
    return geometry.taps == 1 and not geometry.is_padded


def folded_axes(geometry: Geometry) -> tuple[int, ...]:
    """Axes whose pixels are split by their remainder of the stride, so that a box with this stride
    is dense: the remainder is an axis of its own, or part of the channels for the last axis."""
    axes = tuple(a for a, stride in enumerate(geometry.strides) if stride > 1)
    whole = all(
        isinstance(size, int) and size % geometry.strides[a] == 0
        for a, size in enumerate(geometry.sizes)
    )
    extra = sum(a < geometry.rank - 1 for a in axes)
    return axes if whole and not has_views(geometry) and geometry.rank + extra <= MAX_RANK else ()


def body(
    product: Product, geometry: Geometry, tail: str, has_border: bool = False, split: bool = False
) -> str:
    """`product.columns` are those of one group; with `has_border`, `border` is an operand. With
    `split`, program axis 1 is the part of the steps that it sums, and stores in `partial`."""
    axes = range(geometry.rank)
    strided, folded = has_views(geometry), folded_axes(geometry)
    tile_counts = [f"T{a} = tl.cdiv(O{a}, B{a})" for a in axes]
    decode = ["left = left // column_tiles"]
    for a in reversed(axes):
        decode += [f"a{a} = (left % T{a}) * B{a}", f"left = left // T{a}"]
    starts, channel = [], "z * CG + k"
    for a in axes:
        begin, stride = geometry.begins[a], geometry.strides[a]
        if strided:
            starts.append(f"a{a}")
        elif a in folded:
            before = cdiv(begin, stride)
            tap = f"(t{a} + {before * stride - begin})"
            starts.append(f"a{a} + {tap} // {stride} - {before}")
            if a < geometry.rank - 1:
                starts.append(f"{tap} % {stride}")
            else:
                channel = f"{tap} % {stride} * C + {channel}"
        else:
            starts.append(f"a{a} * {stride} + t{a}{f' - {begin}' if begin else ''}")
    at = ", ".join([*starts, "image", channel])
    x_tile = f"tl.reshape(x.load([{at}]), (BM, BK))"
    w_tile = "w.load([z * N + column_tile * BN, tap * CG + k]).T"
    step = [
        "tap = step // BLOCKS",
        "k = (step % BLOCKS) * BK",
        *(line for line in geometry.tap_lines("tap") if not line.startswith("shift")),
        product.step(x_tile, w_tile),
    ]
    place = ["at = tl.arange(0, BM)", "images = image + at % BI", "at = at // BI"]
    inside = ["(images < IMAGES)"]
    for a in reversed(axes):
        place += [f"o{a} = a{a} + at % B{a}", f"at = at // B{a}"]
        inside.append(f"(o{a} < O{a})")
    place.append("rows = images.to(tl.int64)")
    place += [f"rows = rows * O{a} + o{a}" for a in axes]
    box = " * ".join(["BI", *(f"B{a}" for a in axes)])
    positions = " * ".join(f"T{a}" for a in axes)
    counts = " * ".join(f"O{a}" for a in axes)
    joined = "\n".join
    added = border_lines(geometry) if has_border else []
    loop, parts = "TAPS * BLOCKS", ""
    if split:
        loop, parts = "first, last", PART
        added = ["if part == 0:", *(f"    {line}" for line in added)] if added else []
    return f"""
{joined(geometry.head)}
N: tl.constexpr = {product.columns}
BM: tl.constexpr = {box}
BLOCKS: tl.constexpr = CG // BK
{parts}
column_tiles = tl.cdiv(N, BN)
{joined(tile_counts)}
tiles = tl.cdiv(IMAGES, BI) * {positions} * column_tiles
count = tiles * {geometry.groups}
for one in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=FLATTEN):
    z = one // tiles
    left = one % tiles
    column_tile = left % column_tiles
{indent(joined(decode), "    ")}
    image = left * BI
{indent(product.zeros, "    ")}
    for step in range({loop}):
{indent(joined(step), "        ")}
{indent(joined(place), "    ")}
    row = rows[:, None]
    rows_inside = {" & ".join(inside)}
    inside = rows_inside[:, None]
    columns = column_tile * BN + tl.arange(0, BN)
    column = columns[None, :]
{indent(joined(added), "    ")}
{indent(PARTIAL.replace("POSITIONS", counts) if split else in_pieces(tail), "    ")}
"""


def border_lines(geometry: Geometry) -> list[str]:
    """Statements that add what zeros outside of the image lack: `border` has a row of columns for
    every number of taps that a window has before and after the image, on each axis.

    Row 0 is that of windows inside of the image, all zeros. A box of a single position has one row.
    """
    columns = "columns" if geometry.groups == 1 else "(z * N + columns)"
    filters = "N" if geometry.groups == 1 else f"(N * {geometry.groups})"
    each = f"border + (border_row * {filters})[:, None] + {columns}[None, :]"
    mask = "inside & (border_row > 0)[:, None] & (column < N)"
    one = f"tl.load(border + border_row * {filters} + {columns}, mask=columns < N, other=0)"
    return [
        "if BM == BI:",
        *(f"    {line}" for line in _border_row(geometry, "a")),
        f"    acc += {one}[None, :]",
        "else:",
        *(f"    {line}" for line in _border_row(geometry, "o")),
        "    if tl.max(border_row, 0) > 0:",
        f"        acc += tl.load({each}, mask={mask}, other=0)",
    ]


def _border_row(geometry: Geometry, place: str) -> list[str]:
    lines = [f"border_row = {place}0 * 0"]
    for a, (before, after) in enumerate(border_counts(geometry)):
        stride, dilation = geometry.strides[a], geometry.dilations[a]
        extent = (geometry.kernel[a] - 1) * dilation
        first = f"{place}{a} * {stride} - {geometry.begins[a]}"
        for name, text, count in (
            ("before", f"-({first})", before),
            ("after", f"{first} + {extent} - (S{a} - 1)", after),
        ):
            cut = f"({text} + {dilation - 1}) // {dilation}" if dilation > 1 else text
            lines.append(f"{name} = tl.minimum(tl.maximum({cut}, 0), {count})")
            lines.append(f"border_row = border_row * {count + 1} + {name}")
    return lines


def border_counts(geometry: Geometry) -> list[tuple[int, int]]:
    """How many taps of a window can lie before and after the image, on each axis."""
    found = []
    for a in range(geometry.rank):
        dilation = geometry.dilations[a]
        most = geometry.kernel[a]
        before = min(cdiv(geometry.begins[a], dilation), most) if geometry.begins[a] > 0 else 0
        after = min(cdiv(geometry.ends[a], dilation), most) if geometry.ends[a] > 0 else 0
        found.append((before, after))
    return found


def border(geometry: Geometry, filters: Array, lack: int) -> Array:
    """The rows that `border_lines` adds: `lack` times the sums of the filters' taps outside.

    `filters` are [M, taps..., C]; `lack` is what a zero is to be.
    """
    sums = filters.astype(np.int64).sum(-1)
    counts = [(range(before + 1), range(after + 1)) for before, after in border_counts(geometry)]
    rows = []
    for cut in itertools.product(*(axis for pair in counts for axis in pair)):
        inner = tuple(
            slice(cut[2 * a], max(size - cut[2 * a + 1], cut[2 * a]))
            for a, size in enumerate(geometry.kernel)
        )
        spatial = tuple(range(1, sums.ndim))
        rows.append(sums.sum(spatial) - sums[(slice(None), *inner)].sum(spatial))
    return (np.stack(rows) * lack).astype(np.int32)


def descriptors(geometry: Geometry, filters: int) -> dict[str, Descriptor]:
    folded, last = folded_axes(geometry), geometry.rank - 1
    sizes = geometry.counts if has_views(geometry) else geometry.sizes
    shape: list[str | int] = []
    strides: list[str | int] = []
    block: list[str | int] = []
    for a, size in enumerate(sizes):
        stride = geometry.strides[a]
        if a in folded:
            assert isinstance(size, int)
            shape.append(size // stride)
            strides.append(f"x_f{a}")
            block.append(f"B{a}")
            if a == last:
                continue
        name = f"{'O' if has_views(geometry) else 'S'}{a}"
        shape.append(stride if a in folded else _text(size, name))
        strides.append(f"x_s{a}")
        block.append(1 if a in folded else f"B{a}")
    channels = geometry.channels * (geometry.strides[-1] if last in folded else 1)
    depth = geometry.taps * geometry.per_group
    return {
        "x": Descriptor(
            (*shape, "IMAGES", channels), (*strides, "x_image", 1), (*block, "BI", "BK")
        ),
        "w": Descriptor((filters, depth), (depth, 1), ("BN", "BK")),
    }


def dense_strides(geometry: Geometry) -> tuple[Size, ...]:
    """Of a channels-last image and its spatial axes, in elements."""
    found: list[Size] = [geometry.channels]
    for size in reversed(geometry.sizes):
        found.append(found[-1] * size)
    return tuple(reversed(found))


def values(geometry: Geometry, images: Size, strides: Sequence[Size]) -> dict[str, Size]:
    """Run-time sizes; `strides` are those of an image and of its spatial axes."""
    scale = geometry.strides if has_views(geometry) else (1,) * geometry.rank
    own = {f"x_s{a}": stride * scale[a] for a, stride in enumerate(strides[1:])}
    own |= {f"x_f{a}": strides[1 + a] * geometry.strides[a] for a in folded_axes(geometry)}
    return {"IMAGES": images, "x_image": strides[0], **own, **geometry.values}


def configs(
    machine: Machine,
    x: DType,
    geometry: Geometry,
    images: Size,
    columns: int,
    weight: int,
) -> tuple[Config, ...]:
    """Candidates, those with the least estimated time first."""
    depth = depth_of(geometry, x)
    item = x.bits // 8
    found: dict[str, tuple[float, Config]] = {}
    for tile in TILES:
        if tile.columns > max(2 * columns, 32) or (tile.columns > columns > 32 and columns % 64):
            continue
        shared = tile.stages * (tile.positions + tile.columns) * depth * item
        if shared * tile.per_processor > machine.shared_bytes:
            continue
        box = box_of(geometry, images, tile)
        if box is None:
            continue
        blocks, waste = box
        one = tiles.Tile(
            tile.positions, tile.columns, depth * item, tile.warps, tile.stages, tile.per_processor
        )
        constants = {
            **{f"B{a}": size for a, size in enumerate(blocks[:-1])},
            "BI": blocks[-1],
            "BN": tile.columns,
            "BK": depth,
            "SUB": tiles.pieces_of(one, max(weight, 1)),
            "PROGRAMS": machine.multiprocessors * tile.per_processor,
            "FLATTEN": 1,
        }
        config = Config(constants, tile.warps, tile.stages)
        cost = _cost(machine, tile, geometry, images, columns, waste, depth * item)
        found.setdefault(config.name, (cost, config))
    best = sorted(found.values(), key=lambda pair: pair[0])
    return tuple(config for _, config in best[:MOST_CONFIGS])


def least_waste(geometry: Geometry, images: Size) -> float:
    """How many positions tiles compute for one of the result, at least."""
    found = [box_of(geometry, images, tile) for tile in TILES]
    return min(waste for _, waste in filter(None, found))


def box_of(geometry: Geometry, images: Size, tile: BoxTile) -> tuple[tuple[int, ...], float] | None:
    """The box with the fewest positions outside of the result, and the factor that they cost; None
    if the tile has no box."""
    count = max(images, 1) if isinstance(images, int) else UNKNOWN_IMAGES
    sizes = [max(size, 1) if isinstance(size, int) else UNKNOWN_SIZE for size in geometry.counts]
    limits = []
    dense = has_views(geometry) or bool(folded_axes(geometry))
    for size, stride in zip(sizes, geometry.strides, strict=True):
        widest = 1 if tile.is_single or (stride > 1 and not dense) else size
        limits.append(1 << max(widest - 1, 0).bit_length())
    options = []
    powers = [[1 << n for n in range(limit.bit_length())] for limit in limits]
    for own in itertools.product(*powers):
        rest = tile.positions // math.prod(own)
        if rest * math.prod(own) != tile.positions or rest > 256:
            continue
        if (rest == tile.positions) != tile.is_single:
            continue
        covered = math.prod(cdiv(n, b) * b / n for n, b in zip(sizes, own, strict=True))
        covered *= cdiv(count, rest) * rest / count
        options.append((covered, -own[-1], (*own, rest)))
    if not options:
        return None
    waste, _, blocks = min(options)
    return blocks, waste


def grid(geometry: Geometry, columns: int) -> Grid:
    def programs(size: Mapping[str, int]) -> Sequence[int]:
        count = cdiv(size["IMAGES"], size["BI"]) * cdiv(columns, size["BN"]) * geometry.groups
        for a, known in enumerate(geometry.counts):
            count *= cdiv(known if isinstance(known, int) else size[f"O{a}"], size[f"B{a}"])
        programs = min(count, size["PROGRAMS"])
        return (programs, size["PARTS"]) if "PARTS" in size else (programs,)

    return programs


def parts_of(
    machine: Machine, geometry: Geometry, configs: Sequence[Config], images: Size, columns: int
) -> tuple[int, Config]:
    """Into how many parts the steps are split where tiles are few, and the tile for it.

    Parts pay for the kernel that adds them where they save LEAST_SAVED steps.
    """
    best = (1, configs[0])
    if geometry.groups > 1 or not isinstance(images, int):
        return best
    if 2 * _tiles(geometry, configs[0], images, columns) > machine.multiprocessors:
        return best
    fewest = _steps_and_waves(machine, geometry, configs[0], images, columns, 1)
    for config in configs:
        steps = geometry.taps * geometry.per_group // config.constants["BK"]
        for parts in (2, 4, 8, 16):
            if steps < 4 * parts:
                break
            found = _steps_and_waves(machine, geometry, config, images, columns, parts)
            if found + LEAST_SAVED < fewest:
                best, fewest = (parts, config), found + LEAST_SAVED / 4
    return best


def with_parts(config: Config, parts: int) -> Config:
    constants = {k: v for k, v in config.constants.items() if k != "SUB"}
    return Config({**constants, "PARTS": parts}, config.num_warps, config.num_stages)


def _steps_and_waves(
    machine: Machine, geometry: Geometry, config: Config, images: int, columns: int, parts: int
) -> float:
    """The estimated time in steps of a tile of 64 × 64."""
    size = config.constants
    tiles = _tiles(geometry, config, images, columns) * parts
    steps = cdiv(geometry.taps * geometry.per_group // size["BK"], parts)
    positions = math.prod(v for name, v in size.items() if name == "BI" or name[1:].isdigit())
    area = max(positions * size["BN"] / 64**2, 1.0)
    return cdiv(tiles, machine.multiprocessors) * steps * (0.5 + 0.5 * area)


def _tiles(geometry: Geometry, config: Config, images: int, columns: int) -> int:
    size = config.constants
    found = cdiv(images, size["BI"]) * cdiv(columns, size["BN"])
    for a, count in enumerate(geometry.counts):
        found *= cdiv(count if isinstance(count, int) else UNKNOWN_SIZE, size[f"B{a}"])
    return found


def _cost(
    machine: Machine,
    tile: BoxTile,
    geometry: Geometry,
    images: Size,
    columns: int,
    waste: float,
    depth: int,
) -> float:
    """The estimated clocks; `depth` is the bytes of a step."""
    count = images if isinstance(images, int) else UNKNOWN_IMAGES
    sizes = [size if isinstance(size, int) else UNKNOWN_SIZE for size in geometry.counts]
    programs = waste * math.prod(sizes) * count / tile.positions
    programs *= cdiv(columns, tile.columns) * geometry.groups
    area = tile.positions * tile.columns
    feed = (tile.positions + tile.columns) * LINE_CLOCKS[tile.is_single]
    product = area * depth / PRODUCTS_PER_CLOCK * PRODUCT_CLOCKS[tile.is_single]
    steps = geometry.taps * geometry.per_group / depth
    alone = ALONE if tile.per_processor == 1 else 1.0
    each = steps * max(feed, product, STEP_CLOCKS) * alone + area * TAIL_CLOCKS
    rounds = math.ceil(programs / machine.multiprocessors)
    return rounds * each * (1 + math.log2(max(waste, 1.0)) / 8)


def _text(size: Size, name: str) -> str | int:
    return size if isinstance(size, int) else name
