"""Matmuls of two operands known at run time, and convolutions by im2col.

    matmul           batch axes are broadcast by strides of 0
    conv             the windows of the padded image are copied (im2col), then multiplied
    conv_transpose   a convolution of the dilated image with the flipped filter

They support any element type and number of axes, and are the fallback where the packed kernels of
`kernels.matmul.lower_matmul` and `kernels.conv.lower_conv` do not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.kernels.matmul import batched
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.lowering import region as regions
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, contiguous


@dataclass(frozen=True)
class Operands:
    """The operands of a product: a[*outer, k], w[*outer, k, n], y and epilogue operands [*outer,
    n].

    The last axis of `outer` is the rows, on which w has stride 0.
    """

    a: View
    w: View
    y: View
    extra: Sequence[View]


def lower_batched_matmul(ctx: Lowering, node: Node, region: RegionView) -> None:
    """Lowers a matmul of any two operands."""
    anchor = region.anchor
    assert anchor is not None and anchor.inputs[0] is not None and anchor.inputs[1] is not None
    regions.require_elements(anchor.inputs[0].dtype, anchor.inputs[1].dtype)
    after = regions.split(region).after
    regions.require_elements(after.dtype)
    a = ctx.view(region.outer(anchor.inputs[0]))
    w = ctx.view(region.outer(anchor.inputs[1]))
    y = ctx.output(node.outputs[0])
    extra = regions.operand_views(ctx, region, after.inputs, node.outputs[0].shape)
    is_row, is_column = len(a.shape) == 1, len(w.shape) == 1
    if is_column:
        w = _insert_axis(w, 1)
        y, *extra = (_insert_axis(v, len(v.shape)) for v in (y, *extra))
    if is_row:
        a = _insert_axis(a, 0)
        y, *extra = (_insert_axis(v, len(v.shape) - 1) for v in (y, *extra))
    if w.strides[-1] != 1 and w.shape[-1] != 1:
        w = ctx.packed(w, f"{node.name}.w")
    outer = y.shape[:-1]
    a = regions.broadcast(a, (*outer, a.shape[-1]))
    w = regions.broadcast(w, (*outer[:-1], *w.shape[-2:]))
    w = replace(w, shape=(*outer, *w.shape[-2:]), strides=(*w.strides[:-2], 0, *w.strides[-2:]))
    operands, why = Operands(a, w, y, extra), "neither operand is constant"
    call_product(ctx, node, operands, after, anchor.outputs[0].dtype, why)


def lower_im2col(ctx: Lowering, node: Node, region: RegionView) -> None:
    """Lowers a convolution of any element type, number of axes and filter."""
    anchor = region.anchor
    assert anchor is not None and anchor.inputs[0] is not None and anchor.inputs[1] is not None
    x, w = region.outer(anchor.inputs[0]), region.outer(anchor.inputs[1])
    rank = x.rank - 2
    geometry = Geometry(*strides_dilations_pads(anchor, rank), (1,) * rank)
    _convolve(ctx, node, region, ctx.view(x), ctx.view(w), geometry)


def lower_transposed_im2col(ctx: Lowering, node: Node, region: RegionView) -> None:
    """Lowers a transposed convolution: the image is dilated by `stride`, then convolved."""
    anchor = region.anchor
    assert anchor is not None and anchor.inputs[0] is not None and anchor.inputs[1] is not None
    x, w = region.outer(anchor.inputs[0]), ctx.view(region.outer(anchor.inputs[1]))
    rank, attrs = x.rank - 2, anchor.attrs
    strides, dilations, pads = strides_dilations_pads(anchor, rank)
    more: Sequence[Size] = attrs.get("output_padding") or (0,) * rank
    if "shape" in attrs:  # conv_backward_input: pixels behind the last window
        sizes, extents = (
            attrs["shape"][2:],
            [
                (w.shape[2 + i] - 1) * dilations[i] + 1 - pads[i] - pads[rank + i]
                for i in range(rank)
            ],
        )
        more = [sizes[i] - (x.shape[2 + i] - 1) * strides[i] - extents[i] for i in range(rank)]
    groups = attrs["groups"]
    # w[C, M/g, *k], flipped on the spatial axes, as w[M, C/g, *k] of each group
    for axis in range(2, rank + 2):
        w = w.slice(axis, w.shape[axis] - 1, w.shape[axis], -1)
    grouped = _split_axis(w, 0, groups)
    perm = (0, 2, 1, *range(3, rank + 3))
    transposed = ctx.packed(grouped.transpose(perm), f"{node.name}.w")
    shape = (groups * w.shape[1], transposed.shape[2], *w.shape[2:])
    transposed = transposed.relabel(shape)
    extent = [(w.shape[2 + i] - 1) * dilations[i] for i in range(rank)]
    begins = [extent[i] - pads[i] for i in range(rank)]
    ends = [extent[i] - pads[rank + i] + more[i] for i in range(rank)]
    if any(isinstance(p, int) and p < 0 for p in (*begins, *ends)):
        raise NoKernelError("its padding exceeds the extent of the filter")
    geometry = Geometry((1,) * rank, dilations, (*begins, *ends), strides)
    _convolve(ctx, node, region, ctx.view(x), transposed, geometry)


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution; `lhs_dilation` dilates the image."""

    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[Size]
    lhs_dilation: Sequence[int]


def _convolve(
    ctx: Lowering, node: Node, region: RegionView, x: View, w: View, geometry: Geometry
) -> None:
    anchor = region.anchor
    assert anchor is not None
    regions.require_elements(x.dtype, w.dtype)
    after = regions.split(region).after
    regions.require_elements(after.dtype)
    rank, groups = len(x.shape) - 2, anchor.attrs["groups"]
    if len(anchor.inputs) > 2 and anchor.inputs[2] is not None:
        raise NoKernelError("its bias is not a separate addition")
    result = node.outputs[0]
    order = (0, *range(2, rank + 2), 1)
    y = ctx.output(result, order)
    extra = regions.operand_views(ctx, region, after.inputs, result.shape)
    image = _split_axis(_pad(ctx, node, x, geometry), 1, groups)
    # a[g, n, *out, c, *k]: the elements of a window are contiguous in the copy
    spatial = range(rank)
    sizes, moves = image.shape, image.strides
    windows = View(
        image.buffer,
        image.offset,
        (sizes[1], sizes[0], *result.shape[2:], sizes[2], *w.shape[2:]),
        (
            *(moves[1], moves[0]),
            *(moves[3 + i] * geometry.strides[i] for i in spatial),
            moves[2],
            *(moves[3 + i] * geometry.dilations[i] for i in spatial),
        ),
    )
    depth = product(windows.shape[rank + 2 :])
    copied = ctx.packed(windows, f"{node.name}.windows")
    a = copied.relabel((*windows.shape[: rank + 2], depth))
    # w[g, k, m] with contiguous columns
    filters = _split_axis(w, 0, groups)
    transposed = filters.transpose((0, *range(2, rank + 3), 1))
    panel = ctx.packed(transposed, f"{node.name}.panel")
    columns = panel.shape[-1]
    flat = panel.relabel((groups, depth, columns))
    outer = a.shape[:-1]
    zeros = (0,) * (len(outer) - 1)
    matrix = View(
        flat.buffer,
        flat.offset,
        (*outer, depth, columns),
        (flat.strides[0], *zeros, *flat.strides[1:]),
    )
    perm = (1, 0, *range(3, rank + 3), 2)
    parts = [_split_axis(v, 1, groups).transpose(perm) for v in (y, *extra)]
    operands = Operands(a, matrix, parts[0], parts[1:])
    call_product(
        ctx, node, operands, after, anchor.outputs[0].dtype, "im2col, then a batched matmul"
    )


def _pad(ctx: Lowering, node: Node, x: View, geometry: Geometry) -> View:
    """The image, dilated and padded with zeros."""
    rank = len(x.shape) - 2
    if all(pad == 0 for pad in geometry.pads) and all(step == 1 for step in geometry.lhs_dilation):
        return x
    inner = [(x.shape[2 + i] - 1) * geometry.lhs_dilation[i] + 1 for i in range(rank)]
    shape = (
        *x.shape[:2],
        *(inner[i] + geometry.pads[i] + geometry.pads[rank + i] for i in range(rank)),
    )
    around = contiguous(ctx.buffer(f"{node.name}.padded", x.dtype, product(shape)), shape)
    zero = ctx.constant(np.zeros((), x.dtype.numpy), f"{node.name}.zero")
    ctx.copy(zero.expand(shape), around, node.name)
    inside = around
    for i in range(rank):
        inside = inside.slice(2 + i, geometry.pads[i], x.shape[2 + i], geometry.lhs_dilation[i])
    ctx.copy(x, inside, node.name)
    return around


def strides_dilations_pads(anchor: Node, rank: int) -> tuple[Any, Any, Any]:
    """The attributes of a convolution with `rank` spatial axes, or their defaults."""
    defaults = {"strides": (1,) * rank, "dilations": (1,) * rank, "pads": (0,) * (2 * rank)}
    strides, dilations, pads = (anchor.attrs.get(name) or d for name, d in defaults.items())
    return strides, dilations, pads


def _insert_axis(view: View, axis: int) -> View:
    """The view with an additional axis of size 1."""
    return replace(
        view,
        shape=(*view.shape[:axis], 1, *view.shape[axis:]),
        strides=(*view.strides[:axis], 1, *view.strides[axis:]),
    )


def _split_axis(view: View, axis: int, groups: int) -> View:
    """[…, groups · c, …] as […, groups, c, …]."""
    size, stride = view.shape[axis], view.strides[axis]
    each = size // groups
    return replace(
        view,
        shape=(*view.shape[:axis], groups, each, *view.shape[axis + 1 :]),
        strides=(*view.strides[:axis], stride * each, stride, *view.strides[axis + 1 :]),
    )


def call_product(
    ctx: Lowering, node: Node, operands: Operands, after: regions.Part, total: DType, why: str
) -> None:
    """Calls the kernel over the fewest outer axes; the last of them is the rows."""
    a, w, y = operands.a, operands.w, operands.y
    columns, depth = y.shape[-1], a.shape[-1]
    rest = w.strides[:-2]
    aligned = [
        replace(a, shape=y.shape, strides=(*a.strides[:-1], 0)),
        replace(w, shape=y.shape, strides=(*rest, w.strides[-1])),
        y,
        *operands.extra,
    ]
    found = regions.collapse(aligned, keep=1)
    if len(found[0].shape) == 1 or found[1].strides[-2] != 0:  # rows share one matrix
        found = [_insert_axis(v, len(v.shape) - 1) for v in found]
        found[1] = replace(found[1], strides=(*found[1].strides[:-2], 0, found[1].strides[-1]))
    x_, w_, y_, *extra = found
    if y_.strides[-1] != 1 and columns != 1:
        raise NoKernelError("the columns of its result are not contiguous")
    reads = regions.Reads("e", extra)
    vectors, lanes = batched.tile_of(ctx.target, total, columns)
    form = batched.Form(len(x_.shape) - 2, a.dtype, w.dtype, total, y.dtype, vectors, lanes)

    def finish(
        f: emit.Kernel,
        value: emit.Value,
        place: Sequence[emit.Value],
        column: emit.Value,
        mask: emit.Value,
    ) -> emit.Value:
        values = reads.at(f, place, lanes).load(column, mask)
        return after.evaluate(f, [value, *values], lanes)

    kernel = ctx.kernel(
        f"batched_matmul_{type_names(a.dtype, w.dtype, total)}",
        (form, after.expression, reads.key),
        lambda m, name: batched.emit_product(
            m,
            name,
            form,
            batched.BatchedEpilogue(finish, tuple(reads.pointers), tuple(reads.sizes)),
        ),
    )
    sizes: dict[str, Size] = {
        **{f"size{axis}": size for axis, size in enumerate(x_.shape[:-2])},
        "rows": x_.shape[-2],
        "columns": columns,
        "depth": depth,
        **{f"a.{axis}": stride for axis, stride in enumerate(x_.strides[:-1])},
        **{f"y.{axis}": stride for axis, stride in enumerate(y_.strides[:-1])},
        **{f"w.{axis}": stride for axis, stride in enumerate(w_.strides[:-2])},
        "a_k": a.strides[-1],
        "w_k": w.strides[-2],
        **reads.sizes,
    }
    ctx.call(kernel, node, {"a": x_, "w": w_, "y": y_, **reads.pointers}, sizes, why=why)
