"""Lowering of ops with data-dependent sizes: a step reads them; the rest is views and copies.

    reshape, expand   views in the shape that was read
    slice             a view whose offset and strides were read
    range             start + i · delta; the operands determine the length
    require           its operand, after a step that checks the condition

A signed number is the difference of two sizes, because sizes are never negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.movement.patterns import emit_range
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import broadcast, require_elements
from bitwright.errors import RunError
from bitwright.ir.dim import Size, evaluate, symbol
from bitwright.ir.dtype import i32, i64
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View
from bitwright.ops.shape.movement import resolve_reshape
from bitwright.ops.shape.slicing import normalize_slice, slice_size

Array = np.ndarray[Any, Any]
Bindings = Mapping[str, int]


def read_integers(ctx: Lowering, node: Node, operand: Value | None) -> tuple[Size, ...]:
    """The elements of a vector of known length, as sizes."""
    assert operand is not None
    if operand.rank != 1 or not isinstance(operand.shape[0], int):
        raise NoKernelError("the length of a vector of sizes is not known")
    numbers, halves = _signed(ctx, node, "v", operand.shape[0])
    ctx.read_sizes(node, [operand], halves, lambda arrays, _: _halves(arrays[0]))
    return numbers


def known_sizes(ctx: Lowering, node: Node, sizes: Sequence[Size]) -> None:
    """Set the shape of a node's result from sizes that are already known."""

    def read(_: Sequence[Array], bindings: Bindings) -> list[int]:
        found = [evaluate(size, bindings) for size in sizes]
        if min(found, default=0) < 0:
            raise RunError("a size would be negative", found=found)
        return found

    ctx.read_sizes(node, [], node.outputs[0].shape, read)


def _signed(
    ctx: Lowering, node: Node, what: str, count: int
) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """New signed numbers, and the pairs of sizes whose differences they are."""
    prefix = f"data{ctx.number(node)}.{what}"
    halves = tuple(symbol(f"{prefix}{i}") for i in range(2 * count))
    return tuple(halves[2 * i] - halves[2 * i + 1] for i in range(count)), halves


def _halves(numbers: Any) -> list[int]:
    plain = [int(number) for number in np.asarray(numbers).reshape(-1)]
    return [half for number in plain for half in (max(number, 0), max(-number, 0))]


def _shape(value: Value, bindings: Bindings) -> tuple[int, ...]:
    return value.tensor.concrete(bindings)


@lowers("reshape")
def lower_reshape(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, target = node.operands
    allowzero = bool(node.attrs.get("allowzero"))

    def read(arrays: Sequence[Array], bindings: Bindings) -> Sequence[int]:
        wanted = [int(size) for size in arrays[0]]
        return resolve_reshape(_shape(x, bindings), wanted, allowzero)  # type: ignore[return-value]

    shape = node.outputs[0].shape
    ctx.read_sizes(node, [target], shape, read)
    ctx.alias(node.outputs[0], ctx.contiguous(x).relabel(shape))


@lowers("expand")
def lower_expand(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, target = node.operands

    def read(arrays: Sequence[Array], bindings: Bindings) -> Sequence[int]:
        wanted = tuple(int(size) for size in arrays[0])
        try:
            return np.broadcast_shapes(_shape(x, bindings), wanted)
        except ValueError as error:
            raise RunError(str(error)) from None

    shape = node.outputs[0].shape
    ctx.read_sizes(node, [target], shape, read)
    ctx.alias(node.outputs[0], broadcast(ctx.view(x), shape))


@lowers("slice")
def lower_slice(ctx: Lowering, node: Node, region: RegionView) -> None:
    x, *operands = node.inputs
    assert x is not None
    given = [operand is not None for operand in operands]
    rank = x.rank
    starts = tuple(symbol(f"data{ctx.number(node)}.start{axis}") for axis in range(rank))
    steps, halves = _signed(ctx, node, "step", rank)

    def read(arrays: Sequence[Array], bindings: Bindings) -> list[int]:
        rest = iter(arrays)
        first, stop, axes, step = (
            [int(i) for i in next(rest)] if is_given else None
            for is_given in (*given, False, False)[:4]
        )
        assert first is not None and stop is not None
        shape = list(_shape(x, bindings))
        begin, stride = [0] * rank, [1] * rank
        for number, axis in enumerate(axes if axes is not None else range(len(first))):
            if not -rank <= axis < rank:
                raise RunError("the axis is out of range", expected=f"rank {rank}", found=axis)
            move = 1 if step is None else step[number]
            start, end = normalize_slice(shape[axis], first[number], stop[number], move)
            begin[axis], stride[axis] = evaluate(start, bindings), move
            shape[axis] = evaluate(slice_size(start, end, move), bindings)
        return [*shape, *begin, *_halves(stride)]

    present = [operand for operand in operands if operand is not None]
    shape = node.outputs[0].shape
    ctx.read_sizes(node, present, (*shape, *starts, *halves), read)
    view = ctx.view(x)
    offset = view.offset
    for start, stride in zip(starts, view.strides, strict=True):
        offset = offset + start * stride
    strides = tuple(a * b for a, b in zip(view.strides, steps, strict=True))
    ctx.alias(node.outputs[0], View(view.buffer, offset, shape, strides))


@lowers("require")
def lower_require(ctx: Lowering, node: Node, region: RegionView) -> None:
    condition, x = node.operands
    message = node.attrs["message"]
    require_elements(x.dtype)

    def read(arrays: Sequence[Array], _: Bindings) -> list[int]:
        if not arrays[0].all():
            raise RunError(message)
        return []

    ctx.read_sizes(node, [condition], (), read)
    ctx.alias(node.outputs[0], ctx.view(x))


@lowers("range")
def lower_range(ctx: Lowering, node: Node, region: RegionView) -> None:
    start, limit, delta = node.operands
    element = node.outputs[0].dtype
    require_elements(element)
    if element.is_integer and element not in (i32, i64):
        raise NoKernelError(f"there is no kernel for ranges of {element}")

    def read(arrays: Sequence[Array], _: Bindings) -> list[int]:
        first, end, step = (array.reshape(-1)[0].item() for array in arrays)
        if step == 0:
            raise RunError("a range has the step 0")
        count = -((first - end) // step) if element.is_integer else np.ceil((end - first) / step)
        return [max(int(count), 0)]

    ctx.read_sizes(node, [start, limit, delta], node.outputs[0].shape, read)
    kernel = ctx.kernel("range", element, lambda m, name: emit_range(m, name, element))
    y = ctx.output(node.outputs[0])
    pointers = {"start": ctx.contiguous(start), "delta": ctx.contiguous(delta), "y": y}
    ctx.call(kernel, node, pointers, {"count": y.count})
