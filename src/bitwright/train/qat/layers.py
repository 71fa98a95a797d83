"""Which weights of a quantized graph get which width, and which constants are trained."""

from __future__ import annotations

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value
from bitwright.quant.model.recipe import matches
from bitwright.quant.model.report import QuantizationReport
from bitwright.train.qat.config import Bits, QatConfig

_PRODUCTS = ("matmul", "conv", "grouped_matmul", "conv_transpose", "lstm", "gru", "rnn")
_NORMS = ("layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm")
MASK = 1e4
"""Constants with a larger magnitude are masks, not biases."""


def weights_of(graph: Graph) -> dict[Value, list[Node]]:
    """The quantized constants that products read as weights, with the products, in order."""
    origins: dict[Value, Value] = {}
    found: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        first = node.inputs[0] if node.inputs else None
        if node.op == "dequantize" and first is not None and first.is_constant and first.rank > 1:
            origins[node.outputs[0]] = first
        elif node.op in ("transpose", "reshape") and first in origins:
            origins[node.outputs[0]] = origins[first]
        elif node.op in _PRODUCTS:
            for value in node.operands:
                if value in origins:
                    found.setdefault(origins[value], []).append(node)
    return found


def layer_bits(
    graph: Graph, config: QatConfig, report: QuantizationReport | None
) -> dict[Value, Bits]:
    """The widths that the config asks for, by quantized constant."""
    found = weights_of(graph)
    bits: dict[Value, Bits] = {}
    if config.weight_bits is not None:
        bits = dict.fromkeys(found, config.weight_bits)
    if config.keeps_ends:
        for value in [*found][:1] + [*found][-1:]:
            bits.pop(value, None)
    layers = {} if report is None else {layer.value: layer for layer in report.layers}
    names: dict[Value, set[str]] = {}
    for value, products in found.items():
        names[value] = {value.name, value.name.removesuffix(".weight")}
        for product in products:
            layer = layers.get(product.name)
            more = () if layer is None else (layer.name, layer.weight)
            names[value].update(name for name in (product.name, *more) if name)
    for pattern, asked in config.layers.items():
        chosen = [v for v, own in names.items() if any(matches(pattern, name) for name in own)]
        if not chosen:
            known = sorted({min(own, key=len) for own in names.values()})
            raise TrainingError(
                f"no quantized layer matches {pattern!r}", expected=", ".join(known)
            )
        bits.update(dict.fromkeys(chosen, asked))
    return bits


def is_trainable_constant(graph: Graph) -> set[Node]:
    """The f32 constants that training changes: weights and biases of float layers, norms,
    embedding tables."""
    found: set[Node] = set()
    for node in graph.nodes:
        for place, value in enumerate(node.inputs):
            if value is None or not value.is_constant or value.dtype != f32:
                continue
            array = value.node.attrs["value"]
            if array.size < 2 or not np.isfinite(array).all() or np.abs(array).max() > MASK:
                continue
            if _is_trained(node, place):
                found.add(value.node)
    return found


def _is_trained(node: Node, place: int) -> bool:
    if node.op in _PRODUCTS or node.op in _NORMS:
        is_statistic = node.op == "batch_norm" and place > 2
        return place > 0 and not is_statistic
    if node.op == "gather":
        return place == 0
    return node.op == "add" and len(set(node.operands)) == 2
