"""Lowering of scatters: the result starts as a copy of x.

A state that the result replaces at the end of the run is updated in place.
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.cpu.kernels.movement import lower_gather, scatter
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import collapse, require_elements
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import DType, bool_, dtype
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.lir.buffer import View, row_major


def _start(ctx: Lowering, node: Node) -> View:
    """The result's memory, initialized with x."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    becomes = dict(ctx.graph.updates).get(x)
    if becomes is y and ctx.graph.uses[x] == 1:
        ctx.alias(y, ctx.view(x))
        return ctx.view(x)
    target = ctx.output(y)
    ctx.copy(ctx.view(x), target, node.name)
    return target


def _element(value: Value, reduction: str) -> DType:
    """The element type of the kernel: an unsigned type of the width if it only copies."""
    if reduction == "none":
        return dtype(f"u{8 * lower_gather.word_width(value.dtype)}")
    require_elements(value.dtype)
    if value.dtype == bool_:
        raise NoKernelError("there is no kernel for reductions of booleans")
    return value.dtype


@lowers("scatter_nd")
def lower_scatter_nd(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, indices, updates = node.operands
    reduction = node.attrs["reduction"]
    count = int(indices.shape[-1])
    key = count, lower_gather.index_type(indices), _element(x, reduction), reduction
    family = f"scatter_nd_{reduction}_{key[2]}_{key[1]}"
    kernel = ctx.kernel(family, key, lambda module, name: scatter.emit_scatter(module, name, *key))
    y = _start(ctx, node)
    sizes: dict[str, Size] = {"m": product(indices.shape[:-1]), "columns": product(x.shape[count:])}
    for j in range(count):
        sizes |= {f"n{j}": y.shape[j], f"s{j}": y.strides[j]}
    sizes["node"] = ctx.number(node)
    pointers = {"y": y, "i": ctx.contiguous(indices), "u": ctx.contiguous(updates)}
    ctx.call(kernel, node, {**pointers, "fault": ctx.fault()}, sizes)


@lowers("scatter_elements")
def lower_scatter_elements(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, indices, updates = node.operands
    reduction = node.attrs["reduction"]
    axis = normalize_axis(node.attrs["axis"], x.rank)
    others = [at for at in range(x.rank) if at != axis]
    index, element = lower_gather.index_type(indices), _element(x, reduction)
    y = _start(ctx, node)
    order = [*others, axis]
    views = [replace(v, shape=indices.shape) for v in (ctx.view(indices), ctx.view(updates), y)]
    views = collapse([view.transpose(order) for view in views], keep=1)
    if len(views[0].shape) == 1:
        views = [replace(v, shape=(1, *v.shape), strides=(0, *v.strides)) for v in views]
    key = len(views[0].shape), index, element, reduction
    family = f"scatter_elements_{reduction}_{element}_{index}"
    kernel = ctx.kernel(
        family, key, lambda module, name: scatter.emit_scatter_elements(module, name, *key)
    )
    sizes: dict[str, Size] = {f"n{at}": size for at, size in enumerate(views[0].shape)}
    pointers = dict(zip("iuy", views, strict=True))
    for operand, view in pointers.items():
        sizes |= {f"{operand}{at}": stride for at, stride in enumerate(view.strides)}
    sizes |= {"size": x.shape[axis], "node": ctx.number(node)}
    ctx.call(kernel, node, {**pointers, "fault": ctx.fault()}, sizes)


@lowers("tensor_scatter")
def lower_tensor_scatter(ctx: Lowering, node: Node, region: RegionView) -> None:
    past, update, *rest = node.operands
    axis = normalize_axis(node.attrs["axis"], past.rank)
    index = lower_gather.index_type(rest[0]) if rest else None
    rows = (past.shape[0], product(past.shape[1:axis]))
    inner, width = product(past.shape[axis + 1 :]), lower_gather.byte_width(past.dtype)
    shape = (*rows, update.shape[axis], inner)
    given = lower_gather.grouped(ctx, update, shape)
    room = (*rows, past.shape[axis], inner)
    y = replace(_start(ctx, node), shape=room, strides=row_major(room))
    key = index, node.attrs["mode"]
    kernel = ctx.kernel(
        "tensor_scatter", key, lambda module, name: scatter.emit_tensor_scatter(module, name, *key)
    )
    sizes: dict[str, Size] = dict(zip("bmc", shape, strict=False))
    sizes |= {"bytes": inner * width, "room": past.shape[axis], "node": ctx.number(node)}
    for operand, view in (("y", y), ("u", given)):
        pairs = zip("bmc", view.strides, strict=False)
        sizes |= {f"{operand}{letter}": stride * width for letter, stride in pairs}
    pointers = {"y": y, "u": given, "fault": ctx.fault()}
    if rest:
        pointers["i"] = ctx.contiguous(rest[0])
    ctx.call(kernel, node, pointers, sizes)
