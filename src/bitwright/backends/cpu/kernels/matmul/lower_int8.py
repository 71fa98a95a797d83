"""Matmuls of 8-bit values with constant weights, and the parts that int8 convolutions share.

Weights minus their zero points are packed where the differences fit 8 signed bits; otherwise the
kernel also sums each row of x (`kernels.matmul.dot.int8_dot`). The other terms that do not depend
on x are one constant per column:

    offset = bias + (shift - x_zero) (Σ w - K w_zero)

where x_zero is constant. Where it is known at run time, the epilogue subtracts
x_zero (Σ w - K w_zero).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.codegen.emit import Kernel, storage_type
from bitwright.backends.cpu.codegen.emit import Value as Emitted
from bitwright.backends.cpu.codegen.instr import Instr, dot_s16s16
from bitwright.backends.cpu.kernels.conv.conv import line_tile
from bitwright.backends.cpu.kernels.elementwise.streaming import streamed_from
from bitwright.backends.cpu.kernels.matmul.dot import int8_dot
from bitwright.backends.cpu.kernels.matmul.dot.amx import (
    BLOCK,
    AmxInt8Dot,
    amx_int8_dot,
    block_cycles,
    pack_tiles,
)
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct
from bitwright.backends.cpu.kernels.matmul.dot.int8_pairs import int8_pair_dot
from bitwright.backends.cpu.kernels.matmul.dot.int16_dot import Int16Dot, int16_dot
from bitwright.backends.cpu.kernels.matmul.epilogue import fused_epilogue
from bitwright.backends.cpu.kernels.matmul.filters import has_many_rows
from bitwright.backends.cpu.kernels.matmul.lower_dynamic_rhs import lower_matmul_dynamic_rhs
from bitwright.backends.cpu.kernels.matmul.lower_matmul import (
    as_rows,
    constant_matrix,
    optional_inputs,
)
from bitwright.backends.cpu.kernels.matmul.lower_reorder import SplitPlan, plan_split, reorder_rows
from bitwright.backends.cpu.kernels.matmul.lower_widen import ZeroPoint, widen_rows
from bitwright.backends.cpu.kernels.matmul.matmul import (
    emit_matmul,
    matmul_sizes,
)
from bitwright.backends.cpu.kernels.matmul.product_forms import choice_point, product_forms
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, step_cycles
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View
from bitwright.target import Target

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Weight:
    """Signed weights w[..., n] and the part of their zero points that is not subtracted from
    them."""

    qvalues: Array
    zero: Array | None
    """Per column, in i32; None where it is 0."""

    @classmethod
    def of(cls, w: Array, zero: Array | None) -> Weight:
        wide = w.astype(np.int32)
        zeros = np.zeros(1, np.int32) if zero is None else zero.reshape(-1).astype(np.int32)
        centred = wide - zeros
        if not w.size or (centred.min() >= -128 and centred.max() <= 127):
            return cls(centred.astype(np.int8), None)
        moved = 128 if w.dtype == np.uint8 else 0
        left = np.broadcast_to(zeros - moved, w.shape[-1:])
        return cls((wide - moved).astype(np.int8), np.ascontiguousarray(left))

    @classmethod
    def widened(cls, w: Array, zero: Array | None) -> Weight:
        """Weights in 16 bits, with zero points subtracted."""
        wide = w.astype(np.int16)
        return cls(wide if zero is None else wide - zero.reshape(-1).astype(np.int16), None)

    @property
    def sums(self) -> Array:
        """Σ w - K w_zero of every column."""
        columns = self.qvalues.shape[-1]
        total: Array = self.qvalues.sum(tuple(range(self.qvalues.ndim - 1)), dtype=np.int64)
        if self.zero is not None:
            total = total - self.qvalues.size // max(columns, 1) * self.zero.astype(np.int64)
        return total


class Offsets:
    """The terms that are added to the sums of a row: constants of its columns, which are the
    initial sums, and -x_zero s, where x_zero is known at run time.

    Where the target has a dot product of 16-bit pairs, -x_zero s is one: s' = -s = low + 2^15 high
    with 0 <= low < 2^15 is stored as (low, 2^8 high), and multiplied by (x_zero, 2^7 x_zero).
    """

    def __init__(
        self, ctx: Lowering, name: str, weight: Weight, shift: int, x_zero: ZeroPoint, bias: Array
    ) -> None:
        known = x_zero.number if x_zero.view is None else 0
        # i32 arithmetic wraps
        total = (bias.astype(np.int64) + (shift - known) * weight.sums).astype(np.int32)
        self.pointers: dict[str, View] = {}
        self.sizes: dict[str, Size] = {}
        self.zero = x_zero.view
        self.pair_dot: Instr | None = None
        self.constant = ctx.constant(total, f"{name}.offset") if total.any() else None
        """The initial sums."""
        if x_zero.view is not None:
            sums = weight.sums.astype(np.int32)
            self.pair_dot = dot_s16s16(ctx.target) if _fit_int16_pairs(sums) else None
            if self.pair_dot is not None:
                sums = (-sums & 0x7FFF) | (-sums >> 15 << 24)
            self.pointers |= {"x_zero": x_zero.view, "sums": ctx.constant(sums, f"{name}.sums")}
            self.sizes["x_zero.0"] = x_zero.view.strides[0]
        element = self.zero.dtype if self.zero is not None else None
        self.key = tuple(self.pointers), element, self.pair_dot is None

    def emit(
        self, f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> Emitted:
        if self.zero is not None:
            at = f.mul(row, f.args.size("x_zero.0"))
            zero = f.load(storage_type(self.zero.dtype), f.args.pointer("x_zero"), at)
            zero = f.convert(zero, emit.i32, self.zero.dtype.is_signed)
            sums = f.load(value.type, f.args.pointer("sums"), column, mask=mask)
            if self.pair_dot is None:
                return value - zero * sums
            if self.pair_dot.result is not value.type:
                return value + zero * f.add(f.and_(sums, 0x7FFF), f.shl(f.ashr(sums, 24), 15))
            both = f.splat(f.or_(f.and_(zero, 0xFFFF), f.shl(zero, 23)), value.type.lanes)
            pair = self.pair_dot.operands[1]
            return self.pair_dot(f, value, f.bitcast(both, pair), f.bitcast(sums, pair))
        return value


def _fit_int16_pairs(sums: Array) -> bool:
    """Whether every sum fits a pair of 16-bit integers."""
    return bool((np.abs(sums.astype(np.int64)) < 127 << 15).all())


def zero_point_of(ctx: Lowering, region: RegionView, value: Value | None) -> ZeroPoint:
    """The zero point of x: a constant, or its view in memory."""
    if value is None:
        return ZeroPoint(0, None)
    outer = region.outer(value)
    known = constant_value(outer)
    if known is not None and known.size == 1:
        return ZeroPoint(int(known.reshape(-1)[0]), None)
    return ZeroPoint(0, ctx.view(outer))


def constant_of(region: RegionView, value: Value | None, what: str) -> Array | None:
    if value is None:
        return None
    found = constant_matrix(region.outer(value))
    if found is None:
        raise NoKernelError(f"its {what} is not a constant")
    return found


def _rows_of(ctx: Lowering, x: Value, zero: ZeroPoint) -> tuple[View, ZeroPoint]:
    """x as rows of contiguous values, and their zero points: one for all rows or one per row."""
    a = as_rows(ctx, ctx.view(x), x.name)
    if a.strides[1] != 1 and a.shape[1] != 1:
        a = as_rows(ctx, ctx.contiguous(x), x.name)
    if zero.view is not None:
        points = regions.broadcast(zero.view, (*x.shape[:-1], 1))
        zero = ZeroPoint(0, as_rows(ctx, points, x.name))
    return a, zero


@lowers("integer_matmul")
def lower_integer_matmul(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    given = [None if v is None else region.outer(v) for v in optional_inputs(anchor, 5)]
    assert given[1] is not None
    array = constant_matrix(given[1])
    if array is None or array.ndim != 2:
        lower_matmul_dynamic_rhs(ctx, node, region, given, array)
    else:
        _lower_rows(ctx, node, region, array)


def _lower_rows(ctx: Lowering, node: Node, region: RegionView, array: Array) -> None:
    """Lowers a product of 8-bit rows with one constant matrix."""
    assert region.anchor is not None
    x, _, x_zero, w_zero, bias = optional_inputs(region.anchor, 5)
    assert x is not None
    if array.ndim != 2 or x.rank < 2:
        raise NoKernelError("its weight is not a matrix, or x has no rows")
    after = regions.split(region).after
    regions.require_elements(after.dtype)
    zeros = constant_of(region, w_zero, "weight's zero point")
    known_bias = constant_of(region, bias, "bias")
    depth, columns = array.shape
    if known_bias is not None and known_bias.size not in (1, columns):
        raise NoKernelError("its bias differs between rows")
    shape = node.outputs[0].shape
    source = region.outer(x)
    a, zero = _rows_of(ctx, source, zero_point_of(ctx, region, x_zero))
    rows = product(shape[:-1])
    weight = Weight.of(array, zeros)
    plan = None if weight.zero is not None else plan_split(ctx.target, weight.qvalues[None], depth)
    if plan is not None:
        a = reorder_rows(ctx, node, a, plan.order)
    elif int16_dot(ctx.target, depth):
        weight = Weight.widened(array, zeros)
        a, zero = widen_rows(ctx, node, a, zero), ZeroPoint(0, None)
    bias_row = np.zeros(columns, np.int64) if known_bias is None else known_bias.reshape(-1)
    filter = Int8Filter(x.dtype.is_signed, weight.zero, use_amx=has_many_rows(rows), plan=plan)
    shift = filter.dot(ctx.target, depth).shift
    offsets = Offsets(ctx, node.name, weight, shift, zero, bias_row)
    filter = replace(filter, offset=offsets.constant)
    dot = filter.dot(ctx.target, depth)
    tiles = filter.tiles(ctx.target, columns, dot)
    forms = product_forms(ctx.target, tiles, depth * dot.element.bytes)
    point = choice_point(f"matmul_{dot.name}", after, rows, columns, depth)
    tile, block = ctx.choices.pick(node, point, forms)
    y = ctx.output(node.outputs[0])
    others = regions.operand_views(ctx, region, after.inputs, shape)
    reads = regions.Reads("e", [as_rows(ctx, view, node.name) for view in others])

    def operands(
        f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> list[Emitted]:
        value = offsets.emit(f, value, row, column, mask)
        return [value, *reads.at(f, (row,), tile.lanes).load(column, mask)]

    more = {**offsets.pointers, **reads.pointers}
    sizes: dict[str, Size] = {**offsets.sizes, **reads.sizes}
    streams = streamed_from(ctx.target, y, columns)
    types = [view.dtype for view in others]
    epilogue = fused_epilogue(after, operands, tile.lanes, more, sizes, types, streams)
    kernel = ctx.kernel(
        f"matmul_{dot.name}",
        (tile, dot, after.expression, reads.key, offsets.key, streams),
        lambda m, name: emit_matmul(m, name, tile, epilogue, dot),
    )
    packed = ctx.constant(filter.pack(weight.qvalues[None], tile, dot), f"{node.name}.weight")
    pointers = {"a": a, "w": packed, "y": y, **filter.pointers(ctx, node.name, tile), **more}
    sizes |= matmul_sizes(rows, columns, depth, a.strides[0], block)
    ctx.call(kernel, node, pointers, sizes, why="int8, summed in i32")


@dataclass(frozen=True)
class Int8Filter:
    """8-bit weights (see `kernels.matmul.filters.Filter`)."""

    signed: bool
    zero: Array | None = None
    offset: View | None = None
    """The initial sum of each column."""
    use_amx: bool = False
    """Whether AMX is used where the target has it."""
    plan: SplitPlan | None = None
    """The weights split in two parts (`kernels.matmul.dot.int8_pairs`), if they are."""
    item_bytes = 1

    def dot(self, target: Target, run: int) -> int8_dot.Int8Dot:
        has_zero, has_offset = self.zero is not None, self.offset is not None
        if self.plan is not None:
            levels = len(self.plan.weights.counts)
            found = int8_pair_dot(target, self.signed, has_offset, levels)
            assert found is not None
            return found
        amx = self.use_amx and not has_zero
        return (
            (amx_int8_dot(target, self.signed, has_offset) if amx else None)
            or int16_dot(target, run, has_offset)
            or int8_dot.choose_int8_dot(target, self.signed, run, has_zero, has_offset)
        )

    def amx_is_faster(self, target: Target, run: int, lines: int, columns: int) -> bool:
        """Whether AMX blocks are faster than vector dot products for windows of `lines` runs."""
        dot, tile = replace(self, use_amx=False).choose(target, run, columns)
        steps, panels = lines * -(-run // dot.group), -(-columns // tile.columns)
        per_row = step_cycles(tile.rows, tile.vectors + dot.extra) / tile.rows
        blocks = -(-columns // BLOCK.columns) * block_cycles(run, lines, AmxInt8Dot.group)
        return blocks < steps * panels * per_row * BLOCK.rows

    def tiles(self, target: Target, columns: int, dot: DotProduct) -> list[Tile]:
        return [BLOCK] if dot.tiles else int8_dot.int8_tiles(target, columns, dot)

    def choose(self, target: Target, run: int, columns: int) -> tuple[int8_dot.Int8Dot, Tile]:
        """The dot product and tile for rows that are one run."""
        dot = self.dot(target, run)
        return dot, self.tiles(target, columns, dot)[0]

    def line_tile(
        self,
        target: Target,
        columns: int,
        dot: DotProduct,
        line: int,
        steps: int,
        tile: Tile,
        is_flat: bool,
    ) -> Tile | None:
        if not isinstance(dot, int8_dot.Int8Dot4):
            return None
        return line_tile(target, columns, line, dot.extra, steps, tile, is_flat)

    def pack(self, runs: Array, tile: Tile, dot: DotProduct) -> Array:
        if self.plan is not None:
            return int8_dot.pack_int8(self.plan.weights.main, tile, dot.group)
        if dot.tiles:
            return pack_tiles(runs.astype(np.int8, copy=False))
        if isinstance(dot, Int16Dot):
            return int8_dot.pack_groups(runs.astype(np.int16, copy=False), tile, dot.group)
        return int8_dot.pack_int8(runs, tile, dot.group)

    def pointers(self, ctx: Lowering, name: str, tile: Tile) -> dict[str, View]:
        found = {} if self.offset is None else {"offset": self.offset}
        if self.plan is not None:
            arrays = self.plan.weights.arrays(tile)
            found |= {key: ctx.constant(a, f"{name}.{key}") for key, a in arrays.items()}
        if self.zero is not None:
            found["w_zero"] = ctx.constant(self.zero, f"{name}.zeros")
        return found
