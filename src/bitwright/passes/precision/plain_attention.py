"""Attention with int8 products becomes attention in the precision of its operands.

    attention(q, k, v, int8)   ->   attention(q, k, v)

For targets whose attention has no int8 products: 16-bit operands are at least as accurate, and need
no conversion to f32.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.graph import Graph
from bitwright.rewrite import Match, Rule, Trace, rewrite


def plain_attention(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def _lower(op: Any, m: Match) -> Any:
    return op.op("attention", *m.root.inputs, **{**m.root.attrs, "int8": False})


def _why_not(m: Match) -> str | bool:
    return not m.root.attrs.get("int8") and "it has no int8 products"


RULES = [Rule("attention-without-int8", lambda op: op.attention(...), _lower, _why_not)]
