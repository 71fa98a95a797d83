"""Lowering of weight gradients of convolutions (`kernels.conv.backward_weight`)."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.conv import lower_conv
from bitwright.backends.cpu.kernels.conv.backward_weight import (
    BackwardWeight,
    SumPartials,
    emit_backward_weight,
    emit_sum_partials,
    tile_for,
)
from bitwright.backends.cpu.kernels.matmul.lower_batched import strides_dilations_pads
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size, max_size, min_size, product
from bitwright.ir.dtype import f64
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View

MOST_SPLITS = 16
MOST_BYTES = 8 << 20
"""The most bytes of partial sums, unless one split has more."""
BLOCK_PIXELS = 1024
"""Pixels whose products are added up in registers."""


@lowers("conv_backward_weight")
def lower_backward_weight(ctx: Lowering, node: Node, region: RegionView) -> None:
    dy_value, x_value = node.operands
    result = node.outputs[0]
    require_elements(x_value.dtype)
    if x_value.rank not in (3, 4) or x_value.dtype == f64:
        raise NoKernelError("the kernel takes images of one or two axes, in f32 or half floats")
    if not all(isinstance(size, int) and size > 0 for size in result.shape):
        raise NoKernelError("the shape of its weight is not constant")
    groups = node.attrs["groups"]
    x, dy = lower_conv.image_of(ctx, x_value), lower_conv.image_of(ctx, dy_value)
    y = lower_conv.as_4d(ctx.output(result))
    columns, channels = y.shape[:2]
    assert isinstance(columns, int) and isinstance(channels, int)
    if groups > 1 and groups == columns and channels == 1:
        _lower_group(ctx, node, x, dy, y, is_depthwise=True)
        return
    outer = columns // groups
    for group in range(groups):
        images = x.slice(1, group * channels, channels, 1)
        gradients = dy.slice(1, group * outer, outer, 1)
        _lower_group(ctx, node, images, gradients, y.slice(0, group * outer, outer, 1), False)


def _lower_group(ctx: Lowering, node: Node, x: View, dy: View, y: View, is_depthwise: bool) -> None:
    columns, channels, height, width = y.shape
    assert isinstance(columns, int) and isinstance(channels, int)
    tile = tile_for(ctx.target, channels, columns, is_depthwise)
    panels, tiles = -(-columns // tile.columns), -(-channels // tile.rows)
    taps = product((height, width))
    assert isinstance(taps, int)
    count = panels * taps * tiles * tile.rows * tile.columns
    images = x.shape[0]
    most = max(1, min(MOST_SPLITS, MOST_BYTES // (4 * count)))
    splits = min_size(images, most)
    split = (images + most - 1) // most
    partial = ctx.scratch(f"{node.name}.partial", "f32", max_size(splits, 1) * count)
    form = BackwardWeight(tile, x.dtype, is_depthwise, columns % tile.columns != 0)
    kernel = ctx.kernel(
        f"conv_backward_weight_{x.dtype}", form, lambda m, n: emit_backward_weight(m, n, form)
    )
    pixels = max_size(product(dy.shape[2:]), 1)
    sizes: dict[str, Size] = {
        "images": images,
        "splits": splits,
        "split": split,
        "block": max_size(BLOCK_PIXELS // pixels, 1),
        "channels": channels,
        "columns": columns,
    }
    sizes |= _geometry(node, x, dy, y)
    for name, view in (("x", x), ("dy", dy)):
        sizes |= {
            f"{name}_{n}": view.strides[i] for n, i in (("image", 0), ("line", 2), ("pixel", 3))
        }
    why = f"tiles of {tile.rows} × {tile.columns} sums over the pixels of {most} parts of the batch"
    ctx.call(kernel, node, {"x": x, "dy": dy, "y": partial}, sizes, why=why)
    total = SumPartials(tile, x.dtype)
    kernel = ctx.kernel(
        f"sum_partials_{x.dtype}", total, lambda m, n: emit_sum_partials(m, n, total)
    )
    # taps are contiguous
    sizes = {"splits": splits, "taps": taps, "channels": channels, "columns": columns}
    sizes |= {"y.out": y.strides[0], "y.in": y.strides[1], "y.tap": 1}
    ctx.call(kernel, node, {"x": partial, "y": y}, sizes)


def _geometry(node: Node, x: View, dy: View, y: View) -> dict[str, Size]:
    rank = len(node.outputs[0].shape) - 2
    strides, dilations, pads = strides_dilations_pads(node, rank)
    before = (1,) * (2 - rank)
    given = {
        "stride": (*before, *strides),
        "dilation": (*before, *dilations),
        "pad": (*(0,) * (2 - rank), *pads[:rank]),
        "in": x.shape[2:],
        "out": dy.shape[2:],
        "taps": y.shape[2:],
    }
    return {f"{name}{axis}": given[name][i] for name in given for i, axis in enumerate("yx")}
