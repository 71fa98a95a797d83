"""Lowering of movement ops whose results are views of their operands."""

from __future__ import annotations

from dataclasses import replace

from bitwright.backends.cpu.lowering.context import VIEWS, Lowering
from bitwright.backends.cpu.lowering.region import broadcast
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, row_major


def _reshape(ctx: Lowering, node: Node) -> tuple[View, ...] | None:
    """A view; x is copied first if its strides do not allow the new shape."""
    x = node.inputs[0]
    if len(node.inputs) != 1 or x is None:
        return None
    shape = node.outputs[0].shape
    view = ctx.view(x).reshape(shape)
    if view is None:  # equal element counts are checked when sizes are known
        view = replace(ctx.contiguous(x), shape=shape, strides=row_major(shape))
    return (view,)


def _expand(ctx: Lowering, node: Node) -> tuple[View, ...] | None:
    x = node.inputs[0]
    if len(node.inputs) != 1 or x is None:
        return None
    return (broadcast(ctx.view(x), node.outputs[0].shape),)


def _slice(ctx: Lowering, node: Node) -> tuple[View, ...] | None:
    x = node.inputs[0]
    if len(node.inputs) != 1 or x is None:
        return None
    attrs = node.attrs
    view = ctx.view(x)
    for axis, start, step in zip(attrs["axes"], attrs["starts"], attrs["steps"], strict=True):
        axis %= len(view.shape)
        view = view.slice(axis, start, node.outputs[0].shape[axis], step)
    return (view,)


def _split(ctx: Lowering, node: Node) -> tuple[View, ...] | None:
    (x,) = node.operands
    view = ctx.view(x)
    axis = node.attrs["axis"] % len(view.shape)
    start, views = 0, []
    for size in node.attrs["sizes"]:
        views.append(view.slice(axis, start, size, 1))
        start = start + size
    return tuple(views)


VIEWS.update(reshape=_reshape, expand=_expand, slice=_slice, split=_split)
VIEWS["identity"] = lambda ctx, node: (ctx.view(next(node.operands)),)
VIEWS["optimization_barrier"] = VIEWS["identity"]
VIEWS["transpose"] = lambda ctx, node: (
    ctx.view(next(node.operands)).transpose(node.attrs["perm"]),
)
