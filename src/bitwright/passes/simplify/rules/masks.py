"""Simplifies masks: comparisons that are always true, and broadcasts that can come last.

    0 <= position          ->  true
    x and true             ->  x
    where(expand(c), 0, a) ->  expand(where(c, 0, a))
    attention(…, expand(m)) -> attention(…, m)

Exporters write a padding mask as `(0 <= query) and seen[key]`, expanded over all queries.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Value, constant_value
from bitwright.rewrite import Match, Rule
from bitwright.rewrite.match import uniform


def _source(value: Value) -> Value:
    """The value behind reshapes and expands."""
    while value.node.op in ("reshape", "expand") and len(value.node.inputs) == 1:
        (value,) = value.node.operands
    return value


def _why_not_positive(m: Match) -> str | bool:
    source = _source(m.x)
    if not source.dtype.is_integer:
        return f"{source} is not an integer"
    known = constant_value(source)
    if known is not None:
        return bool((known < 0).any()) and "it has negative elements"
    return source.node.op != "iota" and f"{source} is not an iota"


def _is_true(value: Value) -> bool:
    return uniform(_source(value)) == 1


def _broadcast(op: Any, x: Value, m: Match) -> Any:
    shape = m.root.outputs[0].shape
    return x if x.shape == shape else op.expand(x, shape=shape)


def _why_not_expand_last(m: Match) -> str | bool:
    small, wide = m.c, m.node.outputs[0]
    if m.x.tensor.count != 1 or m.y.tensor.count != 1:
        return "its branches are not scalars"
    if m.root.outputs[0].shape != wide.shape:
        return "its branches are larger than its condition"
    return small.tensor.count == wide.tensor.count and "the expand repeats nothing"


def _why_not_broadcast(m: Match) -> str | bool:
    kept = m.mask.rank > 0 and m.mask.shape[-1] == m.wide.outputs[0].shape[-1]
    return not kept and "the expand is over the keys"


RULES = [
    Rule(
        "positions-are-not-negative",
        lambda op, x: op.ge(x, 0),
        lambda op, m: op.expand(op.constant(np.array(True)), shape=m.root.outputs[0].shape),
        _why_not_positive,
    ),
    Rule(
        "and-true",
        lambda op, x, y: op.and_(x, y),
        lambda op, m: _broadcast(op, m.y if _is_true(m.x) else m.x, m),
        lambda m: not (_is_true(m.x) or _is_true(m.y)) and "neither is true everywhere",
    ),
    Rule(
        "choice-before-expand",
        lambda op, c, x, y: op.where(op.expand(c, as_="node"), x, y),
        lambda op, c, x, y, m: _broadcast(op, op.where(c, x, y), m),
        _why_not_expand_last,
    ),
    Rule(
        "attention-broadcasts-its-mask",
        lambda op, q, k, v, mask: op.attention(q, k, v, op.expand(mask, as_="wide"), as_="node"),
        lambda op, q, k, v, mask, m: op.like(m.node, q, k, v, mask),
        _why_not_broadcast,
    ),
]
