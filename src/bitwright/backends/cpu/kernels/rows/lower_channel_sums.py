"""Lowering of sums over channels (`kernels.rows.channel_sums`)."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.rows.channel_sums import (
    MOMENTS,
    SUMS,
    TERMS,
    ChannelSums,
    emit_channel_sums,
    emit_channel_totals,
)
from bitwright.backends.cpu.lowering.context import Lowering, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import channels_last
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size, max_size, product
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node

MOST_BLOCKS = 64
LEAST_ROWS = 64
"""Rows of a block; fewer would spend more time on adding up blocks."""
MOST_VECTORS = 4


@lowers(MOMENTS, SUMS)
def lower_channel_sums(ctx: Lowering, node: Node, region: RegionView) -> None:
    operands = [region.outer(value) for value in node.operands]
    x = operands[0]
    require_elements(*(value.dtype for value in operands))
    channels = x.shape[1]
    rows = product([size for axis, size in enumerate(x.shape) if axis != 1])
    centre = operands[-1].dtype
    form = _form(ctx, node.op, x.dtype, centre, channels)
    images = {
        name: ctx.ordered(value, channels_last(value.rank) if value.rank > 1 else (0,))
        for name, value in zip(form.inputs, operands, strict=True)
    }
    block = max_size((rows + (MOST_BLOCKS - 1)) // MOST_BLOCKS, LEAST_ROWS)
    blocks = (rows + (block - 1)) // block
    sizes: dict[str, Size] = {"rows": rows, "channels": channels, "blocks": blocks}
    partial = ctx.scratch(
        f"{node.name}.partial", str(node.outputs[0].dtype), max_size(blocks, 1) * TERMS * channels
    )
    kernel = ctx.kernel(
        f"{node.op}_{x.dtype}", form, lambda m, name: emit_channel_sums(m, name, form)
    )
    why = "lanes are channels; partial sums of blocks of pixels"
    ctx.call(kernel, node, {**images, "y": partial}, {**sizes, "block": block}, why=why)
    total = ctx.kernel(
        f"{node.op}_total_{x.dtype}", form, lambda m, name: emit_channel_totals(m, name, form)
    )
    pointers = {f"y{i}": ctx.output(value) for i, value in enumerate(node.outputs)}
    if node.op == MOMENTS:
        pointers["x"] = images["x"]
    pointers["partial"] = partial
    ctx.call(total, f"{node.name}.total", pointers, sizes, writes=("y0", "y1"))


def _form(ctx: Lowering, op: str, element: DType, centre: DType, channels: Size) -> ChannelSums:
    lanes = ctx.target.lanes(64 if element.bits == 64 else 32)
    if not isinstance(channels, int):
        return ChannelSums(op, element, centre, 1, True)
    vectors = 1
    while vectors < MOST_VECTORS and channels > vectors * lanes:
        vectors *= 2
    return ChannelSums(op, element, centre, vectors, channels % (vectors * lanes) != 0)
