"""Chooses and calls exact Winograd convolutions of 8-bit values (`kernels.conv.winograd_int8`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright import knobs
from bitwright.backends.cpu.codegen.instr import pairs_s16s16
from bitwright.backends.cpu.kernels.conv import winograd_int8
from bitwright.backends.cpu.kernels.conv.lower_conv import ConvEpilogue, image_of
from bitwright.backends.cpu.kernels.conv.lower_depthwise_int8 import Bias, Int8Conv
from bitwright.backends.cpu.kernels.conv.lower_winograd import (
    MOST_COST,
    SPILLED,
    STACK_BYTES,
    pixel_strides,
    pixels_of,
)
from bitwright.backends.cpu.kernels.conv.toom_cook import linear_map
from bitwright.backends.cpu.kernels.conv.winograd import TAPS
from bitwright.backends.cpu.kernels.matmul.lower_widen import widen_image
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, best_tile
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.lowering.layout import PIXELS
from bitwright.ir.graph import Node
from bitwright.target import Target

Array = np.ndarray[Any, Any]
RESULTS = (2, 4)


def lower_int8_winograd(ctx: Lowering, node: Node, conv: Int8Conv) -> bool:
    """Lowers a convolution to the Winograd kernel; False where that does not apply or is slower."""
    window, filters = conv.window, conv.filters.astype(np.int16)
    if conv.groups != 1 or filters.shape[2:] != (TAPS, TAPS) or knobs.WINOGRAD.get() == "off":
        return False
    if window.strides != (1, 1) or window.dilations != (1, 1):
        return False
    columns, channels = filters.shape[:2]
    block = winograd_int8.channel_block(ctx.target, channels)
    if not block or columns % ctx.target.lanes(32) or pairs_s16s16(ctx.target) is None:
        return False
    if conv.filter_zeros is not None:
        filters -= conv.filter_zeros.astype(np.int16).reshape(-1, 1, 1, 1)
    tile = winograd_int8.int8_winograd_tile(ctx.target, columns)
    results = _best(ctx.target, conv, filters, tile, block)
    weights = winograd_int8.transformed(filters, results) if results else None
    if weights is None:
        return False
    _call(ctx, node, conv, results, tile, block, weights)
    return True


def _best(target: Target, conv: Int8Conv, filters: Array, tile: Tile, block: int) -> int:
    """The fastest number of results of a tile in each direction; 0 for a plain convolution."""
    costs = {
        results: _cost(conv, filters, tile, block, results)
        for results in RESULTS
        if winograd_int8.is_exact(filters, results)
        and winograd_int8.int8_scratch_bytes(results, tile, filters.shape[1]) <= STACK_BYTES
    }
    results = min(costs, key=lambda r: costs[r], default=0)
    return results if results and costs[results] <= MOST_COST * _plain_cost(target, conv) else 0


def _per_pair(tile: Tile) -> float:
    """The cost of a product of pairs, its addition, and its share of the loads."""
    return 2 + 1 / tile.rows + 1 / tile.vectors


def _plain_cost(target: Target, conv: Int8Conv) -> float:
    columns, channels = conv.filters.shape[:2]
    tile = best_tile(target, columns, fused=False)
    n, oh, ow = pixels_of(conv.y)
    vectors = -(-columns // tile.columns) * tile.vectors
    cost: float = n * oh * ow * TAPS**2 * channels / 2 * vectors * _per_pair(tile)
    return cost


def _cost(conv: Int8Conv, filters: Array, tile: Tile, block: int, results: int) -> float:
    columns, channels = filters.shape[:2]
    n, oh, ow = pixels_of(conv.y)
    tiles = n * -(-oh // results) * -(-ow // results)
    form = winograd_int8.Int8Winograd(results, tile, channels, 1)
    whole, rest = divmod(tiles, tile.rows)
    rows = whole * tile.rows + next(height for height in (0, *form.heights) if height >= rest)
    vectors = -(-columns // tile.columns) * tile.vectors
    maps = winograd_int8.integer_maps(results)
    enter = 2 * form.width * linear_map(maps.data, is_whole=True).operations + 2 * form.positions
    back = (form.width + results) * linear_map(maps.back, is_whole=True).operations
    back += form.positions + 8 * results**2  # the epilogue and its addresses
    cost: float = rows * form.positions * channels / 2 * vectors * _per_pair(tile)
    cost += SPILLED * tiles * (channels // block * enter + vectors * back)
    return cost


def _call(
    ctx: Lowering, node: Node, conv: Int8Conv, results: int, tile: Tile, block: int, weights: Array
) -> None:
    columns, channels = conv.filters.shape[:2]
    bias = Bias.of(ctx, node.name, conv.bias)
    finish = ConvEpilogue(conv.after, conv.extra, conv.y, conv.lanes, bias)
    groups = max(1, STACK_BYTES // winograd_int8.int8_scratch_bytes(results, tile, channels))
    pairs = pairs_s16s16(ctx.target)
    form = winograd_int8.Int8Winograd(
        results, tile, channels, groups, finish.epilogue, conv.x.dtype, block, pairs
    )
    kernel = ctx.kernel(
        "winograd_s16s16s32_pmaddwd",
        (results, tile, channels, groups, block, finish.key),
        lambda m, name: winograd_int8.emit_int8_winograd(m, name, form),
    )
    image, y = image_of(ctx, conv.x), conv.y
    n, _, oh, ow = y.shape
    begins = conv.window.begins
    ends = tuple(
        (size + (results - 1)) // results * results + (TAPS - 1) - before - begin
        for size, before, begin in zip((oh, ow), image.shape[2:], begins, strict=True)
    )
    x = widen_image(ctx, node, image, begins, ends, conv.zero)
    y_stride = y.run_stride(PIXELS)
    assert y_stride is not None, "the result is contiguous"
    sizes = {"images": n, "oh": oh, "ow": ow, "columns": columns, "y_stride": y_stride}
    sizes |= pixel_strides(x=x) | finish.sizes
    packed = ctx.constant(winograd_int8.pack_int8_filter(weights, tile), f"{node.name}.weight")
    pointers = {"x": x, "w": packed, "y": y, **finish.pointers}
    count = form.positions
    why = f"{count} products for {results} × {results} results instead of {9 * results**2}, exact"
    ctx.call(kernel, node, pointers, sizes, why=why)
