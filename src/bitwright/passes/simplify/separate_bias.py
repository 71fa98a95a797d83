"""The bias of a convolution becomes an addition, which the epilogue computes.

conv(x, w, b) -> conv(x, w) + b[:, 1, 1]
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.graph import Graph
from bitwright.rewrite import Match, Rule, Trace, rewrite


def separate_bias(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def _add_bias(op: Any, x: Any, w: Any, b: Any, m: Match) -> Any:
    spread = op.reshape(b, shape=(b.shape[0], *(1,) * (x.rank - 2)))
    return op.add(op.like(m.layer, x, w), spread)


def _why_not_add(m: Match) -> str | bool:
    return m.b.dtype != m.root.outputs[0].dtype and "the bias has another type than the result"


RULES = [
    Rule(
        f"bias-of-{name.replace('_', '-')}-as-addition",
        lambda op, x, w, b, name=name: getattr(op, name)(x, w, b, as_="layer"),
        _add_bias,
        _why_not_add,
    )
    for name in ("conv", "conv_transpose")
]
