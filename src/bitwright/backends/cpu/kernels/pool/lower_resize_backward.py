"""Lowering of resize_backward: resize with transposed tables of taps.

    dx[i] = sum over taps t of weight[t, i] * dy[place[t, i]]

The tables of an axis list the positions of dy that pixel i contributed to. They are constants, so
the resized axes have constant sizes. Their number of taps is the largest of all pixels; a weight of
0 fills the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.pool.lower_resize import MAX_TAPS
from bitwright.backends.cpu.kernels.pool.resize import emit_sums, sum_type
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import image_order
from bitwright.backends.cpu.lowering.region import require_elements
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, contiguous, row_major
from bitwright.ops.core.registry import get
from bitwright.ops.vision.resize import CROP, axis_taps, coordinates_on_axis, region_of

Array = np.ndarray[Any, Any]


@lowers("resize_backward")
def lower_resize_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    if len(list(node.operands)) > 1:
        raise NoKernelError("its scales or its region are data")
    (dy,) = node.operands
    dx = node.outputs[0]
    require_elements(dy.dtype)
    order = image_order(ctx.view(dy))
    matrices = {at: _transposed(node, dy.shape, dx.shape, axis) for at, axis in enumerate(order)}
    changed = [at for at, matrix in matrices.items() if matrix is not None]
    view, result = ctx.ordered(dy, order), ctx.output(dx, order)
    if not changed:
        ctx.copy(view, result, node.name)
        return
    found = {at: _sparse(matrix) for at, matrix in matrices.items() if matrix is not None}
    taps = max(len(places) for places, _ in found.values())
    groups = [changed]
    if changed != list(range(changed[0], changed[-1] + 1)) or taps ** len(changed) > MAX_TAPS:
        groups = [[at] for at in changed]
    shape = tuple(dy.shape[axis] for axis in order)
    for group in groups:
        first, stop = group[0], group[-1] + 1
        sizes = tuple(dx.shape[order[at]] if at in group else n for at, n in enumerate(shape))
        target = result
        if group is not groups[-1]:
            buffer = ctx.buffer(f"{node.name}.axis{first}", dy.dtype, product(sizes))
            target = contiguous(buffer, sizes)
        tables = [found[at] for at in group]
        before = (product(shape[:first]), *shape[first:stop], product(shape[stop:]))
        after = (product(sizes[:first]), *sizes[first:stop], product(sizes[stop:]))
        _sum(ctx, node, (view, target), before, after, tables)
        view, shape = target, sizes


def _transposed(
    node: Node, counts: Sequence[Size], sizes: Sequence[Size], axis: int
) -> Array | None:
    """The weights [position of dy, pixel of dx] of one axis; None if it stays as it is."""
    attrs = get(node.op).call_attrs(node.attrs)
    count, size = counts[axis], sizes[axis]
    scale = (attrs["scales"] or (None,) * len(sizes))[axis]
    is_cropped = attrs["coordinate_mode"] == CROP
    if not isinstance(count, int) or not isinstance(size, int):
        if count != size or scale not in (None, 1.0) or is_cropped:
            raise NoKernelError("the size of a resized axis is not constant")
        return None
    if not size or not count:
        raise NoKernelError("an axis is empty")
    starts, ends = region_of(len(sizes), None, attrs)
    mode = attrs["coordinate_mode"]
    places = coordinates_on_axis(mode, size, count, scale, starts[axis], ends[axis])
    taps = axis_taps(size, places, scale, attrs)
    if taps is None:
        return None
    index, weights = taps
    matrix = np.zeros((count, size))
    np.add.at(matrix, (np.arange(count)[:, None], index), 1.0 if weights is None else weights)
    if is_cropped:  # what lies outside x is a constant
        matrix[(places < 0) | (places > size - 1)] = 0
    return matrix


def _sparse(matrix: Array) -> tuple[Array, Array]:
    """Positions and weights [taps, pixels] of the nonzero weights, zeros at the end."""
    taps = max(1, int((matrix != 0).sum(axis=0).max()))
    rows = np.argsort(matrix == 0, axis=0, kind="stable")[:taps]
    return rows, np.take_along_axis(matrix, rows, axis=0)


def _sum(
    ctx: Lowering,
    node: Node,
    views: tuple[View, View],
    shape: tuple[Size, ...],
    sizes: tuple[Size, ...],
    tables: Sequence[tuple[Array, Array]],
) -> None:
    """dy and dx are [outer, resized axes, inner] in memory."""
    element = views[0].dtype
    weight = np.float64 if sum_type(element).bits == 64 else np.float32
    taps = max(len(places) for places, _ in tables)
    if taps > MAX_TAPS:
        raise NoKernelError(f"a pixel is part of {taps} others; at most {MAX_TAPS} are unrolled")
    rank, inner = len(tables), shape[-1]
    pointers = {"x": views[0], "y": views[1]}
    for axis, (places, weights) in enumerate(tables, 1):
        more = ((0, taps - len(places)), (0, 0))
        for name, array, kind in (("place", places, np.int32), ("weight", weights, weight)):
            table = np.pad(array, more).astype(kind)
            pointers[f"{name}{axis}"] = ctx.constant(table, f"{node.name}.{name}{axis}")
    key = rank, taps, element, inner != 1
    kernel = ctx.kernel(
        f"resize_backward_{element}", key, lambda module, name: emit_sums(module, name, *key)
    )
    slots: dict[str, Size] = {f"n{axis}": size for axis, size in enumerate(sizes[:-1])}
    slots |= {f"s{axis}": stride for axis, stride in enumerate(row_major(shape)[:-1])}
    slots["inner"] = inner
    wanted = {slot.name for slot in kernel.signature.slots}
    ctx.call(kernel, node, pointers, {name: s for name, s in slots.items() if name in wanted})
