"""Products of 8-bit codes with constant weights: matrices, and what `kernels.conv.lower_int8` shares.

Weights minus their zero points are packed where they fit 8 signed bits; else the kernel sums each
row's codes too (`kernels.matmul.dot.int8_dot`). What else does not depend on x is one number per column:

    offset = bias + (shift - x_zero) (Σ w - K w_zero)

where x_zero is known; where it is made by the run, x_zero (Σ w - K w_zero) is taken off beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.codegen.emit import stored
from bitwright.backends.cpu.codegen.instr import Instr, dot_s16s16
from bitwright.backends.cpu.kernels.conv.conv import line_tile
from bitwright.backends.cpu.kernels.elementwise.streaming import streamed_from
from bitwright.backends.cpu.kernels.matmul.dot.amx import (
    BLOCK,
    AmxInt8,
    block_cycles,
    pack_tiles,
    tile_qvalues,
)
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import (
    Dots,
    Int8Dot,
    best_qvalues,
    pack_groups,
    pack_qvalues,
    qvalues_tile,
)
from bitwright.backends.cpu.kernels.matmul.dot.int8_pairs import split_pairs
from bitwright.backends.cpu.kernels.matmul.dot.int16_dot import Words, words
from bitwright.backends.cpu.kernels.matmul.filters import are_many
from bitwright.backends.cpu.kernels.matmul.lower_dynamic_rhs import lower_matmul_dynamic_rhs
from bitwright.backends.cpu.kernels.matmul.lower_matmul import as_rows, constant_matrix
from bitwright.backends.cpu.kernels.matmul.lower_reorder import SplitPlan, ordered_rows, plan_split
from bitwright.backends.cpu.kernels.matmul.lower_widen import Zero, widened_rows
from bitwright.backends.cpu.kernels.matmul.matmul import (
    Epilogue,
    Tile,
    emit_matmul,
    is_light,
    row_tiles_in_cache,
)
from bitwright.backends.cpu.kernels.matmul.register_tile import step_cycles
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import (
    Reads,
    broadcast,
    operand_views,
    require_elements,
    split,
)
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View
from bitwright.target import Target

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Weight:
    """Signed codes w[..., n] with what is left of their zero points, for how x is multiplied."""

    qvalues: Array
    zero: Array | None
    """Per column, in i32; None where there is none left."""

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
        """In 16 bits, where every zero point is taken off."""
        wide = w.astype(np.int16)
        return cls(wide if zero is None else wide - zero.reshape(-1).astype(np.int16), None)

    @property
    def sums(self) -> Array:
        """Σ w - K w_zero of every column."""
        columns = self.qvalues.shape[-1]
        total = self.qvalues.sum(tuple(range(self.qvalues.ndim - 1)), dtype=np.int64)
        if self.zero is not None:
            total = total - self.qvalues.size // max(columns, 1) * self.zero.astype(np.int64)
        return total


class Offsets:
    """What is added to the sums of a row: constants of its columns, which they begin with, and what
    its x_zero makes.

    Where there is a dot product of 16-bit numbers, -x_zero s is one: s' = -s = low + 2^15 high with
    0 <= low < 2^15 is kept as (low, 2^8 high), which meets (x_zero, 2^7 x_zero).
    """

    def __init__(
        self, ctx: Lowering, name: str, weight: Weight, shift: int, x_zero: Zero, bias: Array
    ) -> None:
        known = x_zero.number if x_zero.view is None else 0
        # in the arithmetic of i32, which wraps
        total = (bias.astype(np.int64) + (shift - known) * weight.sums).astype(np.int32)
        self.pointers: dict[str, View] = {}
        self.sizes: dict[str, Size] = {}
        self.zero = x_zero.view
        self.dot: Instr | None = None
        self.constant = ctx.constant(total, f"{name}.offset") if total.any() else None
        """What sums begin with."""
        if x_zero.view is not None:
            sums = weight.sums.astype(np.int32)
            self.dot = dot_s16s16(ctx.target) if _halves_fit(sums) else None
            if self.dot is not None:
                sums = (-sums & 0x7FFF) | (-sums >> 15 << 24)
            self.pointers |= {"x_zero": x_zero.view, "sums": ctx.constant(sums, f"{name}.sums")}
            self.sizes["x_zero.0"] = x_zero.view.strides[0]
        element = self.zero.dtype if self.zero is not None else None
        self.key = tuple(self.pointers), element, self.dot is None

    def emit(self, f: emit.Kernel, value: Any, row: Any, column: Any, mask: Any) -> Any:
        if self.zero is not None:
            at = f.mul(row, f.args.size("x_zero.0"))
            code = f.load(stored(self.zero.dtype), f.args.pointer("x_zero"), at)
            zero = f.convert(code, emit.i32, self.zero.dtype.is_signed)
            sums = f.load(value.type, f.args.pointer("sums"), column, mask=mask)
            if self.dot is None:
                return value - zero * sums
            if self.dot.result is not value.type:
                return value + zero * f.add(f.and_(sums, 0x7FFF), f.shl(f.ashr(sums, 24), 15))
            both = f.splat(f.or_(f.and_(zero, 0xFFFF), f.shl(zero, 23)), value.type.lanes)
            halves = self.dot.operands[1]
            return self.dot(f, value, f.bitcast(both, halves), f.bitcast(sums, halves))
        return value


def _halves_fit(sums: Array) -> bool:
    """Whether sums are short enough to be two 16-bit numbers."""
    return bool((np.abs(sums.astype(np.int64)) < 127 << 15).all())


def zero_of(ctx: Lowering, region: RegionView, value: Value | None) -> Zero:
    """A zero point that is one number or none."""
    if value is None:
        return Zero(0, None)
    outer = region.outer(value)
    known = constant_value(outer)
    if known is not None and known.size == 1:
        return Zero(int(known.reshape(-1)[0]), None)
    return Zero(0, ctx.view(outer))


def constant_of(region: RegionView, value: Value | None, what: str) -> Array | None:
    if value is None:
        return None
    found = constant_matrix(region.outer(value))
    if found is None:
        raise NoKernelError(f"its {what} is not a constant")
    return found


def operands_of(anchor: Node) -> list[Value | None]:
    """x, w, x_zero, w_zero, bias."""
    return [*anchor.inputs, *(None,) * (5 - len(anchor.inputs))]


def _rows_of(ctx: Lowering, x: Value, zero: Zero) -> tuple[View, Zero]:
    """Rows of neighbouring codes, and their zero points: one for all, or one for each."""
    a = as_rows(ctx, ctx.view(x), x.name)
    if a.strides[1] != 1 and a.shape[1] != 1:
        a = as_rows(ctx, ctx.contiguous(x), x.name)
    if zero.view is not None:
        spread = broadcast(zero.view, (*x.shape[:-1], 1))
        zero = Zero(0, as_rows(ctx, spread, x.name))
    return a, zero


@lowers("integer_matmul")
def lower_integer_matmul(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    given = [None if v is None else region.outer(v) for v in operands_of(anchor)]
    assert given[1] is not None
    array = constant_matrix(given[1])
    if array is None or array.ndim != 2:
        lower_matmul_dynamic_rhs(ctx, node, region, given, array)
    else:
        _lower_rows(ctx, node, region, array)


def _lower_rows(ctx: Lowering, node: Node, region: RegionView, array: Array) -> None:
    """Rows of codes times one matrix of constants."""
    assert region.anchor is not None
    x, _, x_zero, w_zero, bias = operands_of(region.anchor)
    assert x is not None
    if array.ndim != 2 or x.rank < 2:
        raise NoKernelError("its operands are not rows and one matrix")
    after = split(region).after
    require_elements(after.dtype)
    zeros = constant_of(region, w_zero, "weight's zero point")
    known_bias = constant_of(region, bias, "bias")
    depth, columns = array.shape
    if known_bias is not None and known_bias.size not in (1, columns):
        raise NoKernelError("its bias differs from row to row")
    shape = node.outputs[0].shape
    source = region.outer(x)
    a, zero = _rows_of(ctx, source, zero_of(ctx, region, x_zero))
    rows = product(shape[:-1])
    weight = Weight.of(array, zeros)
    plan = None if weight.zero is not None else plan_split(ctx.target, weight.qvalues[None], depth)
    if plan is not None:
        a = ordered_rows(ctx, node, a, plan.order)
    elif words(ctx.target, depth):
        weight = Weight.widened(array, zeros)
        a, zero = widened_rows(ctx, node, a, zero), Zero(0, None)
    bias_row = np.zeros(columns, np.int64) if known_bias is None else known_bias.reshape(-1)
    filter = CodeFilter(x.dtype.is_signed, weight.zero, in_tiles=are_many(rows), plan=plan)
    shift = filter.numbers(ctx.target, depth).shift
    offsets = Offsets(ctx, node.name, weight, shift, zero, bias_row)
    filter = replace(filter, offset=offsets.constant)
    qvalues, tile = filter.chosen(ctx.target, depth, columns)
    y = ctx.output(node.outputs[0])
    others = operand_views(ctx, region, after.inputs, shape)
    reads = Reads("e", [as_rows(ctx, view, node.name) for view in others])

    def values(f: emit.Kernel, value: Any, row: Any, column: Any, mask: Any) -> list[Any]:
        value = offsets.emit(f, value, row, column, mask)
        return [value, *reads.at(f, (row,), tile.lanes).load(column, mask)]

    def finish(f: emit.Kernel, *place: Any) -> Any:
        return after.evaluate(f, values(f, *place), tile.lanes)

    def finish_wide(f: emit.Kernel, *place: Any) -> Any:
        return after.evaluate_wide(f, values(f, *place), tile.lanes)

    more = {**offsets.pointers, **reads.pointers}
    sizes: dict[str, Size] = {**offsets.sizes, **reads.sizes}
    narrowest = min(d.bits for d in (after.dtype, *(view.dtype for view in others)))
    wide = finish_wide if after.expression.narrows else None
    streams = streamed_from(ctx.target, y, columns)
    slots = tuple(more), tuple(sizes), is_light(after.expression)
    epilogue = Epilogue(finish, *slots, after.dtype, narrowest, wide, streams)
    kernel = ctx.kernel(
        "matmul_codes",
        (tile, qvalues, after.expression, reads.key, offsets.key, streams),
        lambda m, name: emit_matmul(m, name, tile, epilogue, qvalues),
    )
    packed = filter.pack(weight.qvalues[None], tile, qvalues)
    pointers = {
        "a": a,
        "w": ctx.constant(packed, f"{node.name}.weight"),
        "y": y,
        **filter.pointers(ctx, node.name, tile),
        **more,
    }
    sizes |= {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "a_stride": a.strides[0],
        "y_stride": columns,
        "block": row_tiles_in_cache(ctx.target, tile, depth * qvalues.element.bytes),
    }
    ctx.call(kernel, node, pointers, sizes, why="8-bit codes, summed in i32")


@dataclass(frozen=True)
class CodeFilter:
    """How a filter of codes is multiplied (see `kernels.conv.lower_conv.Filter`)."""

    signed: bool
    zero: Array | None = None
    offset: View | None = None
    """What the sums of each column begin with."""
    in_tiles: bool = False
    """Whether two-dimensional registers are used where the target has them."""
    plan: SplitPlan | None = None
    """The weights in two parts, where that is how they are multiplied."""
    family, item_bytes = "conv_codes", 1

    def numbers(self, target: Target, run: int) -> Int8Dot:
        has_zero, has_offset = self.zero is not None, self.offset is not None
        if self.plan is not None:
            levels = len(self.plan.weights.counts)
            found = split_pairs(target, self.signed, has_offset, levels)
            assert found is not None
            return found
        may = self.in_tiles and not has_zero
        tiles = tile_qvalues(target, self.signed, has_offset) if may else None
        return (
            tiles
            or words(target, run, has_offset)
            or best_qvalues(target, self.signed, run, has_zero, has_offset)
        )

    def tiles_pay(self, target: Target, run: int, lines: int, columns: int) -> bool:
        """Whether blocks of tiles take less time than dots for windows of so many runs."""
        numbers, tile = replace(self, in_tiles=False).chosen(target, run, columns)
        steps, panels = lines * -(-run // numbers.group), -(-columns // tile.columns)
        per_row = step_cycles(tile.rows, tile.vectors + numbers.extra) / tile.rows
        blocks = -(-columns // BLOCK.columns) * block_cycles(run, lines, AmxInt8.group)
        return blocks < steps * panels * per_row * BLOCK.rows

    def tile(self, target: Target, columns: int, numbers: Int8Dot) -> Tile:
        return BLOCK if numbers.tiles else qvalues_tile(target, columns, numbers)

    def chosen(self, target: Target, run: int, columns: int) -> tuple[Int8Dot, Tile]:
        """How rows of one run are multiplied."""
        numbers = self.numbers(target, run)
        return numbers, self.tile(target, columns, numbers)

    def line_tile(
        self,
        target: Target,
        columns: int,
        numbers: Int8Dot,
        line: int,
        steps: int,
        tile: Tile,
        is_flat: bool,
    ) -> Tile | None:
        if not isinstance(numbers, Dots):
            return None
        return line_tile(target, columns, line, numbers.extra, steps, tile, is_flat)

    def pack(self, runs: Array, tile: Tile, numbers: Int8Dot) -> Array:
        if self.plan is not None:
            return pack_qvalues(self.plan.weights.main, tile, numbers.group)
        if numbers.tiles:
            return pack_tiles(runs.astype(np.int8, copy=False))
        if isinstance(numbers, Words):
            return pack_groups(runs.astype(np.int16, copy=False), tile, numbers.group)
        return pack_qvalues(runs, tile, numbers.group)

    def pointers(self, ctx: Lowering, name: str, tile: Tile) -> dict[str, View]:
        found = {} if self.offset is None else {"offset": self.offset}
        if self.plan is not None:
            arrays = self.plan.weights.arrays(tile)
            found |= {key: ctx.constant(a, f"{name}.{key}") for key, a in arrays.items()}
        if self.zero is not None:
            found["w_zero"] = ctx.constant(self.zero, f"{name}.zeros")
        return found
