"""Which 3×3 convolutions take fewer products (`kernels.conv.winograd`), and their call.

The choice counts vector operations: products with the loads they need, the ways into and out of the
transformed numbers, and the cache lines of the filter. Tiles
of 4 × 4 results save most; those of 2 × 2 waste less at the edge of a small image, and their filter
is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright import knobs
from bitwright.backends.cpu.kernels.conv.toom_cook import linear_map, matrices
from bitwright.backends.cpu.kernels.conv.winograd import (
    TAPS,
    Winograd,
    emit_winograd,
    pack_filter,
    scratch_bytes,
    tile_for,
)
from bitwright.backends.cpu.kernels.matmul.matmul import Tile, best_tile
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.lowering.layout import PIXELS
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View
from bitwright.target import Target

if TYPE_CHECKING:
    from bitwright.backends.cpu.kernels.conv.lower_conv import Finish, Window

Array = np.ndarray[Any, Any]
STACK_BYTES = 384 << 10
"""What the kernel may take of a thread's stack."""
FILTER_CACHES = 4
"""Second-level caches that a transformed filter may fill: beyond, memory sets the pace."""
NEAR_LINE, FAR_LINE = 2.5, 8.0
"""Vector operations that fit into the time of a cache line from the second level, and beyond."""
SPILLED = 2
"""A transform's operation with the loads and stores of what does not stay in registers."""
WORTH = 0.9
"""The part of the plain cost below which fewer products are taken."""
USUAL_SIZE = 32
"""Pixels in a direction where they are not known."""
MOST_CHANNELS = {2: 4096, 4: 512}
"""Channels whose sums keep rounding below 1e-5 of the result's scale, as measured (3e-6 at 128)."""


@dataclass(frozen=True)
class Choice:
    """Results of a tile in each direction, 0 for none, and the reason."""

    results: int
    why: str


def choose(target: Target, weight: Array, window: Window, y: View) -> Choice:
    """The tiles of a convolution that is not grouped."""
    if weight.shape[2:] != (TAPS, TAPS):
        return Choice(0, "")
    if window.strides != (1, 1) or window.dilations != (1, 1):
        return Choice(0, "its windows lie apart")
    if knobs.WINOGRAD.get() == "off":
        return Choice(0, f"{knobs.WINOGRAD.name} is off")
    plain = _plain_cost(target, weight, y)
    costs = {
        results: _cost(target, weight, y, results)
        for results, most in MOST_CHANNELS.items()
        if weight.shape[1] <= most and not _excess(target, weight, results)
    }
    if not costs:
        return Choice(0, _excess(target, weight, min(MOST_CHANNELS)) or "rounding would grow")
    results, cost = min(costs.items(), key=lambda item: item[1])
    if cost > WORTH * plain:
        return Choice(0, f"fewer products would take {cost / plain:.2f} of the cost")
    count = (results + TAPS - 1) ** 2
    saved = f"{count} products for {results} × {results} results instead of {9 * results**2}"
    return Choice(results, f"{saved}: {cost / plain:.2f} of the cost")


def _excess(target: Target, weight: Array, results: int) -> str:
    """What does not fit."""
    columns, channels = weight.shape[:2]
    tile = tile_for(target, columns)
    if scratch_bytes(results, tile, channels) > STACK_BYTES:
        return "a tile's channels do not fit a thread's stack"
    if 4 * _filter_count(tile, weight, results) > FILTER_CACHES * target.l2_bytes:
        return "its transformed filter would not stay in the cache"
    return ""


def _filter_count(tile: Tile, weight: Array, results: int) -> int:
    form = Winograd(results, tile, weight.shape[1], 1)
    return form.positions * form.depth * -(-weight.shape[0] // tile.columns) * tile.columns


def _per_product(tile: Tile) -> float:
    """A product, and its share of the loads."""
    return 1 + 1 / tile.rows + 1 / tile.vectors


def pixels_of(y: View) -> tuple[int, int, int]:
    """Images, lines and columns of a result, or what is usual."""
    n, _, oh, ow = y.shape
    return (
        n if isinstance(n, int) else 1,
        *(size if isinstance(size, int) else USUAL_SIZE for size in (oh, ow)),
    )  # type: ignore[return-value]


def _plain_cost(target: Target, weight: Array, y: View) -> float:
    columns, channels = weight.shape[:2]
    tile = best_tile(target, columns)
    n, oh, ow = pixels_of(y)
    vectors = -(-columns // tile.columns) * tile.vectors
    depth = TAPS**2 * channels
    return n * oh * ow * depth * vectors * _per_product(tile) + _reading(target, depth * columns, 1)


def _cost(target: Target, weight: Array, y: View, results: int) -> float:
    columns, channels = weight.shape[:2]
    tile = tile_for(target, columns)
    form = Winograd(results, tile, channels, _groups(results, tile, channels))
    n, oh, ow = pixels_of(y)
    tiles = n * -(-oh // results) * -(-ow // results)
    whole, rest = divmod(tiles, tile.rows)
    rows = whole * tile.rows + next(height for height in (0, *form.heights) if height >= rest)
    vectors = -(-columns // tile.columns) * tile.vectors
    maps = matrices(results, TAPS)
    enter = 2 * form.width * linear_map(maps.data).operations + 2 * form.positions
    back = (form.width + results) * linear_map(maps.back).operations + form.positions
    back += 8 * results**2  # the epilogue and its addresses
    cost = rows * form.positions * form.depth * vectors * _per_product(tile)
    cost += SPILLED * tiles * (form.depth // tile.lanes * enter + vectors * back)
    blocks = -(-tiles // (form.groups * tile.rows))
    return cost + _reading(target, _filter_count(tile, weight, results), blocks)


def _reading(target: Target, count: int, times: int) -> float:
    """Reading a filter of so many numbers; other layers have been in the cache before it."""
    nbytes = 4 * count
    again = NEAR_LINE if nbytes <= target.l2_bytes else FAR_LINE
    return nbytes / 64 * (FAR_LINE + (times - 1) * again)


def _groups(results: int, tile: Tile, channels: int) -> int:
    return max(1, STACK_BYTES // scratch_bytes(results, tile, channels))


def call_winograd(
    ctx: Lowering,
    node: Node,
    image: View,
    weight: Array,
    window: Window,
    y: View,
    finish: Finish,
    choice: Choice,
) -> None:
    columns, channels = weight.shape[:2]
    tile, results = tile_for(ctx.target, columns), choice.results
    groups = _groups(results, tile, channels)
    form = Winograd(results, tile, channels, groups, finish.epilogue, image.dtype)
    kernel = ctx.kernel(
        f"winograd_{image.dtype}",
        (results, tile, channels, form.groups, finish.key, image.dtype),
        lambda m, name: emit_winograd(m, name, form),
    )
    (n, _, oh, ow), (x_image, _, x_line, x_pixel) = y.shape, image.strides
    y_stride = y.run_stride(PIXELS)
    assert y_stride is not None, "the result is dense"
    sizes: dict[str, Size] = {
        "images": n,
        "ih": image.shape[2],
        "iw": image.shape[3],
        "oh": oh,
        "ow": ow,
        "top": window.begins[0],
        "left": window.begins[1],
        "columns": columns,
        "x_image": x_image,
        "x_line": x_line,
        "x_pixel": x_pixel,
        "y_stride": y_stride,
        **finish.sizes,
    }
    real = pack_filter(weight.astype(np.float32, copy=False), results, tile)
    packed = ctx.constant(real, f"{node.name}.weight")
    pointers = {"x": image, "w": packed, "y": y, **finish.pointers}
    ctx.call(kernel, node, pointers, sizes, why=choice.why)
