"""Composites that exporters write in primitive ops become one op again."""

from __future__ import annotations

from bitwright.ir.graph import Graph
from bitwright.passes.simplify.rules import activations, attention, normalization, rotary
from bitwright.rewrite import Trace, rewrite

RULES = [*activations.RULES, *normalization.RULES, *rotary.RULES, *attention.RULES]


def recognize_composites(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)
