"""Products of 8-bit codes that are both made by the run: w is packed first, one matrix after the
other, then multiplied as a constant would be (`kernels.matmul.pack_rhs`). Several matrices of constants
are packed when the program is made (`kernels.matmul.constant_panels`), and multiplied the same way.

The axes in front of rows and columns broadcast; a is read where it lies, and so is w, whichever of
its two last axes its neighbours lie on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.kernels.attention.lower_attention import order_of
from bitwright.backends.cpu.kernels.matmul.constant_panels import pack_constants
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot, best_qvalues, qvalues_tile
from bitwright.backends.cpu.kernels.matmul.matmul import (
    Epilogue,
    Tile,
    is_light,
    row_tiles_in_cache,
)
from bitwright.backends.cpu.kernels.matmul.pack_rhs import (
    Panels,
    RunProduct,
    emit_panels,
    product_sizes,
    zero_of_row,
)
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView
from bitwright.backends.cpu.lowering.region import (
    Reads,
    broadcast,
    close,
    collapse,
    operand_views,
    require_elements,
    split,
)
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous

Array = np.ndarray[Any, Any]
USUAL = 64
"""What sizes that only a run knows are taken for a multiple of."""


@dataclass(frozen=True)
class _Packed:
    """Panels of w and what is known of its columns; `outer` has the axes in front of them."""

    panels: View
    facts: dict[str, View]
    outer: View


def lower_matmul_dynamic_rhs(
    ctx: Lowering,
    node: Node,
    region: RegionView,
    values: Sequence[Any],
    known: Array | None = None,
) -> None:
    """`values` are x, w, x_zero, w_zero and bias in the outer graph; `known` is w where it is a
    constant."""
    anchor = region.anchor
    assert anchor is not None
    x, w, x_zero, w_zero, bias = values
    if x.rank < 2 or w.rank < 2:
        raise NoKernelError("its operands are not matrices")
    if bias is not None and bias.rank > 1:
        raise NoKernelError("its bias differs from row to row")
    after = split(region).after
    require_elements(after.dtype)
    depth, columns = w.shape[-2:]
    # constants are packed before a zero point of the run is known: it is taken off row by row then
    is_late = known is not None and _number(x_zero) is None
    one_zero = x_zero is None or (x_zero.tensor.count == 1 and not is_late)
    extra = _number(w_zero) != (0 if w.dtype.is_signed else 128)
    has_sums = not one_zero and x_zero is not None
    numbers = best_qvalues(ctx.target, x.dtype.is_signed, _known(depth, 1), extra)
    point = _number(x_zero) if one_zero else None
    has_offset = bias is not None or numbers.shift != (0 if has_sums else point)
    numbers = replace(numbers, offset=has_offset)
    tile = qvalues_tile(ctx.target, _known(columns, USUAL), numbers)
    given = {"x_zero": x_zero if one_zero else None, "w_zero": w_zero, "bias": bias}
    makes = [("sums", has_sums), ("offset", has_offset), ("w_zero", extra)]
    made = tuple(name for name, is_made in makes if is_made)
    if known is not None and _is_known(given, made):
        packed = _Packed(*pack_constants(ctx, node, known, tile, numbers, given, made))
    else:
        packed = _pack(ctx, node, w, tile, numbers, given, made)
    shape = node.outputs[0].shape
    a = close(ctx, x)
    y = ctx.output(node.outputs[0], order_of(ctx, node.outputs[0]))
    others = operand_views(ctx, region, after.inputs, shape)
    zeros = [broadcast(ctx.view(x_zero), shape)] if has_sums else []
    outer = shape[:-2]
    a = broadcast(a, (*outer, *a.shape[-2:]))
    index = broadcast(packed.outer, outer)
    aligned = [
        replace(a, shape=shape, strides=(*a.strides[:-1], 0)),
        replace(index, shape=shape, strides=(*index.strides, 0, 0)),
        *(y, *zeros, *others),
    ]
    _call(ctx, node, aligned, packed, (tile, numbers), depth, after, len(zeros))


def _is_known(given: dict[str, Value | None], makes: tuple[str, ...]) -> bool:
    """Whether what the columns need to know is there when the program is made."""
    needed = given.values() if "offset" in makes else [given["w_zero"]]
    return all(v is None or constant_value(v) is not None for v in needed)


def _number(value: Value | None) -> int | None:
    """A zero point that is one known number; none is 0."""
    if value is None:
        return 0
    known = constant_value(value)
    return int(known.reshape(-1)[0]) if known is not None and known.size == 1 else None


def _known(size: Size, usual: int) -> int:
    return size if isinstance(size, int) else usual


def _pack(
    ctx: Lowering,
    node: Node,
    w: Value,
    tile: Tile,
    numbers: Int8Dot,
    given: dict[str, Value | None],
    makes: tuple[str, ...],
) -> _Packed:
    """The step that packs w."""
    view = ctx.view(w)
    by_rows = view.strides[-1] == 1 or view.shape[-1] == 1
    if not by_rows and view.strides[-2] != 1 and view.shape[-2] != 1:
        view, by_rows = ctx.contiguous(w), True
    outer, (depth, columns) = view.shape[:-2], view.shape[-2:]
    count = product(outer)
    panels = (columns + (tile.columns - 1)) // tile.columns
    steps = (depth + (numbers.group - 1)) // numbers.group
    room = count * panels * steps * (tile.columns * numbers.group)
    place = ctx.scratch(f"{node.name}.panels", "i8", room)
    facts = {made: ctx.scratch(f"{node.name}.{made}", "i32", count * columns) for made in makes}
    needed = {name: v for name, v in given.items() if v is not None and makes}
    shape = (*outer, columns)
    reads = Reads("r", [_spread(ctx.view(v), shape, name) for name, v in needed.items()])
    form = Panels(
        tile,
        numbers.group,
        w.dtype.is_signed,
        len(outer),
        by_rows,
        numbers.shift,
        makes,
        tuple(needed),
    )
    kernel = ctx.kernel(
        "code_panels", (form, reads.key), lambda m, name: emit_panels(m, name, form, reads)
    )
    pointers = {"w": view, "panels": place, **reads.pointers}
    pointers |= {f"{made}.made": facts[made] for made in makes}
    sizes: dict[str, Size] = {
        **{f"size{axis}": size for axis, size in enumerate(outer)},
        "columns": columns,
        "depth": depth,
        **{f"w.{axis}": stride for axis, stride in enumerate(view.strides[:-2])},
        "step": view.strides[-2 if by_rows else -1],
        **reads.sizes,
    }
    writes = ("panels", *(f"{made}.made" for made in makes))
    ctx.call(kernel, f"{node.name}.w", pointers, sizes, writes=writes)
    return _Packed(place, facts, contiguous(place.buffer, outer))


def _spread(view: View, shape: tuple[Size, ...], name: str) -> View:
    """A zero point or bias, for every column of every matrix."""
    if name == "w_zero" and len(view.shape) > 1:  # […, 1, n]
        kept = [axis for axis in range(len(view.shape)) if axis != len(view.shape) - 2]
        view = replace(
            view,
            shape=tuple(view.shape[axis] for axis in kept),
            strides=tuple(view.strides[axis] for axis in kept),
        )
    elif name == "x_zero":
        view = replace(view, shape=(1,), strides=(0,))
    return broadcast(view, shape)


def _call(
    ctx: Lowering,
    node: Node,
    aligned: Sequence[View],
    packed: _Packed,
    way: tuple[Tile, Int8Dot],
    depth: Size,
    after: Any,
    zeros: int,
) -> None:
    """The step that multiplies, over the fewest outer axes."""
    tile, numbers = way
    found = collapse(aligned, keep=1)
    if len(found[0].shape) == 1 or found[1].strides[-2] != 0:  # the rows share one matrix of w
        found = collapse(aligned, keep=2)
    a, index, y, *more = found
    if y.strides[-1] != 1 and y.shape[-1] != 1:
        raise NoKernelError("the result's columns do not lie side by side")
    outer = len(y.shape) - 2
    points, reads = Reads("z", more[:zeros]), Reads("e", more[zeros:])
    emitted: list[RunProduct] = []

    def values(f: emit.Kernel, value: Any, row: Any, column: Any, mask: Any) -> list[Any]:
        place = (*emitted[-1].outer, row)
        if zeros:
            at = emitted[-1].constants_at(column)
            sums = f.load(value.type, f.args.pointer("sums"), at, mask=mask)
            value = value - zero_of_row(f, points, place, tile.lanes) * sums
        return [value, *reads.at(f, place, tile.lanes).load(column, mask)]

    def finish(f: emit.Kernel, *place: Any) -> Any:
        return after.evaluate(f, values(f, *place), tile.lanes)

    def finish_wide(f: emit.Kernel, *place: Any) -> Any:
        return after.evaluate_wide(f, values(f, *place), tile.lanes)

    result: DType = after.dtype
    narrowest = min(d.bits for d in (result, *(view.dtype for view in reads.views)))
    pointers = {**points.pointers, **reads.pointers}
    if zeros:
        pointers["sums"] = packed.facts["sums"]
    strides: dict[str, Size] = {**points.sizes, **reads.sizes}
    slots = tuple(pointers), (*product_sizes(outer), *strides)
    wide = finish_wide if after.expression.narrows else None
    light = is_light(after.expression)
    epilogue = Epilogue(finish, *slots, light, result, narrowest, wide)

    def emit_product(module: emit.Module, name: str) -> emit.Signature:
        signature = emit.Signature(
            ("a", "w", "y", *numbers.pointers, *epilogue.pointers),
            ("rows", "columns", "depth", "y_stride", "block", *epilogue.sizes),
        )
        with module.kernel(name, signature) as f, f.subnormals_as_zeros():
            emitted.append(RunProduct(f, tile, epilogue, numbers, outer))
            emitted[-1].emit()
        return signature

    key = (tile, numbers, after.expression, reads.key, points.key, outer)
    kernel = ctx.kernel("product_codes", key, emit_product)
    pointers |= {"a": a, "w": packed.panels, "y": y}
    pointers |= {name: packed.facts[name] for name in numbers.pointers}
    sizes: dict[str, Size] = {
        "rows": y.shape[-2],
        "columns": y.shape[-1],
        "depth": depth,
        "y_stride": y.strides[-2],
        "block": row_tiles_in_cache(ctx.target, tile, _known(depth, USUAL)),
        **{f"size{axis}": size for axis, size in enumerate(y.shape[:-2])},
        **{f"a.{axis}": stride for axis, stride in enumerate(a.strides[:-1])},
        **{f"w.{axis}": stride for axis, stride in enumerate(index.strides[:-2])},
        **{f"y.{axis}": stride for axis, stride in enumerate(y.strides[:-2])},
        **strides,
    }
    ctx.call(kernel, node, pointers, sizes, why="8-bit codes of the run, summed in i32")
