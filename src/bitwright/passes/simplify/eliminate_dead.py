"""Drops nodes that no result needs; inputs, parameters and states stay."""

from __future__ import annotations

from bitwright.ir.edit import map_bodies, prune
from bitwright.ir.graph import Graph
from bitwright.rewrite.trace import Trace


def eliminate_dead(graph: Graph, trace: Trace) -> Graph:
    return prune(map_bodies(graph, lambda body: eliminate_dead(body, trace)))
