"""Transposes of a concat move to its operands, where they are views.

    transpose(concat(x, y))  ->  concat(transpose(x), transpose(y))

The gradient of one projection that gives queries, keys and values is such a transpose. Without the
rule, its parts are copied twice.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.graph import Graph
from bitwright.ir.types import normalize_axis
from bitwright.rewrite import Match, Rule, Trace, rewrite


def hoist_transposes(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def _hoist(op: Any, m: Match) -> Any:
    perm = m.p
    axis = normalize_axis(m.joined.attrs["axis"], len(perm))
    parts = [op.transpose(value, perm=perm) for value in m.joined.operands]
    return op.concat(*parts, axis=perm.index(axis))


def _why_not_hoist(m: Match) -> str | bool:
    return m.uses(m.joined.outputs[0]) > 1 and "the concat has another reader"


RULES = [
    Rule(
        "transpose-of-concat",
        lambda op, p: op.transpose(op.concat(..., as_="joined"), perm=p),
        _hoist,
        _why_not_hoist,
    )
]
