"""Tables: functions of 8-bit codes, and casts from and to types that kernels do not compute with
(float8, float4, integers of 4 and 2 bits), which the reference fills. Other casts are elementwise.

Wider numbers reach integers of few bits by way of i8 (`passes.simplify.expand_composites`).
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
    by_code = width <= 2 or (source == f32 and target.is_float)
    if not by_code or result not in WORDS or string in (source, target):
        raise NoKernelError(f"there is no kernel for casts from {source} to {target}")
    how = attrs.get("saturate", True), attrs.get("round_mode", "up")
    table = ctx.constant(_table(source, target, *how), f"{source}.to.{target}")
    kernel = ctx.kernel(
        "lookup", (width, result), lambda m, name: emit_lookup(m, name, width, result)
    )
    y = ctx.output(node.outputs[0])
    ctx.call(kernel, node, {"x": ctx.contiguous(x), "entries": table, "y": y}, {"count": y.count})


@lru_cache(64)
def _table(source: DType, target: DType, saturate: bool, round_mode: str) -> Array:
    """What every code of the source becomes."""
    if source == f32:
        qvalues = np.arange(1 << 16, dtype=np.uint32) << 16
    else:
        word = np.dtype(f"u{source.numpy.itemsize}")
        qvalues = np.arange(1 << 8 * word.itemsize, dtype=np.uint32).astype(word)
    with np.errstate(all="ignore"):
        return cast(qvalues.view(source.numpy), target, saturate, round_mode)


@lowers("bitcast")
def lower_bitcast(ctx: Lowering, node: Node, region: RegionView) -> None:
    """A copy, or a table where only some of a byte's bits count."""
    (x,) = node.operands
    to = node.attrs["to"]
    y = ctx.output(node.outputs[0])
    if to.bits >= 8 and to != bool_:
        ctx.copy(ctx.view(x), y, node.name)
        return
    qvalues = np.arange(1 << 8, dtype=np.uint8).view(x.dtype.numpy)
    table = ctx.constant(get("bitcast").reference(qvalues, to=to), f"{x.dtype}.as.{to}")
    kernel = ctx.kernel("lookup", (1, 1), lambda m, name: emit_lookup(m, name, 1, 1))
    ctx.call(kernel, node, {"x": ctx.contiguous(x), "entries": table, "y": y}, {"count": y.count})


@lowers("lookup_table")
def lower_lookup_table(ctx: Lowering, node: Node, region: RegionView) -> None:
    """In the memory order of the codes, where they fill their memory."""
    x, table = node.operands
    order = dense_order(ctx.view(x)) or tuple(range(x.rank))
    pointers = {
        "x": ctx.ordered(x, order),
        "entries": ctx.contiguous(table),
        "y": ctx.output(node.outputs[0], order),
    }
    kernel = ctx.kernel("lookup", (1, 1), lambda m, name: emit_lookup(m, name, 1, 1))
    ctx.call(kernel, node, pointers, {"count": x.tensor.count})
