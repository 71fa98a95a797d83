"""Resolves shapes, folds constants, applies the rules and merges common subexpressions."""

from __future__ import annotations

from itertools import cycle, islice

from bitwright.ir.graph import Graph
from bitwright.passes.simplify.eliminate_common import eliminate_common
from bitwright.passes.simplify.fold_constants import fold_constants
from bitwright.passes.simplify.resolve_shapes import resolve_shapes
from bitwright.passes.simplify.rules import algebra, empty, masks, movement
from bitwright.rewrite import Trace, rewrite

RULES = [*movement.RULES, *algebra.RULES, *masks.RULES, *empty.RULES]
STEPS, MAX_ROUNDS = 4, 10


def canonicalize(graph: Graph, trace: Trace) -> Graph:
    """Runs the steps in turn until none of them changes the graph."""
    steps = cycle((resolve_shapes, fold_constants, _apply_rules, eliminate_common))
    unchanged = 0
    for step in islice(steps, STEPS * MAX_ROUNDS):
        before, graph = graph, step(graph, trace)
        unchanged = unchanged + 1 if graph is before else 0
        if unchanged == STEPS:
            break
    return graph


def _apply_rules(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)
