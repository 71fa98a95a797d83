"""Matmuls with constant quantized weights, packed at compile time.

Weights that the kernel does not support (odd block sizes, values that are not finite) are
dequantized to f32 at compile time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul import lower_matmul
from bitwright.backends.cpu.kernels.matmul.dequant import emit_dequant_matmul, segment_of
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.kernels.matmul.matmul import matmul_sizes, row_tiles_in_cache
from bitwright.backends.cpu.kernels.matmul.quantized_weights import pack_weights
from bitwright.backends.cpu.kernels.matmul.register_tile import best_tile
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import require_elements, split
from bitwright.ir.dim import product
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.quant.dequant_matmul import dequantize_blocks

Array = np.ndarray[Any, Any]
FEWEST_TILES = 8
"""The fewest tiles per block: dequantizing a panel costs as much as three rows."""


@lowers("dequant_matmul")
def lower_dequant_matmul(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, q, scale, zero, bias = lower_matmul.optional_inputs(anchor, 5)
    qvalues, scales, zeros = (_constant(region, value) for value in (q, scale, zero))
    parts = split(region)
    assert x is not None
    if qvalues is None or scales is None or (zero is not None and zeros is None):
        raise NoKernelError("its weight is not a constant")
    if x.dtype != f32 or bias is not None:
        raise NoKernelError("its rows are not f32, or it has a bias input")
    require_elements(parts.after.dtype)
    columns, depth = qvalues.shape
    block = anchor.attrs["block"]
    tile = best_tile(ctx.target, columns)
    packed = pack_weights(qvalues, scales, zeros, block, tile, ctx.target)
    source = region.outer(x)
    if isinstance(packed, str):
        weight = dequantize_blocks(qvalues, scales, zeros, block).astype("float32").T
        lower_matmul.lower_rows(ctx, node, region, parts, source, weight)
        return
    shape = node.outputs[0].shape
    a = lower_matmul.unit_rows(ctx, source)
    y = ctx.output(node.outputs[0])
    reads, epilogue = lower_matmul.row_epilogue(ctx, node, region, parts.after, tile.lanes)
    form = packed.form
    is_short = depth <= segment_of(tile, form)
    kernel = ctx.kernel(
        f"dequant_matmul_f32_{type_names(form.kind)}",
        (tile, form, is_short, parts.after.expression, reads.key),
        lambda m, name: emit_dequant_matmul(m, name, tile, epilogue, form, is_short),
    )
    arrays = {"w": (packed.qvalues, "weight"), "scale": (packed.scale, "scale")}
    if packed.zero is not None:
        arrays["zero"] = packed.zero, "zero"
    pointers = {"a": a, "y": y, **reads.pointers}
    pointers |= {k: ctx.constant(v, f"{node.name}.{name}") for k, (v, name) in arrays.items()}
    tiles = max(FEWEST_TILES, row_tiles_in_cache(ctx.target, tile, 4 * depth))
    sizes = matmul_sizes(product(shape[:-1]), columns, depth, a.strides[0], tiles) | reads.sizes
    why = f"weights in {form.kind}, dequantized in the kernel"
    ctx.call(kernel, node, pointers, sizes, why=why)


def _constant(region: RegionView, value: Value | None) -> Array | None:
    return None if value is None else constant_value(region.outer(value))
