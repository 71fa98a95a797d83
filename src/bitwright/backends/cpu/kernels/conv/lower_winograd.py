"""Chooses and calls Winograd convolutions (`kernels.conv.winograd`).

The choice counts vector operations: products with their loads, the transforms of data and results,
and the cache lines of the filter. Tiles of 4 × 4 results save the most products; tiles of 2 × 2
have less padding on small images, and a smaller filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitwright import knobs
from bitwright.backends.cpu.kernels.conv import winograd
from bitwright.backends.cpu.kernels.conv.toom_cook import linear_map, matrices
from bitwright.backends.cpu.kernels.conv.weights import Weight, packed_winograd, sizes_of
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, best_tile
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.lowering.layout import PIXELS
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View
from bitwright.target import Target

if TYPE_CHECKING:
    from bitwright.backends.cpu.kernels.conv.lower_conv import ConvEpilogue, Window

STACK_BYTES = 384 << 10
"""The scratch of the kernel on a thread's stack, in bytes."""
FILTER_CACHES = 4
"""The largest transformed filter, in L2 caches: larger ones are bound by memory."""
NEAR_LINE, FAR_LINE = 2.5, 8.0
"""The cost of a cache line from the L2 cache and from beyond it, in vector operations."""
SPILLED = 2
"""The cost of a transform operation including register spills."""
MOST_COST = 0.9
"""The largest cost of a Winograd convolution relative to the plain one."""
ASSUMED_SIZE = 32
"""The assumed height and width where they are not known."""
MOST_CHANNELS = {2: 4096, 4: 512}
"""The most channels for which the measured error is below 1e-5 of the result's scale (3e-6 at
128)."""


@dataclass(frozen=True)
class Choice:
    """The results of a tile in each direction (0 for a plain convolution), and the reason."""

    results: int
    why: str


def choose(target: Target, weight: Weight, window: Window, y: View) -> Choice:
    """Chooses the tile of a convolution that is not grouped."""
    if weight.shape[2:] != (winograd.TAPS, winograd.TAPS):
        return Choice(0, "")
    if window.strides != (1, 1) or window.dilations != (1, 1):
        return Choice(0, "its stride or dilation is not 1")
    if knobs.WINOGRAD.get() == "off":
        return Choice(0, f"{knobs.WINOGRAD.name} is off")
    plain = _plain_cost(target, weight, y)
    costs = {
        results: _cost(target, weight, y, results)
        for results, most in MOST_CHANNELS.items()
        if sizes_of(weight)[1] <= most and not _why_not(target, weight, results)
    }
    if not costs:
        return Choice(
            0,
            _why_not(target, weight, min(MOST_CHANNELS)) or "its rounding error would be too large",
        )
    results, cost = min(costs.items(), key=lambda item: item[1])
    if cost > MOST_COST * plain:
        return Choice(0, f"Winograd would take {cost / plain:.2f} of the cost")
    count = (results + winograd.TAPS - 1) ** 2
    saved = f"{count} products for {results} × {results} results instead of {9 * results**2}"
    return Choice(results, f"{saved}: {cost / plain:.2f} of the cost")


def _why_not(target: Target, weight: Weight, results: int) -> str:
    """Why tiles of this size do not fit; empty if they do."""
    columns, channels, _, _ = sizes_of(weight)
    tile = winograd.tile_for(target, columns)
    if winograd.scratch_bytes(results, tile, channels) > STACK_BYTES:
        return "a tile's channels do not fit a thread's stack"
    if 4 * _filter_count(tile, weight, results) > FILTER_CACHES * target.l2_bytes:
        return "its transformed filter would not stay in the cache"
    return ""


def _filter_count(tile: Tile, weight: Weight, results: int) -> int:
    columns, channels, _, _ = sizes_of(weight)
    form = winograd.Winograd(results, tile, channels, 1)
    panels = -(-columns // tile.columns)
    return form.positions * form.depth * panels * tile.columns


def _per_product(tile: Tile) -> float:
    """The cost of a multiply-add and its share of the loads."""
    return 1 + 1 / tile.rows + 1 / tile.vectors


def pixels_of(y: View) -> tuple[int, int, int]:
    """Images, lines and columns of a result; assumed sizes where they are not known."""
    n, _, oh, ow = y.shape
    high, wide = (size if isinstance(size, int) else ASSUMED_SIZE for size in (oh, ow))
    return n if isinstance(n, int) else 1, high, wide


def image_sizes(image: View, y: View, window: Window) -> dict[str, Size]:
    """The sizes of an image and its result, and the padding in front of the image."""
    (_, _, ih, iw), (n, _, oh, ow), (top, left) = image.shape, y.shape, window.begins
    return {"images": n, "ih": ih, "iw": iw, "oh": oh, "ow": ow, "top": top, "left": left}


def pixel_strides(**views: View) -> dict[str, Size]:
    """The strides of images, lines and pixels."""
    axes = {"image": 0, "line": 2, "pixel": 3}
    return {f"{x}_{name}": v.strides[axis] for x, v in views.items() for name, axis in axes.items()}


def _plain_cost(target: Target, weight: Weight, y: View) -> float:
    columns, channels, _, _ = sizes_of(weight)
    tile = best_tile(target, columns)
    n, oh, ow = pixels_of(y)
    vectors = -(-columns // tile.columns) * tile.vectors
    depth: int = winograd.TAPS**2 * channels
    products: float = n * oh * ow * depth * vectors * _per_product(tile)
    return products + _reading(target, depth * columns, 1)


def _cost(target: Target, weight: Weight, y: View, results: int) -> float:
    columns, channels, _, _ = sizes_of(weight)
    tile = winograd.tile_for(target, columns)
    form = winograd.Winograd(results, tile, channels, _groups(results, tile, channels))
    n, oh, ow = pixels_of(y)
    tiles = n * -(-oh // results) * -(-ow // results)
    whole, rest = divmod(tiles, tile.rows)
    rows = whole * tile.rows + next(height for height in (0, *form.heights) if height >= rest)
    vectors = -(-columns // tile.columns) * tile.vectors
    maps = matrices(results, winograd.TAPS)
    enter = 2 * form.width * linear_map(maps.data).operations + 2 * form.positions
    back = (form.width + results) * linear_map(maps.back).operations + form.positions
    back += 8 * results**2  # the epilogue and its addresses
    cost: float = rows * form.positions * form.depth * vectors * _per_product(tile)
    cost += SPILLED * tiles * (form.depth // tile.lanes * enter + vectors * back)
    blocks = -(-tiles // (form.groups * tile.rows))
    return cost + _reading(target, _filter_count(tile, weight, results), blocks)


def _reading(target: Target, count: int, times: int) -> float:
    """The cost of reading a filter of `count` elements `times` times, from memory the first
    time."""
    nbytes = 4 * count
    again = NEAR_LINE if nbytes <= target.l2_bytes else FAR_LINE
    return nbytes / 64 * (FAR_LINE + (times - 1) * again)


def _groups(results: int, tile: Tile, channels: int) -> int:
    return max(1, STACK_BYTES // winograd.scratch_bytes(results, tile, channels))


def call_winograd(
    ctx: Lowering,
    node: Node,
    image: View,
    weight: Weight,
    window: Window,
    y: View,
    finish: ConvEpilogue,
    choice: Choice,
) -> None:
    columns, channels, _, _ = sizes_of(weight)
    tile, results = winograd.tile_for(ctx.target, columns), choice.results
    groups = _groups(results, tile, channels)
    form = winograd.Winograd(results, tile, channels, groups, finish.epilogue, image.dtype)
    kernel = ctx.kernel(
        f"winograd_{image.dtype}",
        (results, tile, channels, form.groups, finish.key, image.dtype),
        lambda m, name: winograd.emit_winograd(m, name, form),
    )
    y_stride = y.run_stride(PIXELS)
    assert y_stride is not None, "the result is contiguous"
    sizes = image_sizes(image, y, window) | pixel_strides(x=image) | finish.sizes
    sizes |= {"columns": columns, "y_stride": y_stride}
    packed = packed_winograd(ctx, node, weight, results, tile)
    pointers = {"x": image, "w": packed, "y": y, **finish.pointers}
    ctx.call(kernel, node, pointers, sizes, why=choice.why)
