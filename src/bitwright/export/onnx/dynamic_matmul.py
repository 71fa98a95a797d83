"""Products of rows that are quantized when the model runs, each with a range of its own.

In float, with the rows as they were before: a region of two nodes. The consumer may quantize the
rows its own way (ONNX Runtime fuses the two to MatMulNBits, which quantizes blocks of a row), or
multiply floats; both are as close to the float model as quantized rows are.

    matmul(dequantize(dynamic_quantize(x)), dequantize(w, t))
        ->  MatMul(x, DequantizeLinear(w, t))

Rows that are never negative would lose a bit to the sign in that product: there the weight is
dequantized by plain arithmetic (`arithmetic`), which leaves the product in float.

In integers, as one function on MatMulInteger:

    matmul(dequantize(x, s, z), dequantize(w, t))  ->  quantized_matmul(x, w, s, t, z)

    f32(x @ w - z * Σ w) * (s * t)

which is what integer execution computes, to the bit. MatMulInteger of ONNX Runtime takes no zero
point for each row, so the function takes it off with the sums of the columns. Written apart, ONNX
Runtime would make the dequantized weight and the product one node that rounds the rows again, to
codes of its own.
"""

from __future__ import annotations

from bitwright.export.onnx.arithmetic import arithmetic
from bitwright.export.onnx.forms import reduce
from bitwright.export.onnx.functions import call, region
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import f32, i8, i32, u8
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.registry import get
from bitwright.passes.signs import is_never_negative


def quantized_operands(node: Node) -> tuple[Node, Node] | None:
    """The nodes that dequantize the rows and the weight of such a product, or None."""
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
    """Whether each row of the last axis has one scale and one zero point, made by the run."""
    if not _is_quantized(node) or len(node.inputs) != 3 or not node.attrs.get("block"):
        return False
    qvalues, scale, zero = node.operands
    is_last = normalize_axis(node.attrs["axis"], qvalues.rank) == qvalues.rank - 1
    return is_last and scale.shape[-1] == 1 and zero.shape == scale.shape


def _is_weight(node: Node) -> bool:
    """Whether it is a matrix of constant codes, as it lies or turned around (a table that a lookup
    reads too), with one scale, or one for each column."""
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
    """The node that quantizes the rows which `x` dequantizes, where the run does it row by row."""
    made = next(x.operands).node
    if made.op != "dynamic_quantize" or not made.attrs.get("per_token"):
        return None
    rows = next(made.operands)
    is_whole = rows.dtype == f32 and rows.shape[-1] == x.attrs["block"]
    return made if is_whole and tuple(x.inputs) == made.outputs else None


def write_float_product(e: Scope, quantizer: Node, w: Node) -> Ref:
    weight, steps, *offset = (e.values[v] for v in w.operands)
    axis = w.attrs.get("axis")
    rows = next(quantizer.operands)
    stays_float = is_never_negative(rows)

    def body(e: Scope, x: Ref, w: Ref, steps: Ref, offset: Ref | None = None) -> tuple[Ref, ...]:
        if stays_float:
            return (e.MatMul(x, arithmetic(e, w, steps, offset)),)
        (y,) = e.emit("DequantizeLinear", [w, steps, offset], {"axis": axis}, dtypes=[f32])
        return (e.MatMul(x, y),)

    attrs = {"to": get(quantizer.op).call_attrs(quantizer.attrs)["to"]}
    return region(e, "dynamic_matmul", [e.values[rows], weight, steps, *offset], attrs, body)[0]


def write_quantized_product(e: Scope, x: Node, w: Node) -> Ref:
    qvalues, scale, zero = (e.values[v] for v in x.operands)
    weight, steps, *offset = (e.values[v] for v in w.operands)
    given = [qvalues, weight, scale, steps, zero, *offset]
    return call(e, "quantized_matmul", given, {"block": x.attrs["block"]}, _body)[0]


def _body(
    e: Scope, x: Ref, w: Ref, scale: Ref, steps: Ref, zero: Ref, offset: Ref | None = None
) -> tuple[Ref, ...]:
    wide = e.cast(w, i32)
    if offset is not None:
        wide = e.Sub(wide, e.cast(offset, i32))
    sums = reduce(e, "ReduceSum", wide, [0])
    total = e.Sub(e.MatMulInteger(x, w, None, offset), e.Mul(e.cast(zero, i32), sums))
    return (e.Mul(e.cast(total, f32), e.Mul(scale, steps)),)
