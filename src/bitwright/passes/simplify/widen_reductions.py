"""Reductions of halves that are widened give f32 at once.

    cast(reduce_mean(x), f32)   ->   reduce_mean(cast(x, f32))       x: f16 or bf16

For kernels that read halves and add in f32: the result is rounded less, and takes no kernel more.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.dtype import bf16, f16, f32
from bitwright.ir.graph import Graph
from bitwright.ops.core.registry import get
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite


def widen_reductions(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def _plan(m: Match) -> bool | str:
    value = m.root.inputs[0]
    if value is None or m.root.attrs["to"] != f32:
        return "it does not cast to f32"
    node = value.node
    if value.dtype not in (f16, bf16) or node.is_boundary or not get(node.op).reads_cast:
        return f"{value} is not a reduction of halves"
    if m.uses(value) != 1 or len(node.outputs) != 1 or next(node.operands).dtype != value.dtype:
        return f"{value} has another reader"
    return True


def _lower(op: Any, m: Match, _: bool) -> Any:
    (value,) = m.root.operands
    x, *others = value.node.inputs
    return op.like(value.node, op.cast(x, to=f32), *others)


RULES = [Rule.from_plan("widen-reduction", any_operands("cast"), _plan, _lower)]
