"""Sigmoids of f32 in a graph that makes codes, and what they gate.

    sigmoid(x)       ->  1 / (1 + Exp(-x))
    silu(x)          ->  x / (1 + Exp(-x))            swish and quick_gelu with their slope
    gelu(x, tanh)    ->  x / (1 + Exp(-2 u))          u the argument of the tanh

The Sigmoid and Tanh of ONNX Runtime, and the nodes to which it fuses these gates, are quotients of
polynomials, off by some 1e-7 whatever the result is: below zero little of it is right, and codes
behind it differ from those found here. Its Exp is ours to the bit, and so is what is written so.
"""

from __future__ import annotations

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node
from bitwright.passes.lower_integer.operands import has_quantize

_GATES = ("sigmoid", "silu", "swish", "quick_gelu")


def gates_among_qvalues(graph: Graph) -> list[Node]:
    """The gates of a graph that makes codes; not those of codes, which runtimes make tables of."""
    if not has_quantize(graph):
        return []
    return [node for node in graph.nodes if _is_gate(node) and not _is_of_qvalues(node)]


def _is_gate(node: Node) -> bool:
    is_tanh = node.op == "gelu" and node.attrs["approximate"] == "tanh"
    return (node.op in _GATES or is_tanh) and node.outputs[0].dtype == f32


def _is_of_qvalues(node: Node) -> bool:
    return next(node.operands).node.op == "dequantize"
