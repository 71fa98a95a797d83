"""Lowering of lookup tables: functions of 8-bit values, and casts from and to types without kernel
arithmetic (float8, float4, 4-bit and 2-bit integers). The reference fills the tables. Other casts
are elementwise.

Wider numbers are cast to 4-bit and 2-bit integers through i8 (`passes.simplify.expand_composites`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.elementwise.lookup import WORDS, emit_lookup
from bitwright.backends.cpu.kernels.elementwise.lower_elementwise import (
    dense_order,
    lower_elementwise,
)
from bitwright.backends.cpu.lowering.artifact import KernelCode
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.dtype import DType, bool_, f32, string
from bitwright.ir.graph import Node
from bitwright.ops.core.registry import get
from bitwright.ops.math.cast import cast
from bitwright.passes.fuse.fuse_regions import COMPUTED

Array = np.ndarray[Any, Any]


@lowers("cast")
def lower_cast(ctx: Lowering, node: Node, region: RegionView) -> None:
    (x,) = node.operands
    if {x.dtype, node.attrs["to"]} <= COMPUTED:
        lower_elementwise(ctx, node, region)
        return
    attrs = node.attrs
    source, target = x.dtype, attrs["to"]
    width, result = source.numpy.itemsize, target.numpy.itemsize
    has_table = width <= 2 or (source == f32 and target.is_float)
    if not has_table or result not in WORDS or string in (source, target):
        raise NoKernelError(f"there is no kernel for casts from {source} to {target}")
    how = attrs.get("saturate", True), attrs.get("round_mode", "up")
    table = ctx.constant(_table(source, target, *how), f"{source}.to.{target}")
    kernel = _kernel(ctx, width, result)
    y = ctx.output(node.outputs[0])
    ctx.call(kernel, node, {"x": ctx.contiguous(x), "entries": table, "y": y}, {"count": y.count})


def _kernel(ctx: Lowering, source: int, target: int) -> KernelCode:
    """The lookup kernel from elements of `source` bytes to elements of `target` bytes."""
    family = f"lookup_table_{8 * source}bit_{8 * target}bit"
    return ctx.kernel(
        family, (source, target), lambda m, name: emit_lookup(m, name, source, target)
    )


@lru_cache(64)
def _table(source: DType, target: DType, saturate: bool, round_mode: str) -> Array:
    """The cast of every bit pattern of the source type."""
    if source == f32:
        bits = np.arange(1 << 16, dtype=np.uint32) << 16
    else:
        word = np.dtype(f"u{source.numpy.itemsize}")
        bits = np.arange(1 << 8 * word.itemsize, dtype=np.uint32).astype(word)
    with np.errstate(all="ignore"):
        return cast(bits.view(source.numpy), target, saturate, round_mode)


@lowers("bitcast")
def lower_bitcast(ctx: Lowering, node: Node, region: RegionView) -> None:
    """A copy, or a table for types that use only some bits of a byte."""
    (x,) = node.operands
    to = node.attrs["to"]
    y = ctx.output(node.outputs[0])
    if to.bits >= 8 and to != bool_:
        ctx.copy(ctx.view(x), y, node.name)
        return
    values = np.arange(1 << 8, dtype=np.uint8).view(x.dtype.numpy)
    table = ctx.constant(get("bitcast").reference(values, to=to), f"{x.dtype}.as.{to}")
    pointers = {"x": ctx.contiguous(x), "entries": table, "y": y}
    ctx.call(_kernel(ctx, 1, 1), node, pointers, {"count": y.count})


@lowers("lookup_table")
def lower_lookup_table(ctx: Lowering, node: Node, region: RegionView) -> None:
    """In the memory order of x, if it is dense."""
    x, table = node.operands
    order = dense_order(ctx.view(x)) or tuple(range(x.rank))
    pointers = {
        "x": ctx.ordered(x, order),
        "entries": ctx.contiguous(table),
        "y": ctx.output(node.outputs[0], order),
    }
    ctx.call(_kernel(ctx, 1, 1), node, pointers, {"count": x.tensor.count})
