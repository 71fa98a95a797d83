"""Matmuls with dynamic per-token quantization of the rows.

In float: a region of two nodes that reads the unquantized rows. The consumer may quantize the rows
itself (ONNX Runtime fuses the two nodes to MatMulNBits, which quantizes blocks of a row), or
multiply floats; both are as accurate as quantized rows.

    matmul(dequantize(dynamic_quantize(x)), dequantize(w, t))
        ->  MatMul(x, DequantizeLinear(w, t))

MatMulNBits quantizes to signed values, which wastes a bit on rows that are never negative. For
these the weight is dequantized by plain arithmetic (`arithmetic`), and the product stays in float.

In integers: one function with MatMulInteger.

    matmul(dequantize(x, s, z), dequantize(w, t))  ->  quantized_matmul(x, w, s, t, z)

    f32(x @ w - z * Σ w) * (s * t)

This is bit-identical to integer execution. MatMulInteger of ONNX Runtime takes no zero point per
row, so the function subtracts it with the column sums. From separate nodes ONNX Runtime would fuse
the dequantized weight and the product to one node that quantizes the rows again.
"""

from __future__ import annotations

from bitwright.export.onnx.arithmetic import dequantize_matrix
from bitwright.export.onnx.forms import reduce
from bitwright.export.onnx.functions import call, region
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import f32, i8, i32, u8
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.registry import get
from bitwright.passes.signs import is_never_negative


def quantized_operands(node: Node) -> tuple[Node, Node] | None:
    """The nodes that dequantize the rows and the weight of such a matmul, or None."""
    if node.op != "matmul" or node.outputs[0].dtype != f32:
        return None
    x, w = node.operands
    return (x.node, w.node) if _is_quantized_by_rows(x.node) and _is_weight(w.node) else None


def _is_quantized(node: Node) -> bool:
    if node.op != "dequantize" or node.outputs[0].dtype != f32 or node.outputs[0].rank < 2:
        return False
    qvalues, scale, *zero = node.operands
    return (
        qvalues.dtype in (i8, u8)
        and scale.dtype == f32
        and all(z.dtype == qvalues.dtype for z in zero)
    )


def _is_quantized_by_rows(node: Node) -> bool:
    """Whether each row of the last axis has one scale and one zero point."""
    if not _is_quantized(node) or len(node.inputs) != 3 or not node.attrs.get("block"):
        return False
    qvalues, scale, zero = node.operands
    is_last = normalize_axis(node.attrs["axis"], qvalues.rank) == qvalues.rank - 1
    return is_last and scale.shape[-1] == 1 and zero.shape == scale.shape


def _is_weight(node: Node) -> bool:
    """Whether the node dequantizes a constant matrix or the transpose of one (of a table that a
    gather reads too), with one scale, or one for each column."""
    if not _is_quantized(node) or node.outputs[0].rank != 2 or node.attrs.get("block"):
        return False
    qvalues, *parameters = node.operands
    if qvalues.node.op == "transpose":
        (qvalues,) = qvalues.node.operands
    if not all(v.node.op in ("constant", "parameter") for v in (qvalues, *parameters)):
        return False
    axis = node.attrs.get("axis")
    return all(v.rank == 0 for v in list(node.operands)[1:]) if axis is None else axis in (1, -1)


def float_rows(x: Node) -> Node | None:
    """The node that quantizes the rows that `x` dequantizes, if it is dynamic and per token."""
    made = next(x.operands).node
    if made.op != "dynamic_quantize" or not made.attrs.get("per_token"):
        return None
    rows = next(made.operands)
    is_whole = rows.dtype == f32 and rows.shape[-1] == x.attrs["block"]
    return made if is_whole and tuple(x.inputs) == made.outputs else None


def write_float_matmul(e: Scope, quantizer: Node, w: Node) -> Ref:
    weight, scale, *zero = (e.values[v] for v in w.operands)
    axis = w.attrs.get("axis")
    rows = next(quantizer.operands)
    stays_float = is_never_negative(rows)

    def body(e: Scope, x: Ref, w: Ref, scale: Ref, zero: Ref | None = None) -> tuple[Ref, ...]:
        if stays_float:
            return (e.MatMul(x, dequantize_matrix(e, w, scale, zero)),)
        (y,) = e.emit("DequantizeLinear", [w, scale, zero], {"axis": axis}, dtypes=[f32])
        return (e.MatMul(x, y),)

    attrs = {"to": get(quantizer.op).call_attrs(quantizer.attrs)["to"]}
    return region(e, "dynamic_matmul", [e.values[rows], weight, scale, *zero], attrs, body)[0]


def write_quantized_matmul(e: Scope, x: Node, w: Node) -> Ref:
    rows, x_scale, x_zero = (e.values[v] for v in x.operands)
    weight, w_scale, *w_zero = (e.values[v] for v in w.operands)
    given = [rows, weight, x_scale, w_scale, x_zero, *w_zero]
    return call(e, "quantized_matmul", given, {"block": x.attrs["block"]}, _body)[0]


def _body(
    e: Scope, x: Ref, w: Ref, x_scale: Ref, w_scale: Ref, x_zero: Ref, w_zero: Ref | None = None
) -> tuple[Ref, ...]:
    wide = e.cast(w, i32)
    if w_zero is not None:
        wide = e.Sub(wide, e.cast(w_zero, i32))
    sums = reduce(e, "ReduceSum", wide, [0])
    total = e.Sub(e.MatMulInteger(x, w, None, w_zero), e.Mul(e.cast(x_zero, i32), sums))
    return (e.Mul(e.cast(total, f32), e.Mul(x_scale, w_scale)),)
