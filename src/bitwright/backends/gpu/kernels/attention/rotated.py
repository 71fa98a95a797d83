"""Rotation of a row's features inside another kernel: a new key that goes into a cache.

y[f] = x[f] cos[c] -+ x[partner] sin[c]        f, partner and c in lanes
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.backends.gpu.codegen.expression import loaded
from bitwright.backends.gpu.kernels.movement.indices import (
    FAULT,
    checked_index,
    fault_operands,
    index_type,
)
from bitwright.backends.gpu.lowering.context import GpuLowering, RegionView, defers, region_of
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View


@defers("rotary")
def is_deferred(ctx: GpuLowering, node: Node, region: RegionView) -> bool:
    """Whether the only reader writes the result into a cache along the axis of positions."""
    value = node.outputs[0]
    readers = ctx.readers(value)
    if node.op == "fused" or len(readers) != 1 or not isinstance(value.shape[-1], int):
        return False
    (reader,) = readers
    if reader.op != "tensor_scatter" or reader.inputs[1] is not value or value.rank != 4:
        return False
    past = reader.inputs[0]
    is_once = list(reader.operands).count(value) == 1
    assert past is not None
    return is_once and normalize_axis(reader.attrs["axis"], 4) == 2 and past.dtype == value.dtype


@dataclass
class Rotated:
    """A rotary node as part of a kernel whose rows are (batch p0, head p1, position p2)."""

    x: View
    views: dict[str, View] = field(default_factory=dict)
    pointers: dict[str, DType] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    """Statements that compute `found` for the index tile `column`, where `ok` is true."""

    @classmethod
    def of(cls, ctx: GpuLowering, value: Value) -> Rotated | None:
        """The rotation that makes a value; None if the value is in memory."""
        node = ctx.deferred.get(value)
        if node is None or ctx.is_placed(value) or region_of(node).anchor is not node:
            return None
        x, cos, sin, *ids = node.operands
        features = value.shape[-1]
        assert isinstance(features, int)
        rotated = node.attrs["rotary_dim"] or features
        half = rotated // 2
        found = cls(ctx.view(x), {"cos": ctx.view(cos), "sin": ctx.view(sin)})
        found.pointers = {"cos": x.dtype, "sin": x.dtype}
        if node.attrs["interleaved"]:
            first, partner, pair = "column % 2 == 0", "column ^ 1", "column // 2"
        else:
            first = f"column < {half}"
            partner = f"tl.where({first}, column + {half}, column - {half})"
            pair = f"column % {half}"
        lines = [f"turns = ok & (column < {rotated})", f"pair = {pair}"]
        axes = 3
        if ids:
            view = ctx.view(ids[0])
            fault, number = fault_operands(ctx, node)
            found.views |= {"ids": view, **fault}
            found.pointers |= {"ids": index_type(ids[0]), **FAULT}
            found.sizes |= {"limit": cos.shape[0], "rotary_node": number["node"]}
            found.sizes |= {f"ids_s{axis}": view.strides[axis] for axis in range(2)}
            load = "tl.load(ids + p0 * ids_s0 + p2 * ids_s1, row_ok, other=0)"
            checks = [
                f"place_of_id = {load}",
                *checked_index("place_of_id", "limit", "row_ok"),
                f"lost = row_ok & ({load} < 0)",
                "tl.store(fault + row * 0, tl.cast(node, tl.int64) + row * 0, lost)",
            ]
            lines += [line.replace("tl.cast(node,", "tl.cast(rotary_node,") for line in checks]
            where, axes = "place_of_id * {0}_s0 + pair * {0}_s1", 2
        else:
            shape = x.shape[0], x.shape[2], half
            for name in ("cos", "sin"):
                found.views[name] = broadcast(found.views[name], shape)
            where = "p0 * {0}_s0 + p2 * {0}_s1 + pair * {0}_s2"
        for name in ("cos", "sin"):
            strides = found.views[name].strides
            found.sizes |= {f"{name}_s{axis}": strides[axis] for axis in range(axes)}
            load = loaded(f"tl.load({name} + {where.format(name)}, turns, other=0.0)", x.dtype)
            lines.append(f"{name}_x = {load}")
        row = "u + p0 * u0 + p1 * u1 + p2 * u2"
        own = loaded(f"tl.load({row} + column * u3, ok, other=0.0)", x.dtype)
        other = loaded(f"tl.load({row} + ({partner}) * u3, turns, other=0.0)", x.dtype)
        lines += [
            f"own = {own}",
            f"other = {other} * sin_x",
            f"turned = tl.where({first}, own * cos_x - other, own * cos_x + other)",
            "found = tl.where(turns, turned, own)",
        ]
        found.lines = lines
        return found
