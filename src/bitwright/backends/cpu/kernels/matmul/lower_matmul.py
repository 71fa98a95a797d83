"""Matmuls with a constant weight, packed for the register tile at compile time.

All axes in front of the last one of x are rows. Operands other than f32, bf16 or f16 times a
constant matrix of the same type are lowered by `kernels.matmul.lower_batched`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel
from bitwright.backends.cpu.codegen.emit import Value as Emitted
from bitwright.backends.cpu.kernels.elementwise.streaming import streamed_from
from bitwright.backends.cpu.kernels.matmul import upcast_product
from bitwright.backends.cpu.kernels.matmul.dot.amx import AmxSplitF16Dot
from bitwright.backends.cpu.kernels.matmul.dot.split_half_dot import blocks_in_plane
from bitwright.backends.cpu.kernels.matmul.epilogue import Epilogue, is_light
from bitwright.backends.cpu.kernels.matmul.filters import filter_of, has_filter
from bitwright.backends.cpu.kernels.matmul.lower_batched import lower_batched_matmul
from bitwright.backends.cpu.kernels.matmul.lower_blocked import is_blocked, lower_blocked_matmul
from bitwright.backends.cpu.kernels.matmul.matmul import (
    emit_matmul,
    matmul_sizes,
)
from bitwright.backends.cpu.kernels.matmul.product_forms import choice_point, product_forms
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import Part, Parts, Reads, operand_views, split
from bitwright.ir.dim import product
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View

Array = np.ndarray[Any, Any]


@lowers("matmul")
def lower_matmul(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, w = anchor.inputs
    assert x is not None and w is not None
    weight = constant_matrix(region.outer(w))
    parts = split(region)
    fits = has_filter(x.dtype, w.dtype, parts.after.dtype)
    if not fits or weight is None or weight.ndim != 2 or x.rank < 2:
        if weight is None and is_blocked(region):
            lower_blocked_matmul(ctx, node, region)
        else:
            lower_batched_matmul(ctx, node, region)
        return
    lower_rows(ctx, node, region, parts, region.outer(x), weight)


def lower_rows(
    ctx: Lowering, node: Node, region: RegionView, parts: Parts, x: Value, weight: Array
) -> None:
    """Lowers [..., K] @ [K, N] with all axes in front of K as rows."""
    depth, columns = weight.shape
    shape = node.outputs[0].shape
    rows = product(shape[:-1])
    filter = filter_of(ctx.target, x.dtype, weight, rows)
    dot = filter.dot(ctx.target, depth)
    if choice := upcast_product.choose_upcast(ctx.target, dot, depth, columns, rows):
        dot, tile = choice
        block = upcast_product.tiles_in_buffer(tile, depth)
    else:
        tiles = filter.tiles(ctx.target, columns, dot)
        forms = product_forms(ctx.target, tiles, filter.item_bytes * depth)
        point = choice_point(f"matmul_{dot.name}", parts.after, rows, columns, depth)
        tile, block = ctx.choices.pick(node, point, forms)
        if isinstance(dot, AmxSplitF16Dot):
            block = blocks_in_plane(depth)
    a = unit_rows(ctx, x)
    y = ctx.output(node.outputs[0])
    reads, epilogue = row_epilogue(ctx, node, region, parts.after, tile.lanes)
    streams = streamed_from(ctx.target, y, columns)
    epilogue = replace(epilogue, streams=streams)
    kernel = ctx.kernel(
        f"matmul_{dot.name}",
        (tile, parts.after.expression, reads.key, dot, streams),
        lambda m, name: emit_matmul(m, name, tile, epilogue, dot, upcast_product.emit_half_product),
    )
    packed = ctx.constant(filter.pack(weight[None], tile, dot), f"{node.name}.weight")
    sizes = matmul_sizes(rows, columns, depth, a.strides[0], block) | reads.sizes
    ctx.call(kernel, node, {"a": a, "w": packed, "y": y, **reads.pointers}, sizes)


def unit_rows(ctx: Lowering, value: Value) -> View:
    """A value as rows of contiguous elements; copied where the strides require it."""
    found = as_rows(ctx, ctx.view(value), value.name)
    return found if found.strides[1] == 1 else as_rows(ctx, ctx.contiguous(value), value.name)


def row_epilogue(
    ctx: Lowering, node: Node, region: RegionView, after: Part, lanes: int
) -> tuple[Reads, Epilogue]:
    """The operands that the epilogue of a matmul reads, and the epilogue."""
    others = operand_views(ctx, region, after.inputs, node.outputs[0].shape)
    reads = Reads("e", [as_rows(ctx, view, node.name) for view in others])

    def finish(
        f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> Emitted:
        operands = reads.at(f, (row,), lanes).load(column, mask)
        return after.evaluate(f, [value, *operands], lanes)

    slots = tuple(reads.pointers), tuple(reads.sizes)
    narrowest = min(d.bits for d in (after.dtype, *(view.dtype for view in others)))
    light = is_light(after.expression)
    return reads, Epilogue(finish, *slots, light, after.dtype, narrowest)


def optional_inputs(anchor: Node, count: int) -> list[Value | None]:
    """The first `count` inputs of a node; None where one is absent."""
    return [*anchor.inputs, *(None,) * (count - len(anchor.inputs))]


def constant_matrix(value: Value) -> Array | None:
    """The array of a constant or of a transposed constant; None for other values."""
    if value.node.op == "transpose":
        (source,) = value.node.operands
        array = constant_value(source)
        return None if array is None else array.transpose(value.node.attrs["perm"])
    return constant_value(value)


def as_rows(ctx: Lowering, view: View, name: str) -> View:
    """All axes but the last as one; copied where the strides require it."""
    shape = (product(view.shape[:-1]), view.shape[-1])
    found = view.reshape(shape) or ctx.packed(view, name).reshape(shape)
    if found is None:
        raise NoKernelError(f"{view} cannot be reshaped to rows")
    return found
