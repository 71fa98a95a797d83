"""Nodes whose form depends on what stands around them.

A product takes in the nodes that dequantize its operands where those are read by nothing else: as
a function on MatMulInteger (`coded`), or as MatMulNBits where that is asked for (`nbits`). A sum
that a norm reads is a Sum instead of an Add. Gates among codes are spelled out with Exp (`gates`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bitwright.export.onnx.coded import coded_operands, write_coded_product
from bitwright.export.onnx.gates import gates_among_codes
from bitwright.export.onnx.nbits import Parts, weight_only, write_weight_only
from bitwright.export.onnx.scalars import scalar_form
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value
from bitwright.rewrite.match import uniform


@dataclass
class Joined:
    writers: dict[Node, Callable[[Scope], Ref]] = field(default_factory=dict)
    """How these nodes are written."""
    absorbed: set[Node] = field(default_factory=set)
    """Nodes that nothing but these products reads."""


def joined_nodes(scope: Scope) -> Joined:
    graph = scope.graph
    found = Joined()
    taken: list[Value] = []
    for node in graph.nodes:
        if (operands := coded_operands(node)) is not None:
            found.writers[node] = _coded(*operands)
            taken += [v.outputs[0] for v in operands]
        elif scope.session.options.weights == "nbits" and (parts := weight_only(node)):
            found.writers[node] = _weight_only(node, parts)
            taken += [v for v in (node.inputs[1], *parts[1:]) if v is not None]
    found.absorbed = _only_read_by(graph, set(found.writers), taken)
    found.writers.update({node: _sum(node) for node in _sums_before_norms(graph)})
    found.writers.update({node: _spelled_out(node) for node in gates_among_codes(graph)})
    return found


def _sums_before_norms(graph: Graph) -> list[Node]:
    """Residual sums of f32 that a norm reads.

    ONNX Runtime fuses Add and LayerNormalization to SkipLayerNormalization, whose kernel for CPUs
    goes through a row one by one: it is slower than the two, and rounds otherwise than a norm
    without a sum does there and here, so that codes behind it differ. Nothing fuses a Sum, which
    says the same.
    """
    read = [value.node for node in graph.nodes if (value := _read_by_norm(node)) is not None]
    return [node for node in read if node.op == "add" and all(map(_is_residual, node.operands))]


def _read_by_norm(node: Node) -> Value | None:
    """What a norm reads, or one that is spelled out: it begins with x - mean(x), or mean(x²)."""
    if node.op in ("layer_norm", "rms_norm"):
        return next(node.operands)
    if node.op == "sub":
        x, mean = node.operands
        return x if mean.node.op == "reduce_mean" and next(mean.node.operands) is x else None
    return _squared(next(node.operands).node) if node.op == "reduce_mean" else None


def _squared(node: Node) -> Value | None:
    """x of x²."""
    if node.op not in ("pow", "mul"):
        return None
    x, other = node.operands
    return x if (other is x if node.op == "mul" else uniform(other) == 2) else None


def _is_residual(value: Value) -> bool:
    """Whether it can be one side of such a sum; a row is the bias of a product."""
    return value.dtype == f32 and value.rank > 1


def _sum(node: Node) -> Callable[[Scope], Ref]:
    return lambda e: e.Sum(*(e.values[value] for value in node.operands))


def _spelled_out(node: Node) -> Callable[[Scope], Ref]:
    def write(e: Scope) -> Ref:
        operands = tuple(e.values[value] for value in node.operands)
        written: Ref = scalar_form(e, node.op, operands, dict(node.attrs))
        return written

    return write


def _coded(x: Node, w: Node) -> Callable[[Scope], Ref]:
    return lambda e: write_coded_product(e, x, w)


def _weight_only(node: Node, parts: Parts) -> Callable[[Scope], Ref]:
    return lambda e: write_weight_only(e, node, parts)


def _only_read_by(graph: Graph, readers: set[Node], taken: list[Value]) -> set[Node]:
    """The nodes of these values that only `readers`, or each other, read."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    inside = Counter(v for node in readers for v in node.operands)
    absorbed: set[Node] = set()
    for value in sorted(set(taken), key=lambda v: order[v.node], reverse=True):
        if inside[value] == graph.uses[value]:
            absorbed.add(value.node)
            inside.update(value.node.operands)
    return absorbed
