"""Sines and cosines of positions, in f64 on the way.

    cos(x)  ->  f32(cos(f64(x)))          x made of whole numbers and constants: a rotary table

No two libraries round a cosine of f32 alike, and what is turned by it becomes codes: one other last
bit in a table, and all that follows differs. Computed in f64 and rounded to f32, it is the f32
nearest to the cosine nearly always, whoever runs the model. Tables are small beside the model.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Value
from bitwright.passes.lower_integer.operands import has_quantize
from bitwright.rewrite import Match, Rule, rewrite

_DATA = frozenset({"dequantize", "state"})


def upcast_rope_tables(graph: Graph) -> Graph:
    """The graph with such tables, if it makes codes at all."""
    return rewrite(graph, _RULES) if has_quantize(graph) else graph


def _is_data(value: Value) -> bool:
    """Whether it depends on more than whole numbers and constants."""
    seen: set[Value] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if found in seen:
            continue
        seen.add(found)
        node = found.node
        if node.op in _DATA or node.bodies or (node.op == "input" and found.dtype.is_float):
            return True
        waiting += node.operands
    return False


def _refuse(m: Match) -> str | bool:
    if m.x.dtype != f32:
        return f"it is of {m.x.dtype}"
    return _is_data(m.x) and "its operand is data"


def _rule(name: str) -> Rule:
    def replace(op: Any, x: Any) -> Any:
        return op.cast(getattr(op, name)(op.cast(x, to="f64")), to="f32")

    return Rule(f"{name}-of-positions", lambda op, x: getattr(op, name)(x), replace, _refuse)


_RULES = [_rule("cos"), _rule("sin")]
