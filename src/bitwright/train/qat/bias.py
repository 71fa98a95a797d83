"""Biases of integer products in i32, as `bw.quantize` stores them.

    conv(dequantize(x), dequantize(w), bias)    ->  bias = dequantize(q, f32(s_x s_w))
    matmul(dequantize(x), dequantize(w)) + bias

q = rne(bias / (s_x s_w)) in f64 is the number that `lower_integer` adds to the sums, in training
and in the deployed model. A bias whose q does not survive the rounding of its scale to f32 stays
f32.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32, i8, u8
from bitwright.ir.edit import Replacement, replace_nodes
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.builder import Builder
from bitwright.quant.model.quantized_inputs import builder_for
from bitwright.quant.model.stored_weights import MAX_BIAS


def store_biases(graph: Graph) -> Graph:
    """The graph with f32 biases of integer products in i32."""
    b = builder_for(graph)
    uses = graph.uses
    single = {node.outputs[0].name for node in graph.nodes if uses[node.outputs[0]] == 1}

    def change(node: Node) -> Node | Replacement:
        if node.op == "conv" and len(node.inputs) > 2:
            found = _stored(b, node, node.inputs[2])
            if found is not None:
                made, stored = found
                kept = node.with_(inputs=(*node.inputs[:2], stored))
                return Replacement([*made, kept], kept.outputs)
        if node.op == "add":
            for place, other in ((0, 1), (1, 0)):
                y, bias = node.inputs[place], node.inputs[other]
                if y is None or y.node.op != "matmul" or y.name not in single:
                    continue
                found = _stored(b, y.node, bias)
                if found is not None:
                    made, stored = found
                    pair = (y, stored) if place == 0 else (stored, y)
                    kept = node.with_(inputs=pair)
                    return Replacement([*made, kept], kept.outputs)
        return node

    return replace_nodes(graph, change)


def _stored(b: Builder, product: Node, bias: Value | None) -> tuple[list[Node], Value] | None:
    """Nodes of the stored bias and its value; None if it stays as it is."""
    known = None if bias is None else constant_value(bias)
    if bias is None or known is None or bias.dtype != f32 or known.ndim != 1:
        return None
    x, w = product.inputs[:2]
    sx, sw = _tensor_scale(x), _channel_scale(w, product)
    if sx is None or sw is None or (sw.size not in (1, known.size)):
        return None
    exact = np.broadcast_to(np.float64(sx) * sw.astype(np.float64), known.shape)
    qvalues = np.rint(known.astype(np.float64) / exact)
    scale = exact.astype(np.float32)
    if not (np.abs(qvalues).max(initial=0) < MAX_BIAS and (scale > 0).all()):
        return None
    if (np.rint(qvalues * scale.astype(np.float64) / exact) != qvalues).any():
        return None
    start = len(b.nodes)
    with b.at(product.loc):
        stored = b.constant(qvalues.astype(np.int32), name=f"{bias.name}.i32")
        value = b.dequantize(stored, scale, axis=0)
    return b.nodes[start:], value


def _tensor_scale(value: Value | None) -> float | None:
    """The constant scale of an 8-bit activation."""
    node = None if value is None else value.node
    if node is None or node.op != "dequantize" or node.attrs.get("axis") is not None:
        return None
    q, scale = node.inputs[:2]
    assert q is not None and scale is not None
    known = constant_value(scale)
    if known is None or q.dtype not in (i8, u8) or q.is_constant:
        return None
    return float(known.reshape(-1)[0])


def _channel_scale(value: Value | None, product: Node) -> Array | None:
    """The constant scales of a weight along the output channels."""
    node = None if value is None else value.node
    is_transposed = node is not None and node.op == "transpose"
    if node is not None and is_transposed:
        node = next(iter(node.operands)).node
    if node is None or node.op != "dequantize" or node.attrs.get("block"):
        return None
    q, scale = node.inputs[:2]
    assert q is not None and scale is not None
    known, axis = constant_value(scale), node.attrs.get("axis")
    if known is None or not q.is_constant or q.dtype != i8:
        return None
    if axis is None:
        return known.reshape(-1)
    channel = 0 if product.op == "conv" or is_transposed else q.rank - 1
    return known.reshape(-1) if axis % q.rank == channel else None
