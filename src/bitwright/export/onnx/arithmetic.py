"""Dequantizes weight-only constants by plain arithmetic, which runtimes fold at load time.

    dequantize(w, s, z)  ->  f32(i32(w) - i32(z)) * s

ONNX Runtime fuses DequantizeLinear and MatMul to MatMulNBits, and OpenVINO fuses a cast to f32, Mul
and MatMul. Both then quantize activations to 8 bits, which a weight-only recipe does not ask for,
and OpenVINO 2026.4 is wrong if the last block is short. The cast through i32 matches neither
pattern: both runtimes fold the nodes to an f32 constant. OpenVINO has no 2-bit type, so 2-bit
constants are stored in 4 bits.
"""

from __future__ import annotations

import numpy as np

from bitwright.export.onnx.functions import region
from bitwright.export.onnx.operands import Operands
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import f32, i2, i4, i32, i64, u2, u4
from bitwright.ir.edit import map_bodies
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.registry import get
from bitwright.rewrite.replace import replace_nodes


def dequantize_matrix(e: Scope, q: Ref, scale: Ref, zero: Ref | None) -> Ref:
    """A dequantized matrix with one scale, or one for each column."""
    y = e.cast(q, i32)
    if zero is not None:
        y = e.Sub(y, e.cast(zero, i32))
    return e.Mul(e.cast(y, f32), scale)


def is_plain_dequantize(node: Node) -> bool:
    """Whether a node dequantizes integers of at most 8 bits with f32 scales."""
    q, scale, *zero = node.operands
    is_integer = q.dtype.is_integer and q.dtype.bits <= 8
    is_plain = scale.dtype == f32 == node.outputs[0].dtype and all(z.dtype == q.dtype for z in zero)
    return is_integer and is_plain


def write_plain_dequantize(e: Scope, node: Node) -> Ref:
    attrs = get(node.op).call_attrs(node.attrs)
    axis, block = attrs["axis"], attrs["block"]
    shape = [int(size) for size in next(node.operands).shape]
    split, spread = _shapes(shape, axis, block)

    def spread_out(e: Scope, parameter: Ref) -> Ref:
        """A scale or zero point, reshaped to broadcast."""
        if spread is not None:
            return e.Reshape(parameter, e.ints(spread))
        places = np.arange(shape[axis]) // block
        return e.Gather(parameter, e.constant(places, i64), axis=normalize_axis(axis, len(shape)))

    def body(e: Scope, q: Ref, scale: Ref, zero: Ref | None = None) -> tuple[Ref, ...]:
        y = e.cast(q, i32)
        if split != shape:
            y = e.Reshape(y, e.ints(split))
        if zero is not None:
            y = e.Sub(y, spread_out(e, e.cast(zero, i32)))
        y = e.Mul(e.cast(y, f32), spread_out(e, scale))
        return (y if split == shape else e.Reshape(y, e.ints(shape)),)

    return region(e, "dequantize", [e.values[v] for v in node.operands], attrs, body)[0]


def _shapes(shape: list[int], axis: int | None, block: int) -> tuple[list[int], list[int] | None]:
    """The shape with a separate axis for blocks, and the shape of the scales that broadcasts to it;
    None for the latter if the last block is short."""
    if axis is None:
        return shape, []
    at = normalize_axis(axis, len(shape))
    if not block:
        return shape, [size if i == at else 1 for i, size in enumerate(shape)]
    if shape[at] % block:
        return shape, None
    split = [*shape[:at], shape[at] // block, block, *shape[at + 1 :]]
    return split, [1 if i == at + 1 else size for i, size in enumerate(split)]


_WIDER = {i2: i4, u2: u4}


def without_two_bits(graph: Graph) -> Graph:
    """The graph with 4-bit constants in place of 2-bit ones that only `dequantize` reads."""
    graph = map_bodies(graph, without_two_bits)
    readers = Operands(graph).direct

    def change(node: Node) -> Node:
        if node.op not in ("constant", "parameter") or node.attrs.get("value") is None:
            return node
        value = node.outputs[0]
        wider = _WIDER.get(value.dtype)
        read = readers[value]
        only_dequantized = read and all(n.op == "dequantize" for n in read)
        if wider is None or not only_dequantized or value in graph.results:
            return node
        array = node.attrs["value"].astype(np.int8).astype(wider.numpy)
        return node.with_(
            attrs={**node.attrs, "value": array}, types=(value.tensor.with_dtype(wider),)
        )

    return replace_nodes(graph, change, bodies=False)
