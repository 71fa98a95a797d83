"""Gradients of scatter ops, in terms of gather and scatter with the same positions.

    none      updates read dy at their positions, and x loses it there
    add       both receive dy
    mul       dy times the product of the other factors
    max, min  dy, divided evenly among equal extremes, as PyTorch's scatter_reduce

Without a reduction, two updates of one position both receive dy, although only the last one is
written: ONNX leaves that case undefined, and PyTorch does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright.ir.dtype import f32, f64
from bitwright.ir.graph import Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import where_or_zero, zeros_like
from bitwright.ops.core.reverse import Gradients, Rule

Gather = Callable[[Value], Any]
Scatter = Callable[[Value, Value, str], Any]


def scatter_rule(kind: str) -> Rule:
    """The rule of `scatter_<kind>`, whose positions `gather_<kind>` reads."""

    def rule(b: Builder, node: Node, dys: list[Any]) -> Gradients:
        x, indices, updates = node.operands
        attrs = {name: value for name, value in node.attrs.items() if name != "reduction"}

        def gather(values: Value) -> Any:
            return b.op(f"gather_{kind}", values, indices, **attrs)

        def scatter(values: Value, given: Value, reduction: str) -> Any:
            return b.op(f"scatter_{kind}", values, indices, given, reduction=reduction, **attrs)

        (dy,), reduction = dys, node.attrs["reduction"]
        if reduction == "none":
            return [scatter(dy, zeros_like(b, updates), "none"), None, gather(dy)]
        if reduction == "add":
            return [dy, None, gather(dy)]
        if reduction == "mul":
            return _product(b, dy, x, updates, gather, scatter)
        return _extreme(b, dy, x, updates, node.outputs[0], gather, scatter)

    return rule


def _product(
    b: Builder, dy: Value, x: Value, updates: Value, gather: Gather, scatter: Scatter
) -> Gradients:
    """The product of the other factors is 0 if one of them is, which a quotient does not tell."""
    x_is_zero, update_is_zero = b.eq(x, 0.0), b.eq(updates, 0.0)
    x_factor, update_factor = b.where(x_is_zero, 1.0, x), b.where(update_is_zero, 1.0, updates)
    product = scatter(x_factor, update_factor, "mul")
    zeros = scatter(_count(b, x_is_zero, x), _count(b, update_is_zero, x), "add")
    without_zero = where_or_zero(b, b.eq(zeros, 0.0), b.mul(dy, product))
    with_one_zero = where_or_zero(b, b.eq(zeros, 1.0), b.mul(dy, product))
    dx = b.where(x_is_zero, with_one_zero, b.div(without_zero, x_factor))
    quotient = b.div(gather(without_zero), update_factor)
    return [dx, None, b.where(update_is_zero, gather(with_one_zero), quotient)]


def _extreme(
    b: Builder, dy: Value, x: Value, updates: Value, y: Value, gather: Gather, scatter: Scatter
) -> Gradients:
    x_wins, update_wins = b.eq(x, y), b.eq(updates, gather(y))
    ties = scatter(_count(b, x_wins, x), _count(b, update_wins, x), "add")
    share = b.div(dy, ties if ties.dtype == dy.dtype else b.cast(ties, to=dy.dtype))
    return [where_or_zero(b, x_wins, share), None, where_or_zero(b, update_wins, gather(share))]


def _count(b: Builder, condition: Value, like: Value) -> Any:
    """1 where the condition holds, in a type that counts exactly."""
    return b.cast(condition, to=f64 if like.dtype.bits >= 64 else f32)
