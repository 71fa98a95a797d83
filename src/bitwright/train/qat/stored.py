"""Quantized weights of files in the form that `prepare_qat` trains.

    dequant_matmul(x, q, scale)   ->  matmul(x, transpose(dequantize(q, scale)))
    u8 weights with zero points   ->  i8 weights, where the distances to the zero points fit

Exported files hold u8 weights with zero point 128 by default, and MatMulNBits for some runtimes.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32
from bitwright.ir.edit import Replacement, replace_nodes
from bitwright.ir.graph import Graph, Node
from bitwright.ops.quant.quantize import spread
from bitwright.quant.model.quantized_inputs import builder_for


def expand_products(graph: Graph) -> Graph:
    """The graph with products of constant quantized weights as dequantize and matmul."""
    b = builder_for(graph)

    def change(node: Node) -> Node | Replacement:
        if node.op != "dequant_matmul" or node.outputs[0].dtype != f32:
            return node
        x, q, scale, zero, bias = (*node.inputs, None, None)[:5]
        assert q is not None
        if q.rank != 2 or (zero is not None and zero.dtype != q.dtype):
            return node
        start = len(b.nodes)
        with b.at(node.loc):
            w = b.dequantize(q, scale, zero, axis=1, block=node.attrs["block"])
            y = b.matmul(x, b.transpose(w, perm=(1, 0)))
            y = y if bias is None else b.add(y, bias)
        return Replacement(b.nodes[start:], (y,))

    return replace_nodes(graph, change, bodies=False)


def around_zero(qvalues: Array, zero: Array | None, axis: int | None, block: int) -> Array | None:
    """Quantized weights as i8 with zero point 0; None if i8 cannot hold them."""
    wide = qvalues.astype(np.int16)
    if zero is not None:
        offsets = spread(zero.astype(np.int16), wide.shape, axis, block)
        assert offsets is not None
        wide = wide - offsets
    fits = wide.min(initial=0) >= -128 and wide.max(initial=0) <= 127
    return wide.astype(np.int8) if fits else None
