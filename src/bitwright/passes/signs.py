"""Derives from the ops that compute a value whether it is never negative. NaN is ignored."""

from __future__ import annotations

from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get

_RESULTS = frozenset(("relu", "sigmoid", "softmax", "hard_sigmoid", "exp", "abs", "sqrt"))
_KEEP = frozenset(
    ("add", "mul", "div", "maximum", "max_pool", "average_pool", "reduce_mean", "reduce_max")
)
"""Ops whose result is not negative if no operand is."""
_DEPTH = 8
"""The maximum number of ops to look back."""


def is_never_negative(value: Value, depth: int = _DEPTH) -> bool:
    known = constant_value(value)
    if known is not None:
        return known.dtype.kind in "fiu" and bool((known >= 0).all())
    node = value.node
    if node.op == "clip":
        return _clips_below(node)
    if node.op in _RESULTS:
        return True
    if depth == 0 or node.is_boundary:
        return False
    if node.op in _KEEP:
        return all(is_never_negative(v, depth - 1) for v in node.operands)
    if get(node.op).kind is Kind.MOVEMENT and not node.bodies:
        return is_never_negative(next(node.operands), depth - 1) and _moves_only(node)
    return False


def _clips_below(node: Node) -> bool:
    _, low, high = (*node.inputs, None, None)[:3]
    lowest, highest = constant_value(low), constant_value(high)
    is_above = lowest is not None and bool((lowest >= 0).all())
    return is_above and (high is None or (highest is not None and bool((highest >= 0).all())))


def _moves_only(node: Node) -> bool:
    return node.op in ("reshape", "transpose", "slice", "expand", "squeeze", "unsqueeze")
