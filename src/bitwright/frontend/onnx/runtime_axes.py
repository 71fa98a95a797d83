"""Axes known only at run time: the node is imported for each choice of axes, under nested `if`s.

    y = ReduceSum(x, axes)        axes one of [0], [1], [2]

The number of axes must be known, so that every choice gives a result of the same rank. A key, the
sum of one power for each axis, identifies a choice in any order and with any sign of the axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import comb

import numpy as np

from bitwright.frontend.onnx.bodies import captures_of, finish_body
from bitwright.frontend.onnx.context import Body, Context
from bitwright.frontend.onnx.registry import UnmappedError
from bitwright.ir import Value

MAX_CHOICES = 32
Make = Callable[[Context, Value, list[int]], Value]
"""Makes the node's result from its first operand and the axes."""


def with_runtime_axes(
    ctx: Context, x: Value, axes: Value, rank: int, make: Make, among: Sequence[int] | None = None
) -> Value:
    """`make(ctx, x, axes)` for constant or computed axes of a tensor of this rank.

    Only the axes in `among` are possible.
    """
    known = ctx.array(axes)
    if known is not None:
        return make(ctx, x, [int(axis) for axis in known.reshape(-1)])
    count = ctx.length(axes) if axes.rank else 1
    if count == 0:
        return make(ctx, x, [])
    among = range(rank) if among is None else among
    if not 1 <= comb(len(among), count) <= MAX_CHOICES:
        raise UnmappedError(f"there are too many or no choices of {count} axes of {len(among)}")
    choices = [list(choice) for choice in combinations(among, count)]
    if len(choices) == 1:
        return make(ctx, x, choices[0])
    powers = [(count + 1) ** axis for axis in range(rank)]
    chosen = ctx.b.gather(ctx.const(np.array(powers, np.int64)), ctx.reshape(axes, [count]), axis=0)
    key = ctx.b.reduce_sum(chosen, axes=[0], keepdims=True)
    by_key = {sum(powers[axis] for axis in choice): choice for choice in choices}
    checked = ctx.b.require(_is_among(ctx, key, by_key), x, message="the axes do not fit")
    return _choose(ctx, checked, key, list(by_key.items()), make)


def _is_among(ctx: Context, key: Value, keys: Iterable[int]) -> Value:
    same = ctx.b.eq(key, ctx.const(np.array(list(keys), np.int64)))
    return ctx.b.reduce_max(same, axes=[0], keepdims=False)


def _choose(
    ctx: Context, x: Value, key: Value, choices: Sequence[tuple[int, list[int]]], make: Make
) -> Value:
    """The result of one of the choices, found by binary search."""
    if len(choices) == 1:
        return make(ctx, x, choices[0][1])
    half = len(choices) // 2
    bodies = []
    for some in (choices[:half], choices[half:]):
        scope = ctx.importer.nested_scope(ctx.scope, "axes")
        inner = Context(ctx.importer, scope)
        x_inner, key_inner = (scope.frame.capture(value) for value in (x, key))
        y = _choose(inner, x_inner, key_inner, some, make)
        bodies.append(Body(scope.frame, [], [("y", y)]))
    captures = captures_of(bodies)
    attrs = {
        name: finish_body(b, captures) for name, b in zip(("then", "else"), bodies, strict=True)
    }
    condition = _is_among(ctx, key, [first for first, _ in choices[:half]])
    return ctx.b.node("if", [condition, *captures], attrs, []).outputs[0]
