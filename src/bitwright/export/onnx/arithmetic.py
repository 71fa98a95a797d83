"""Weight-only constants in plain arithmetic, which runtimes fold when they load.

    dequantize(w, s, z)  ->  f32(i32(w) - i32(z)) * s

ONNX Runtime makes one MatMulNBits of DequantizeLinear and MatMul, OpenVINO one product of a cast to
f32, Mul and MatMul. Both then round activations to 8 bits, which is not what a weight-only recipe
is chosen for, and OpenVINO 2026.4 is wrong where a block is short. The way through i32 is no such
pattern: both fold the nodes to an f32 constant. OpenVINO has no 2-bit type: such constants are
stored in 4 bits.
"""

from __future__ import annotations

import numpy as np

from bitwright.export.onnx.functions import region
from bitwright.export.onnx.operands import Operands
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import f32, i2, i4, i32, i64, u2, u4
from bitwright.ir.edit import map_bodies, replace_nodes
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.registry import get


def arithmetic(e: Scope, q: Ref, scale: Ref, zero: Ref | None) -> Ref:
    """A matrix with one scale, or one for each column."""
    y = e.cast(q, i32)
    if zero is not None:
        y = e.Sub(y, e.cast(zero, i32))
    return e.Mul(e.cast(y, f32), scale)


def can_be_arithmetic(node: Node) -> bool:
    """Whether a dequantized constant is an integer of at most 8 bits with f32 scales."""
    q, scale, *zero = node.operands
    is_integer = q.dtype.is_integer and q.dtype.bits <= 8
    is_plain = scale.dtype == f32 == node.outputs[0].dtype and all(z.dtype == q.dtype for z in zero)
    return is_integer and is_plain


def write_arithmetic(e: Scope, node: Node) -> Ref:
    attrs = get(node.op).call_attrs(node.attrs)
    axis, block = attrs["axis"], attrs["block"]
    shape = [int(size) for size in next(node.operands).shape]
    split, spread = _shapes(shape, axis, block)

    def spread_out(e: Scope, parameter: Ref) -> Ref:
        """A scale or zero point so that it broadcasts."""
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
    """The shape in which blocks lie on an axis of their own, and the scales' shape in it; None for
    those where the last block is short."""
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
    """The same graph with 2-bit constants that only `dequantize` reads stored in 4 bits."""
    graph = map_bodies(graph, without_two_bits)
    readers = Operands(graph).direct

    def change(node: Node) -> Node:
        if node.op not in ("constant", "parameter") or node.attrs.get("value") is None:
            return node
        value = node.outputs[0]
        wider = _WIDER.get(value.dtype)
        read = readers[value]
        is_read_so = read and all(n.op == "dequantize" for n in read) and value not in graph.results
        if wider is None or not is_read_so:
            return node
        array = node.attrs["value"].astype(np.int8).astype(wider.numpy)
        return node.with_(
            attrs={**node.attrs, "value": array}, types=(value.tensor.with_dtype(wider),)
        )

    return replace_nodes(graph, change, bodies=False)
