"""Lowering of products with weights in stored blocks, which are packed in panels.

Rows of activations are quantized once for all products that read them.
"""

from __future__ import annotations

from typing import Any

from bitwright.backends.cpu.kernels.blocks import quantize
from bitwright.backends.cpu.kernels.blocks.gather import emit_block_gather
from bitwright.backends.cpu.kernels.blocks.panels import COLUMNS, PanelMemory, pack_panels
from bitwright.backends.cpu.kernels.blocks.product import (
    BlockProduct,
    emit_block_product,
    lanes_of,
)
from bitwright.backends.cpu.kernels.blocks.quantize import emit_quantize_runs
from bitwright.backends.cpu.kernels.matmul.epilogue import NO_EPILOGUE
from bitwright.backends.cpu.kernels.matmul.lower_matmul import row_epilogue, unit_rows
from bitwright.backends.cpu.kernels.movement import lower_gather
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements, split
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View
from bitwright.ops.quant.block_formats import RUN, BlockFormat, format_named

GROUP_BYTES = 384 << 10
"""Quantized activations of the rows that are multiplied by one panel after the other."""


@lowers("block_matmul", "block_grouped_matmul")
def lower_block_matmul(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    is_grouped = anchor.op == "block_grouped_matmul"
    x, blocks, *rest = (None if v is None else region.outer(v) for v in anchor.inputs)
    assert x is not None and blocks is not None
    form = format_named(anchor.attrs["format"])
    packed = _panels(ctx, blocks, form)
    parts = split(region)
    require_elements(parts.after.dtype)
    if x.dtype != f32:
        raise NoKernelError("its rows are not f32")
    columns = blocks.shape[-2]
    assert isinstance(columns, int)
    depth = x.shape[-1]
    assert isinstance(depth, int)
    bias = rest[0] if rest and not is_grouped else None
    kernel = BlockProduct(
        form,
        anchor.attrs["exact"] or form.is_float,
        bias is not None,
        columns % COLUMNS != 0,
        is_grouped,
    )
    rows: Size = product(x.shape[:-1])
    source = unit_rows(ctx, x)
    y = ctx.output(node.outputs[0])
    lanes = lanes_of(ctx.target)
    epilogue, pointers, sizes = NO_EPILOGUE, {"a": source, "w": packed, "y": y}, {}
    key: Any = None
    if not is_grouped:
        reads, epilogue = row_epilogue(ctx, node, region, parts.after, lanes)
        pointers |= reads.pointers
        sizes = dict(reads.sizes)
        key = parts.after.expression, reads.key
    group = quantize.TILE
    if kernel.is_integer:
        pointers["a"] = _quantized(ctx, node, source, rows, depth, anchor.attrs["outlier"])
        row_bytes = depth // RUN * quantize.UNIT
        group = max(1, GROUP_BYTES // max(1, row_bytes) // quantize.TILE) * quantize.TILE
    if bias is not None:
        pointers["bias"] = ctx.contiguous(bias)
    if is_grouped:
        assert rest[0] is not None
        pointers |= {"counts": ctx.contiguous(rest[0]), "fault": ctx.fault()}
        sizes |= {"experts": blocks.shape[0], "node": ctx.number(node)}
    sizes |= {
        "rows": rows,
        "columns": columns,
        "depth": depth if form.is_float else depth // RUN,
        "a_stride": source.strides[0],
        "y_stride": columns,
        "group": group,
        "panel_bytes": packed.shape[-1],
    }
    code = ctx.kernel(
        f"block_matmul_{form.name.lower()}",
        (kernel, key),
        lambda m, name: emit_block_product(m, name, kernel, epilogue),
    )
    words = "exact" if kernel.exact else "int8 activations"
    ctx.call(code, node, pointers, sizes, why=f"{form.name} weights in panels, {words}")


def _panels(ctx: Lowering, blocks: Value, form: BlockFormat) -> View:
    """The packed panels of a constant; shared by all nodes that read it."""
    array = constant_value(blocks)
    if array is None:
        raise NoKernelError("its blocks are not a constant")
    key = id(array), form.name
    known: dict[Any, View] = ctx.__dict__.setdefault("block_panels", {})
    if key not in known:
        memory = ctx.__dict__.setdefault("panel_memory", PanelMemory())
        known[key] = ctx.constant(pack_panels(array, form, memory), f"{blocks.name}.panels")
    return known[key]


def _quantized(ctx: Lowering, node: Node, x: View, rows: Size, depth: int, outlier: float) -> View:
    """The units of quantized rows; computed once for all readers of x."""
    known: dict[Any, View] = ctx.__dict__.setdefault("quantized_runs", {})
    key = x, outlier
    if key not in known:
        runs = depth // RUN
        units = 2 * quantize.unit_count(rows, runs)
        view = ctx.scratch(f"{node.name}.quantized", "u8", units * quantize.UNIT)
        kernel = ctx.kernel(
            "quantize_runs", (outlier,), lambda m, name: emit_quantize_runs(m, name, outlier)
        )
        sizes: dict[str, Size] = {"rows": rows, "runs": runs, "x_stride": x.strides[0]}
        ctx.call(kernel, node, {"x": x, "y": view}, sizes, why="activations per 32 elements")
        known[key] = view
    return known[key]


@lowers("block_gather")
def lower_block_gather(ctx: Lowering, node: Node, region: RegionView) -> None:
    blocks, indices = node.operands
    form = format_named(node.attrs["format"])
    packed = _panels(ctx, blocks, form)
    index = lower_gather.index_type(indices)
    kernel = ctx.kernel(
        f"block_gather_{form.name.lower()}",
        (form.name, index),
        lambda m, name: emit_block_gather(m, name, form, index),
    )
    depth = node.outputs[0].shape[-1]
    assert isinstance(depth, int)
    sizes: dict[str, Size] = {
        "count": product(indices.shape),
        "size": blocks.shape[0],
        "depth": depth if form.is_float else depth // RUN,
        "panel_bytes": packed.shape[-1],
        "node": ctx.number(node),
    }
    pointers = {"w": packed, "i": ctx.contiguous(indices), "y": ctx.output(node.outputs[0])}
    ctx.call(kernel, node, {**pointers, "fault": ctx.fault()}, sizes)
