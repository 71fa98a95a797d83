"""Graph to text. The text is exact: `parse(to_text(g))` gives the same graph back.

graph @mlp {
  input %x: f32[batch, 784]
  param %w: f32[784, 10] = #1f0c…
  %y = matmul(%x, %w): f32[batch, 10]
  return %y
}
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bitwright.errors import GraphError
from bitwright.ir.dim import Dim
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.lexer import show_name
from bitwright.ir.payload import Array, blob_key, encode_blob, inline_text
from bitwright.ir.types import TensorType

BOUNDARY_WORDS = {"input": "input", "parameter": "param", "constant": "const", "state": "state"}


class Printer:
    """Collects the arrays that did not fit inline while it prints."""

    def __init__(self) -> None:
        self.blobs: dict[str, Array] = {}

    def graph(self, graph: Graph, indent: str = "") -> str:
        inner = indent + "  "
        lines = [
            f"graph @{json.dumps(graph.name)} {{"
            if not graph.name.isidentifier()
            else f"graph @{graph.name} {{"
        ]
        lines += [f"{inner}meta {json.dumps(k)} = {json.dumps(v)}" for k, v in graph.meta.items()]
        lines += [f"{inner}bound {name} <= {limit}" for name, limit in self._bounds(graph)]
        lines += [inner + self.node(node, inner) for node in graph.nodes]
        lines += [
            f"{inner}update {show_name(state.name)} = {show_name(value.name)}"
            for state, value in graph.updates
        ]
        results = ", ".join(
            show_name(value.name) + (f" as {json.dumps(name)}" if name != value.name else "")
            for name, value in graph.outputs
        )
        lines += [f"{inner}return {results}".rstrip(), indent + "}"]
        return "\n".join(lines)

    def _bounds(self, graph: Graph) -> list[tuple[str, int]]:
        symbols = {s for n in graph.nodes for t in n.types for s in t.symbols}
        symbols |= {s for n in graph.nodes for s in n.attr_symbols}
        return sorted((s.name, s.bound) for s in symbols if s.bound is not None)

    def node(self, node: Node, indent: str = "") -> str:
        at = f" at {json.dumps(node.loc)}" if node.loc else ""
        if node.is_boundary:
            return self._boundary(node) + at
        results = ", ".join(map(show_name, node.names))
        operands = ", ".join("none" if v is None else show_name(v.name) for v in node.inputs)
        attrs = ", ".join(f"{k}={self.attr(v, indent)}" for k, v in sorted(node.attrs.items()))
        types = ", ".join(map(str, node.types))
        return (
            f"{results} = {node.op}({operands})"
            + (f" {{{attrs}}}" if attrs else "")
            + f": {types}"
            + at
        )

    def _boundary(self, node: Node) -> str:
        text = f"{BOUNDARY_WORDS[node.op]} {show_name(node.name)}: {node.types[0]}"
        value = node.attrs.get("value")
        if value is not None:
            text += f" = {self.array(value)}"
        if node.op == "parameter" and not node.attrs.get("trainable", True):
            text += " frozen"
        return text

    def array(self, array: Array) -> str:
        text = inline_text(array, dtype(array.dtype))
        if text is None:
            text = blob_key(array)
            self.blobs[text] = array
        return text

    def attr(self, value: Any, indent: str = "") -> str:
        if value is None:
            return "none"
        if isinstance(value, (bool, np.bool_)):
            return "true" if value else "false"
        if isinstance(value, (int, np.integer)):
            return str(int(value))
        if isinstance(value, (float, np.floating)):
            return repr(float(value))
        if isinstance(value, str):
            return json.dumps(value)
        if isinstance(value, (DType, Dim)):
            return str(value)
        if isinstance(value, Graph):
            return self.graph(value, indent)
        if isinstance(value, np.ndarray):
            return f"tensor<{TensorType(dtype(value.dtype), value.shape)} = {self.array(value)}>"
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join(self.attr(item, indent) for item in value) + "]"
        raise GraphError(f"an attribute cannot hold a {type(value).__name__}")


def to_text(graph: Graph, data: bool = True) -> str:
    """The graph as text; `data=False` leaves out the section that holds large arrays."""
    printer = Printer()
    text = printer.graph(graph) + "\n"
    if data and printer.blobs:
        rows = [f'  {key} = "{encode_blob(array)}"' for key, array in printer.blobs.items()]
        text += "data {\n" + "\n".join(rows) + "\n}\n"
    return text


def node_text(value: Node | Value) -> str:
    """One node as a line of text."""
    return Printer().node(value.node if isinstance(value, Value) else value)
