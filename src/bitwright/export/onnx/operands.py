"""Finds dequantized constants that are multiplied with quantized activations, or with floats.

matmul(dequantize(x), dequantize(w))     an integer product, if the runtime fuses it
matmul(x, dequantize(w))                 weight-only
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from bitwright.ir.graph import Graph, Node, Value

_RECURRENT = ("lstm", "gru", "rnn")
_MOVES = ("reshape", "transpose", "slice", "concat", "expand", "squeeze", "unsqueeze")


class Operands:
    """The readers of a graph's values, looking through ops that only move elements."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.direct: dict[Value, list[Node]] = defaultdict(list)
        """The nodes that read a value, including those that only move it."""
        for node in graph.nodes:
            for value in node.operands:
                self.direct[value].append(node)

    def weight_only(self) -> set[Node]:
        """Nodes that dequantize a constant for ops whose other operands are all float."""
        found = (node for node in self.graph.nodes if dequantizes_constant(node))
        return {node for node in found if not self.meets_quantized(node)}

    def meets_quantized(self, node: Node) -> bool:
        """Whether a reader of this dequantized constant also reads a dequantized activation."""
        return any(
            dequantizes_activation(_source(value).node)
            for reader in self.readers(node.outputs[0])
            if reader.op not in _RECURRENT
            for value in reader.operands
        )

    def readers(self, value: Value) -> Iterator[Node]:
        """The nodes that compute with a value."""
        for node in self.direct[value]:
            if node.op in _MOVES:
                yield from self.readers(node.outputs[0])
            else:
                yield node


def dequantizes_constant(node: Node) -> bool:
    return node.op == "dequantize" and next(node.operands).node.op in ("constant", "parameter")


def dequantizes_activation(node: Node) -> bool:
    return node.op == "dequantize" and not dequantizes_constant(node)


def _source(value: Value) -> Value:
    """The value before ops that only move elements."""
    while value.node.op in _MOVES:
        value = next(value.node.operands)
    return value
