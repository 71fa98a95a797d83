"""Computes the sine and cosine tables of rotary embeddings in f64.

    cos(x)  ->  f32(cos(f64(x)))          x depends only on integers and constants

Libraries round cosines of f32 differently, and one different last bit in a table changes quantized
values that depend on it. Computed in f64 and rounded to f32, the result is nearly always the same
in every runtime. Tables are small compared with the model.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Value
from bitwright.passes.lower_integer.operands import has_quantize
from bitwright.rewrite import Match, Rule, rewrite

_DATA = frozenset({"dequantize", "state"})


def upcast_rope_tables(graph: Graph) -> Graph:
    """The graph with its tables in f64, if it quantizes any value."""
    return rewrite(graph, _RULES) if has_quantize(graph) else graph


def _is_data(value: Value) -> bool:
    """Whether the value depends on more than integers and constants."""
    seen: set[Value] = set()
    pending = [value]
    while pending:
        found = pending.pop()
        if found in seen:
            continue
        seen.add(found)
        node = found.node
        if node.op in _DATA or node.bodies or (node.op == "input" and found.dtype.is_float):
            return True
        pending += node.operands
    return False


def _why_not_upcast(m: Match) -> str | bool:
    if m.x.dtype != f32:
        return f"its type is {m.x.dtype}"
    return _is_data(m.x) and "its operand is data"


def _rule(name: str) -> Rule:
    def replace(op: Any, x: Any) -> Any:
        return op.cast(getattr(op, name)(op.cast(x, to="f64")), to="f32")

    match = lambda op, x: getattr(op, name)(x)
    return Rule(f"{name}-of-positions", match, replace, _why_not_upcast)


_RULES = [_rule("cos"), _rule("sin")]
