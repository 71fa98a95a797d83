"""Lowering of gathers; a constant scalar index gives a view."""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.cpu.kernels.movement.gather import emit_gather, emit_gather_elements
from bitwright.backends.cpu.lowering.context import (
    VIEWS,
    Lowering,
    NoKernelError,
    RegionView,
    lowers,
)
from bitwright.backends.cpu.lowering.region import collapse
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View, row_major


def index_type(value: Value) -> DType:
    """The element type of indices, which must be an integer type of 8 to 64 bits."""
    if not value.dtype.is_integer or value.dtype.bits < 8:
        raise NoKernelError(f"indices of type {value.dtype}")
    return value.dtype


def byte_width(element: DType) -> int:
    return element.numpy.itemsize


def word_width(element: DType) -> int:
    """Bytes of an element that is copied individually, at most 8."""
    if byte_width(element) > 8:
        raise NoKernelError(f"elements of type {element} are wider than a register")
    return byte_width(element)


def grouped(ctx: Lowering, value: Value, shape: tuple[Size, ...]) -> View:
    """The value with merged axes and a contiguous last axis; copied if necessary."""
    view = ctx.view(value).reshape(shape)
    if view is not None and (view.strides[-1] == 1 or shape[-1] == 1):
        return view
    return replace(ctx.contiguous(value), shape=shape, strides=row_major(shape))


def _gather_view(ctx: Lowering, node: Node) -> tuple[View, ...] | None:
    """The slice at a constant in-range index as a view, else None."""
    x, indices = node.operands
    if not indices.is_constant or indices.rank:
        return None
    axis = normalize_axis(node.attrs["axis"], x.rank)
    size, place = x.shape[axis], int(indices.node.attrs["value"])
    if not isinstance(size, int) or not -size <= place < size:
        return None
    view = ctx.view(x).slice(axis, place % size, 1, 1)
    kept = [at for at in range(x.rank) if at != axis]
    return (
        replace(
            view,
            shape=tuple(view.shape[at] for at in kept),
            strides=tuple(view.strides[at] for at in kept),
        ),
    )


VIEWS["gather"] = _gather_view


@lowers("gather")
def lower_gather(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, indices = node.operands
    axis = normalize_axis(node.attrs["axis"], x.rank)
    batches, inner = product(x.shape[:axis]), product(x.shape[axis + 1 :])
    view = grouped(ctx, x, (batches, x.shape[axis], inner))
    _gather(ctx, node, view, indices, 1, (batches, product(indices.shape), 0), inner)


@lowers("gather_nd")
def lower_gather_nd(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, indices = node.operands
    first = node.attrs["batch_dims"]
    count = int(indices.shape[-1])
    inner = product(x.shape[first + count :])
    batches, rows = product(x.shape[:first]), product(indices.shape[first:-1])
    view = grouped(ctx, x, (batches, *x.shape[first : first + count], inner))
    _gather(ctx, node, view, indices, count, (batches, rows, rows * count), inner)


def _gather(
    ctx: Lowering,
    node: Node,
    x: View,
    indices: Value,
    count: int,
    work: tuple[Size, Size, Size],
    inner: Size,
) -> None:
    """x is [batches, one axis per index, inner]; `work` is (batches, tuples, indices per batch)."""
    index = index_type(indices)
    element = byte_width(x.dtype)
    width = element if inner == 1 and element <= 8 else 0
    scale = 1 if width else element
    key = count, index, width
    family = f"gather_{8 * width}bit_{index}" if width else f"gather_slices_{index}"
    kernel = ctx.kernel(family, key, lambda module, name: emit_gather(module, name, *key))
    sizes: dict[str, Size] = {"b": work[0], "m": work[1], "i_b": work[2]}
    sizes |= {"x_b": x.strides[0] * scale, "node": ctx.number(node)}
    for j in range(count):
        sizes |= {f"n{j}": x.shape[1 + j], f"s{j}": x.strides[1 + j] * scale}
    if not width:
        sizes["bytes"] = inner * element
    pointers = {"x": x, "i": ctx.contiguous(indices), "y": ctx.output(node.outputs[0])}
    ctx.call(kernel, node, {**pointers, "fault": ctx.fault()}, sizes)


@lowers("gather_elements")
def lower_gather_elements(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, indices = node.operands
    index, width = index_type(indices), word_width(x.dtype)
    axis = normalize_axis(node.attrs["axis"], x.rank)
    source, y = ctx.view(x), ctx.output(node.outputs[0])
    along = replace(
        source,
        shape=y.shape,
        strides=tuple(0 if at == axis else s for at, s in enumerate(source.strides)),
    )
    views = dict(zip("xiy", collapse([along, ctx.view(indices), y], keep=1), strict=True))
    rank = len(views["y"].shape)
    key = rank, index, width
    family = f"gather_elements_{8 * width}bit_{index}"
    kernel = ctx.kernel(family, key, lambda module, name: emit_gather_elements(module, name, *key))
    sizes: dict[str, Size] = {"size": x.shape[axis], "stride": source.strides[axis]}
    sizes |= {f"n{at}": size for at, size in enumerate(views["y"].shape)}
    for operand, view in views.items():
        sizes |= {f"{operand}{at}": stride for at, stride in enumerate(view.strides)}
    sizes["node"] = ctx.number(node)
    ctx.call(kernel, node, {**views, "fault": ctx.fault()}, sizes)
