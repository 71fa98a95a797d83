"""The lowering of resize: tables for the axes that change, then one pass over the result."""

from __future__ import annotations

from bitwright.backends.cpu.kernels.resize import (
    Grid,
    emit_nearest,
    emit_sums,
    emit_table,
    sum_type,
)
from bitwright.backends.cpu.lower.gather import byte_width
from bitwright.backends.cpu.lower.layout import image_order
from bitwright.backends.cpu.lowering import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.region import require_elements
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View, row_major
from bitwright.ops.resize import CROP


@lowers("resize")
def lower_resize(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    _require(node, x)
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
    _resample(
        ctx,
        node,
        order,
        (product(shape[:first]), *shape[first:last], product(shape[last:])),
        (product(sizes[:first]), *sizes[first:last], product(sizes[last:])),
        [scales[axis] for axis in order[first:last]],
    )


def _require(node: Node, x: Value) -> None:
    attrs = node.attrs
    if attrs.get("sizes") is None:
        raise NoKernelError("only the data decides the sizes")
    if attrs["coordinate_mode"] == CROP or attrs["antialias"]:
        raise NoKernelError("crops and antialiasing have no kernel")
    if attrs["mode"] != "nearest":
        require_elements(x.dtype)
        if x.dtype.is_integer and x.dtype.bits > 32:
            raise NoKernelError(f"sums of {x.dtype} do not fit a float")


def _resample(
    ctx: Lowering,
    node: Node,
    order: tuple[int, ...],
    shape: tuple[Size, ...],
    sizes: tuple[Size, ...],
    scales: list[float | None],
) -> None:
    """x and y are [outer, axes that change, inner] in memory."""
    x, attrs = node.inputs[0], node.attrs
    assert x is not None
    rank, inner, width = len(scales), shape[-1], byte_width(x.dtype)
    pointers = {"x": ctx.ordered(x, order)}
    for axis, scale in enumerate(scales, 1):
        grid = Grid(
            attrs["mode"],
            attrs["coordinate_mode"],
            attrs["nearest_mode"],
            attrs["cubic_coeff_a"],
            attrs["exclude_outside"],
            scale,
        )
        pointers |= _table(ctx, node, grid, axis, shape[axis], sizes[axis])
    pointers["y"] = ctx.output(node.outputs[0], order)
    slots: dict[str, Size] = {f"n{axis}": size for axis, size in enumerate(sizes[:-1])}
    strides = row_major(shape)[:-1]
    if grid.taps == 1:
        element = width if inner == 1 and width <= 8 else 0
        key = rank, element
        kernel = ctx.kernel("resize_nearest", key, lambda m, name: emit_nearest(m, name, *key))
        scale_by = 1 if element else width
        slots |= {f"s{axis}": stride * scale_by for axis, stride in enumerate(strides)}
        if not element:
            slots["bytes"] = inner * width
    else:
        spec = rank, grid.taps, x.dtype, inner != 1
        kernel = ctx.kernel("resize", spec, lambda m, name: emit_sums(m, name, *spec))
        slots |= {f"s{axis}": stride for axis, stride in enumerate(strides)}
        if inner != 1:
            slots["inner"] = inner
    wanted = {slot.name for slot in kernel.signature.slots}
    ctx.call(kernel, node, pointers, {name: s for name, s in slots.items() if name in wanted})


def _table(
    ctx: Lowering, node: Node, grid: Grid, axis: int, size: Size, count: Size
) -> dict[str, View]:
    """The step that fills the table of one axis, and where it lies."""
    assert node.inputs[0] is not None
    weight = sum_type(node.inputs[0].dtype)
    kernel = ctx.kernel(
        "resize_table", (grid, weight.mangled), lambda m, name: emit_table(m, name, grid, weight)
    )
    name = f"{node.name}.{axis}"
    tables = {"place": ctx.scratch(f"{name}.places", "i32", count * grid.taps)}
    if grid.taps > 1:
        tables["weight"] = ctx.scratch(f"{name}.weights", weight.mangled, count * grid.taps)
    sizes = {"size": size, "count": count, "node": ctx.number(node)}
    ctx.call(kernel, node, {**tables, "fault": ctx.fault()}, sizes, writes=tuple(tables))
    return {f"{table}{axis}": view for table, view in tables.items()}
