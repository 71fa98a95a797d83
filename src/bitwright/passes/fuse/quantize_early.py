"""Quantization reads values where they are made: in their own type, and before they are moved.

    dynamic_quantize(cast(x))             ->  dynamic_quantize(x)             x: f16 or bf16
    cast(reshape(x) * 8, f8)              ->  reshape(cast(x * 8, f8))        transpose likewise
    requantize(transpose(x) * 8, zero)    ->  transpose(requantize(x * 8, zero))

The kernel that makes x then stores it quantized, and fewer bytes move.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.dtype import bf16, f8e4m3fn, f8e5m2, f16, f32
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite

MOVES = ("reshape", "transpose")


def quantize_early(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def _plan(m: Match) -> list[Node] | str:
    """The nodes from the quantization back to the movement."""
    node = m.root
    if node.op == "cast" and node.attrs["to"] not in (f8e4m3fn, f8e5m2):
        return "it does not quantize"
    chain: list[Node] = []
    while True:
        chain.append(node)
        source, *others = node.inputs
        if source is None or not all(_is_number(v) for v in others if v is not None):
            return "an operand besides the first is not a number"
        if m.uses(source) != 1:
            return f"{source} has another reader"
        node = source.node
        if node.op in MOVES:
            x = next(node.operands)
            made = x.node
            if made.is_boundary or (not get(made.op).takes_epilogue and made.op not in MOVES):
                return f"{x} is not made by a kernel that could quantize it"
            return [*chain, node] if m.uses(x) == 1 else f"{x} has another reader"
        if node.is_boundary or (get(node.op).kind is not Kind.ELEMENTWISE and node.op != "cast"):
            return f"{node.op} does not move a value"


def _is_number(value: Value) -> bool:
    return value.is_constant and value.tensor.count == 1 and value.rank == 0


def _lower(op: Any, m: Match, chain: list[Node]) -> Any:
    *steps, move = chain
    (value,) = (v for v in move.operands)
    for node in reversed(steps):
        value = op.like(node, value, *node.inputs[1:])
    return op.like(move, value)


def _narrow(op: Any, m: Match) -> Any:
    (wide,) = m.root.operands
    return op.like(m.root, *wide.node.operands)


def _why_not_narrow(m: Match) -> str | bool:
    (x,) = m.root.operands
    source = x.node.inputs[0] if x.node.op == "cast" else None
    is_half = source is not None and source.dtype in (f16, bf16) and x.dtype == f32
    return not is_half and "it does not read a half that was widened"


RULES = [
    Rule("dynamic-quantize-of-half", lambda op: op.dynamic_quantize(...), _narrow, _why_not_narrow),
    *(
        Rule.from_plan(f"{name}-before-movement", any_operands(name), _plan, _lower)
        for name in ("cast", "requantize")
    ),
]
