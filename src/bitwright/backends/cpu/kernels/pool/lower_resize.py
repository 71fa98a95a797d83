"""Lowering of resize: tables of taps for the resized axes, then one pass over the result.

With data-dependent sizes any axis may be resized; the axes are then processed one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.movement.lower_gather import byte_width
from bitwright.backends.cpu.kernels.pool.resize import (
    Grid,
    emit_nearest,
    emit_sums,
    emit_table,
    sum_type,
)
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.errors import RunError
from bitwright.ir.dim import Size, evaluate, product
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View, contiguous, row_major
from bitwright.ops.vision.resize import CROP, scaled_size

Array = np.ndarray[Any, Any]
MAX_TAPS = 64
"""The most unrolled taps of all axes together: 4 for each of three axes."""


@lowers("resize")
def lower_resize(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    _require(node, x)
    if node.attrs.get("sizes") is None:
        _axis_by_axis(ctx, node, x)
        return
    view = ctx.view(x)
    order = image_order(view)
    shape, sizes = [x.shape[axis] for axis in order], [y.shape[axis] for axis in order]
    scales = node.attrs.get("scales") or (None,) * x.rank
    changed = [
        at
        for at, axis in enumerate(order)
        if shape[at] != sizes[at] or scales[axis] not in (None, 1.0)
    ]
    if not changed:
        ctx.copy(view, ctx.output(y), node.name)
        return
    first, last = changed[0], changed[-1] + 1
    if _grid(node, None).taps ** (last - first) > MAX_TAPS:
        _each_axis(ctx, node, x, scales, order, changed)
        return
    _resample(
        ctx,
        node,
        (ctx.ordered(x, order), ctx.output(y, order)),
        (product(shape[:first]), *shape[first:last], product(shape[last:])),
        (product(sizes[:first]), *sizes[first:last], product(sizes[last:])),
        [_grid(node, scales[axis]) for axis in order[first:last]],
    )


def _require(node: Node, x: Value) -> None:
    attrs = node.attrs
    if attrs["coordinate_mode"] == CROP or attrs["antialias"]:
        raise NoKernelError("there is no kernel for crops and antialiasing")
    if attrs["mode"] != "nearest":
        require_elements(x.dtype)
        if x.dtype.is_integer and x.dtype.bits > 32:
            raise NoKernelError(f"sums of {x.dtype} do not fit a float")


def _axis_by_axis(ctx: Lowering, node: Node, x: Value) -> None:
    """Read the sizes, then resize one axis after another."""
    wanted, scales = (*node.inputs[1:], None, None)[:2]
    if scales is not None and scales.dtype != f32:
        raise NoKernelError(f"there is no kernel for scales of {scales.dtype}")

    def read(arrays: Sequence[Array], bindings: Mapping[str, int]) -> list[int]:
        if wanted is not None:
            found = [int(size) for size in arrays[0]]
        else:
            shape = x.tensor.concrete(bindings)
            pairs = zip(shape, arrays[0].tolist(), strict=True)
            found = [evaluate(scaled_size(size, scale), bindings) for size, scale in pairs]
        if min(found, default=0) < 0:
            raise RunError("a size would be negative", found=found)
        return found

    operand = wanted if wanted is not None else scales
    assert operand is not None
    ctx.read_sizes(node, [operand], node.outputs[0].shape, read)
    known = None if scales is None else ctx.contiguous(scales)
    _each_axis(ctx, node, x, known, range(x.rank), range(x.rank))


def _each_axis(
    ctx: Lowering,
    node: Node,
    x: Value,
    scales: Sequence[float | None] | View | None,
    order: Sequence[int],
    changed: Sequence[int],
) -> None:
    """Append a step per resized axis, in memory order; `scales` are constants or a view."""
    if x.dtype.is_integer and node.attrs["mode"] != "nearest":
        raise NoKernelError("integers must be rounded once for all axes, not axis by axis")
    shape = tuple(x.shape[axis] for axis in order)
    view, result = ctx.ordered(x, order), ctx.output(node.outputs[0], order)
    for at in changed:
        axis = order[at]
        size = node.outputs[0].shape[axis]
        after = (*shape[:at], size, *shape[at + 1 :])
        target = result
        if at != changed[-1]:
            buffer = ctx.buffer(f"{node.name}.axis{axis}", x.dtype, product(after))
            target = contiguous(buffer, after)
        outer, inner = product(shape[:at]), product(shape[at + 1 :])
        in_memory = scales.slice(0, axis, 1, 1) if isinstance(scales, View) else None
        known = None if scales is None or isinstance(scales, View) else scales[axis]
        _resample(
            ctx,
            node,
            (view, target),
            (outer, shape[at], inner),
            (outer, size, inner),
            [_grid(node, known, in_memory is not None)],
            in_memory,
        )
        view, shape = target, after


def _grid(node: Node, scale: float | None, is_data: bool = False) -> Grid:
    attrs = node.attrs
    modes = attrs["mode"], attrs["coordinate_mode"], attrs["nearest_mode"]
    return Grid(*modes, attrs["cubic_coeff_a"], attrs["exclude_outside"], scale, is_data)


def _resample(
    ctx: Lowering,
    node: Node,
    views: tuple[View, View],
    shape: tuple[Size, ...],
    sizes: tuple[Size, ...],
    grids: Sequence[Grid],
    scale: View | None = None,
) -> None:
    """x and y are [outer, resized axes, inner] in memory."""
    x = node.inputs[0]
    assert x is not None
    rank, inner, width = len(grids), shape[-1], byte_width(x.dtype)
    pointers = {"x": views[0], "y": views[1]}
    for axis, grid in enumerate(grids, 1):
        pointers |= _table(ctx, node, grid, axis, shape[axis], sizes[axis], scale)
    slots: dict[str, Size] = {f"n{axis}": size for axis, size in enumerate(sizes[:-1])}
    strides = row_major(shape)[:-1]
    if grid.taps == 1:
        element = width if inner == 1 and width <= 8 else 0
        key = rank, element
        family = f"resize_nearest_{8 * element}bit" if element else "resize_nearest_slices"
        kernel = ctx.kernel(family, key, lambda m, name: emit_nearest(m, name, *key))
        scale_by = 1 if element else width
        slots |= {f"s{axis}": stride * scale_by for axis, stride in enumerate(strides)}
        if not element:
            slots["bytes"] = inner * width
    else:
        spec = rank, grid.taps, x.dtype, inner != 1
        family = f"resize_{grid.mode}_{x.dtype}"
        kernel = ctx.kernel(family, spec, lambda m, name: emit_sums(m, name, *spec))
        slots |= {f"s{axis}": stride for axis, stride in enumerate(strides)}
        if inner != 1:
            slots["inner"] = inner
    wanted = {slot.name for slot in kernel.signature.slots}
    ctx.call(kernel, node, pointers, {name: s for name, s in slots.items() if name in wanted})


def _table(
    ctx: Lowering, node: Node, grid: Grid, axis: int, size: Size, count: Size, scale: View | None
) -> dict[str, View]:
    """Append the call that fills the table of one axis; return its views."""
    assert node.inputs[0] is not None
    weight = sum_type(node.inputs[0].dtype)
    kernel = ctx.kernel(
        f"resize_taps_{grid.mode}_{weight.mangled}",
        (grid, weight.mangled),
        lambda m, name: emit_table(m, name, grid, weight),
    )
    name = f"{node.name}.{axis}"
    tables = {"place": ctx.scratch(f"{name}.places", "i32", count * grid.taps)}
    if grid.taps > 1:
        tables["weight"] = ctx.scratch(f"{name}.weights", weight.mangled, count * grid.taps)
    sizes = {"size": size, "count": count, "node": ctx.number(node)}
    pointers = {**tables, "fault": ctx.fault()} | ({} if scale is None else {"scale": scale})
    ctx.call(kernel, node, pointers, sizes, writes=tuple(tables))
    return {f"{table}{axis}": view for table, view in tables.items()}
