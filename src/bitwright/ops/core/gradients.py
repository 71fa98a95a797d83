"""Pieces that gradient rules share: sums over broadcast axes, constants, products of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bitwright.ir.graph import Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.reverse import Gradients, Rule, is_differentiable


def zero_gradient(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    """The rule of a piecewise constant op (floor, round): zero for every operand."""
    return ()


def sum_to(b: Builder, dy: Value, like: Value) -> Value:
    """`dy` summed over the axes along which `like` was broadcast; the result has its shape."""
    if dy.shape == like.shape:
        return dy
    extra = dy.rank - like.rank
    stretched = [
        axis + extra
        for axis, size in enumerate(like.shape)
        if size == 1 and dy.shape[axis + extra] != 1
    ]
    if extra:
        dy = b.reduce_sum(dy, axes=tuple(range(extra)), keepdims=False)
    if stretched:
        dy = b.reduce_sum(dy, axes=tuple(a - extra for a in stretched), keepdims=True)
    return dy


def number(b: Builder, value: float, like: Value) -> Value:
    """A scalar constant in the type of `like`."""
    return b.constant(np.asarray(value), like.dtype)


def full_like(b: Builder, value: float, like: Value) -> Value:
    """A tensor of one number, with the type of `like`."""
    return b.expand(number(b, value, like), shape=like.shape)  # type: ignore[no-any-return]


def elementwise(*partials: Callable[..., Any] | None) -> Rule:
    """The rule of an elementwise op from its partial derivatives times dy, one per operand.

    `partial(b, dy, *operands, y=result, **attrs)` returns a value of the broadcast shape; it is
    summed over broadcast axes. None marks an operand without a gradient.
    """

    def rule(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
        found: list[Value | None] = []
        for value, partial in zip(node.inputs, partials, strict=False):
            if value is None or partial is None or not is_differentiable(value):
                found.append(None)
                continue
            answer = partial(b, dys[0], *node.inputs, y=node.outputs[0], **node.attrs)
            found.append(None if answer is None else sum_to(b, answer, value))
        return found

    return rule


def axes_of(rank: int, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Reduction axes counted from 0; None means all."""
    return tuple(range(rank)) if axes is None else tuple(sorted(axis % rank for axis in axes))
