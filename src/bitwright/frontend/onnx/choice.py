"""Axes that only the run knows: the node is imported once for each choice, and `if`s choose.

    y = ReduceSum(x, axes)        axes one of [0], [1], [2]

How many axes there are must be known, so that every choice gives a result of the same rank. The
sum of one power for each axis tells the choices apart, whatever order or sign the axes have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

import numpy as np

from bitwright.frontend.onnx.bodies import captures_of, finished
from bitwright.frontend.onnx.context import Body, Context
from bitwright.frontend.onnx.registry import UnmappedError
from bitwright.ir import Value

MAX_CHOICES = 32
Make = Callable[[Context, Value, list[int]], Value]
"""The node's result from its first operand and its axes."""


def with_axes(
    ctx: Context,
    x: Value,
    axes: Value,
    rank: int,
    make: Make,
    among: Sequence[int] | None = None,
) -> Value:
    """`make(ctx, x, axes)` for axes that are constant or not.

    They count the axes of a tensor of this rank, and can only be some of `among` them.
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
    code = ctx.b.reduce_sum(chosen, axes=[0], keepdims=True)
    qvalues = {sum(powers[axis] for axis in choice): choice for choice in choices}
    checked = ctx.b.require(_is_among(ctx, code, qvalues), x, message="the axes do not fit")
    return _choose(ctx, checked, code, list(qvalues.items()), make)


def _is_among(ctx: Context, code: Value, qvalues: Sequence[int] | dict[int, list[int]]) -> Value:
    same = ctx.b.eq(code, ctx.const(np.array(list(qvalues), np.int64)))
    return ctx.b.reduce_max(same, axes=[0], keepdims=False)


def _choose(
    ctx: Context, x: Value, code: Value, choices: Sequence[tuple[int, list[int]]], make: Make
) -> Value:
    """One of the choices, found by halving them."""
    if len(choices) == 1:
        return make(ctx, x, choices[0][1])
    half = len(choices) // 2
    bodies = []
    for some in (choices[:half], choices[half:]):
        scope = ctx.importer.nested_scope(ctx.scope, "axes")
        inner = Context(ctx.importer, scope)
        held = [scope.frame.capture(value) for value in (x, code)]
        bodies.append(Body(scope.frame, [], [("y", _choose(inner, *held, some, make))]))
    captures = captures_of(bodies)
    attrs = {name: finished(b, captures) for name, b in zip(("then", "else"), bodies, strict=True)}
    condition = _is_among(ctx, code, [number for number, _ in choices[:half]])
    return ctx.b.node("if", [condition, *captures], attrs, []).outputs[0]
