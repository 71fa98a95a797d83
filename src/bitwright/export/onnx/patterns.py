"""Patterns of several nodes that are written together.

A matmul or convolution absorbs the nodes that dequantize its operands if no other node reads them:
as a region or function (`dynamic_matmul`, `static_conv`), or as MatMulNBits (`nbits`). Depending on
the options, constants that are multiplied with floats are dequantized by plain arithmetic. For
bit-identical results in ONNX Runtime a sum before a norm is a Sum instead of an Add, and gates are
written with Exp (`gates`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from bitwright.export.onnx.arithmetic import is_plain_dequantize, write_plain_dequantize
from bitwright.export.onnx.dynamic_matmul import (
    float_rows,
    quantized_operands,
    write_float_matmul,
    write_quantized_matmul,
)
from bitwright.export.onnx.gates import float_gates
from bitwright.export.onnx.nbits import Parts, weight_only, write_weight_only
from bitwright.export.onnx.operands import Operands
from bitwright.export.onnx.options import Options
from bitwright.export.onnx.scalars import scalar_form
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.export.onnx.static_conv import StaticConv, is_fused, static_conv, write_static_conv
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value
from bitwright.rewrite.match import uniform


@dataclass
class Patterns:
    writers: dict[Node, Callable[[Scope], Ref]] = field(default_factory=dict)
    """The functions that write the last nodes of the patterns."""
    absorbed: set[Node] = field(default_factory=set)
    """Nodes that only these patterns read, and that are not written."""


def match_patterns(scope: Scope) -> Patterns:
    """The patterns in the scope's graph."""
    graph, options = scope.graph, scope.session.options
    found = Patterns()
    taken: list[Value] = []
    for node in graph.nodes:
        if (operands := quantized_operands(node)) is not None:
            found.writers[node] = _product(options, *operands)
            taken += _taken_by_product(options, *operands)
        elif options.weights == "nbits" and (parts := weight_only(node)):
            found.writers[node] = _weight_only(node, parts)
            taken += [v for v in (node.inputs[1], *parts[1:]) if v is not None]
    if options.activations == "float":
        readers = Operands(graph)
        for conv in filter(None, map(static_conv, graph.nodes)):
            if not is_fused(conv, readers):
                found.writers[conv.node] = _static_conv(conv)
                taken += conv.taken
    found.absorbed = _only_read_by(graph, found.writers, taken)
    if options.weights == "arithmetic":
        for node in Operands(graph).weight_only() - found.absorbed:
            if is_plain_dequantize(node):
                found.writers.setdefault(node, _plain_dequantize(node))
    if options.rounding == "onnxruntime":
        found.writers.update({node: _sum(node) for node in _sums_before_norms(graph)})
        found.writers.update({node: _scalar_form(node) for node in float_gates(graph)})
    return found


def _sums_before_norms(graph: Graph) -> list[Node]:
    """Residual sums of f32 that a norm reads.

    ONNX Runtime fuses Add and LayerNormalization to SkipLayerNormalization, whose CPU kernel is
    scalar: it is slower than the two nodes, and rounds differently from a norm without a sum, so
    that quantized values after it differ. ONNX Runtime does not fuse a Sum.
    """
    read = [value.node for node in graph.nodes if (value := _read_by_norm(node)) is not None]
    return [node for node in read if node.op == "add" and all(map(_is_residual, node.operands))]


def _read_by_norm(node: Node) -> Value | None:
    """The operand of a norm, or of a decomposed one, which begins with x - mean(x) or mean(x²)."""
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
    """Whether a value can be an operand of a residual sum; one of rank 1 is a bias."""
    return value.dtype == f32 and value.rank > 1


def _sum(node: Node) -> Callable[[Scope], Ref]:
    return lambda e: e.Sum(*(e.values[value] for value in node.operands))


def _scalar_form(node: Node) -> Callable[[Scope], Ref]:
    def write(e: Scope) -> Ref:
        operands = tuple(e.values[value] for value in node.operands)
        written: Ref = scalar_form(e, node.op, operands, dict(node.attrs))
        return written

    return write


def _product(options: Options, x: Node, w: Node) -> Callable[[Scope], Ref]:
    quantizer = float_rows(x) if options.activations != "integer" else None
    if quantizer is not None:
        return lambda e: write_float_matmul(e, quantizer, w)
    return lambda e: write_quantized_matmul(e, x, w)


def _taken_by_product(options: Options, x: Node, w: Node) -> list[Value]:
    quantizer = float_rows(x) if options.activations != "integer" else None
    quantized = () if quantizer is None else quantizer.outputs
    return [x.outputs[0], w.outputs[0], *quantized]


def _static_conv(conv: StaticConv) -> Callable[[Scope], Ref]:
    return lambda e: write_static_conv(e, conv)


def _weight_only(node: Node, parts: Parts) -> Callable[[Scope], Ref]:
    return lambda e: write_weight_only(e, node, parts)


def _plain_dequantize(node: Node) -> Callable[[Scope], Ref]:
    return lambda e: write_plain_dequantize(e, node)


def _only_read_by(graph: Graph, readers: Iterable[Node], taken: list[Value]) -> set[Node]:
    """The nodes of these values that only `readers`, or other such nodes, read."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    inside = Counter(v for node in readers for v in node.operands)
    absorbed: set[Node] = set()
    for node in sorted({v.node for v in taken}, key=lambda n: order[n], reverse=True):
        if all(inside[value] == graph.uses[value] for value in node.outputs):
            absorbed.add(node)
            inside.update(node.operands)
    return absorbed
