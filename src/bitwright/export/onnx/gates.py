"""Gated activations of quantized graphs, written with Exp.

    sigmoid(x)       ->  1 / (1 + Exp(-x))
    silu(x)          ->  x / (1 + Exp(-x))            swish and quick_gelu with their slope
    gelu(x, tanh)    ->  x / (1 + Exp(-2 u))          u the argument of the tanh

ONNX Runtime computes Sigmoid, Tanh and its fused gates as quotients of polynomials with an absolute
error near 1e-7. The relative error of small results is large, and quantized values after them
differ from ours. Its Exp is bit-identical to ours, and so are gates written with it.
"""

from __future__ import annotations

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node
from bitwright.passes.lower_integer.operands import has_quantize

_GATES = ("sigmoid", "silu", "swish", "quick_gelu")


def float_gates(graph: Graph) -> list[Node]:
    """The gates of float values in a quantized graph; runtimes use tables for quantized ones."""
    if not has_quantize(graph):
        return []
    return [node for node in graph.nodes if _is_gate(node) and not _reads_quantized(node)]


def _is_gate(node: Node) -> bool:
    is_tanh = node.op == "gelu" and node.attrs["approximate"] == "tanh"
    return (node.op in _GATES or is_tanh) and node.outputs[0].dtype == f32


def _reads_quantized(node: Node) -> bool:
    return next(node.operands).node.op == "dequantize"
