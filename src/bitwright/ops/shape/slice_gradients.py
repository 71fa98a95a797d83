"""Gradients of slice and pad.

A slice with attributes is undone by padding: a step s above 1 first puts s - 1 zeros after each
element, a negative step reverses the order. Where only the data decides a window, and where padding
repeats elements, the op is applied to a counter; its result says where each element came from, and
`gather_backward` adds dy up by it.
"""

from __future__ import annotations

from typing import Any, cast

from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import zeros_like
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.shape.movement import pad_axis


def grad_slice(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    x, attrs = node.inputs[0], node.attrs
    assert x is not None
    dy: Value = dys[0]
    if len(node.inputs) > 1:
        counter = _counter(b, x)
        return [_by_origin(b, dy, b.slice(counter, *node.inputs[1:]), x)]
    if any(size == 0 for size in dy.shape):
        return [zeros_like(b, x)]
    for axis, start, step in zip(attrs["axes"], attrs["starts"], attrs["steps"], strict=True):
        at = normalize_axis(axis, x.rank)
        dy = unslice(b, dy, at, x.shape[at], start, step)
    return [dy]


def unslice(b: Builder, dy: Value, axis: int, size: Size, start: Size, step: int) -> Value:
    """dy at the elements of one axis that a slice selected, and zeros around them."""
    count = dy.shape[axis]
    if step < 0:
        dy = b.slice(dy, starts=(count - 1,), stops=(-1,), steps=(-1,), axes=(axis,))
        start, step = start + (count - 1) * step, -step
    if step > 1:
        before, after = dy.shape[:axis], dy.shape[axis + 1 :]
        column = b.reshape(dy, shape=(*before, count, 1, *after))
        wide = pad_axis(b, column, axis + 1, 0, step - 1)
        dy = b.reshape(wide, shape=(*before, count * step, *after))
    return pad_axis(b, dy, axis, start, size - start - count * step)


def grad_pad(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    x, value, given = (*node.inputs, None, None)[:3]
    assert x is not None
    dy, mode, pads = dys[0], node.attrs["mode"], node.attrs.get("pads", ())
    if mode == "constant":
        if given is not None:
            dx = b.reshape(b.pad(dy, None, b.neg(given)), shape=x.shape)
        else:
            dx = b.pad(dy, pads=[-pad for pad in pads])
        return [dx] if value is None else [dx, _of_value(b, node, dy, x, value)]
    if given is not None:
        return [_by_origin(b, dy, b.pad(_counter(b, x), None, given, mode=mode), x)]
    for axis, (before, after) in enumerate(zip(pads[: x.rank], pads[x.rank :], strict=True)):
        if before != 0 or after != 0:
            counter = b.iota(length=x.shape[axis])
            origin = b.pad(counter, pads=(before, after), mode=mode)
            dy = b.gather_backward(dy, origin, axis=axis, size=x.shape[axis])
    return [dy]


def _of_value(b: Builder, node: Node, dy: Value, x: Value, value: Value) -> Any:
    """The sum of dy over the padding: zeros, padded with ones, are a mask of it."""
    ones = b.constant(1, x.dtype)
    mask = b.pad(zeros_like(b, x), ones, *node.inputs[2:], **node.attrs)
    total = b.reduce_sum(b.mul(dy, mask), axes=tuple(range(dy.rank)), keepdims=False)
    return b.reshape(total, shape=value.shape) if value.rank else total


def _counter(b: Builder, x: Value) -> Any:
    """The flat position of each element."""
    return b.reshape(b.iota(length=x.tensor.count), shape=x.shape)


def _by_origin(b: Builder, dy: Value, origin: Value, x: Value) -> Value:
    """dy added up by the flat position in x that each of its elements came from."""
    flat = [b.reshape(value, shape=(product(value.shape),)) for value in (dy, origin)]
    table = b.gather_backward(*flat, axis=0, size=x.tensor.count)
    return cast(Value, b.reshape(table, shape=x.shape))
