"""Products with dequantized constants keep the codes: the kernel dequantizes as it reads them.

    matmul(x, dequantize(q))             ->  dequant_matmul(x, q')
    matmul(x, transpose(dequantize(q)))  ->  dequant_matmul(x, q)
    … with scales that are codes         ->  the same, times the scale of the scales
    dequant_matmul(x, q, …, bias)        ->  dequant_matmul(x, q, …) + bias
    dequant_matmul(half x, q)            ->  cast(dequant_matmul(cast(x), q)), summed in f32
    … with codes that the run makes      ->  matmul(x, transpose(dequantize(q)))
    matmul(x, dequantize(q[e, k, n]))    ->  matmul(x, w), decoded when the program is made

q'[n, k] has a scale for each block of k. Products of two sides of codes are `lower_integer`'s.
What has other scales becomes a product of real numbers, and the trace says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import DType, bf16, f16, f32
from bitwright.ir.graph import Graph, Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.interpret import run_node
from bitwright.ops.quant.quantize import is_quantized_dtype
from bitwright.passes.lower_integer.operands import constant_qvalues
from bitwright.rewrite import Match, Rule, Trace, rewrite

Array = np.ndarray[Any, Any]


def lower_weights(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


@dataclass(frozen=True)
class QuantizedMatrix:
    """(codes - zero) * scale [n, k] with scales and zero points for blocks of k, times a number."""

    qvalues: Array
    scale: Array
    zero: Array | None
    block: int
    factor: np.float32 | None


def quantized_matrix(value: Value) -> QuantizedMatrix | str:
    """What stands behind a constant matrix [k, n], or why it is no such thing."""
    perm: Sequence[int] = (0, 1)
    if value.node.op == "transpose":
        perm = value.node.attrs["perm"]
        (value,) = value.node.operands
    node = value.node
    if node.op != "dequantize" or value.rank != 2:
        return f"{value} is not a dequantized matrix"
    q, scale_value, zero_value = (*node.inputs, None)[:3]
    assert q is not None and scale_value is not None
    found = _scales(scale_value)
    qvalues = constant_qvalues(q)
    zero = None if zero_value is None else constant_value(zero_value)
    if qvalues is None or found is None or (zero is None and zero_value is not None):
        return f"{value} is not made of constants"
    if not _is_narrow(q.dtype):
        return f"{value} has {q.dtype} codes"
    if value.dtype != f32:
        return f"{value} is {value.dtype}"
    scale, factor = found
    axis, block = node.attrs.get("axis"), node.attrs.get("block") or 0
    depth, columns = (qvalues.shape[at] for at in perm)
    if axis is None:
        scale, zero = (_spread(p, columns) for p in (scale, zero))
        block = 0
    else:
        along = perm.index(normalize_axis(axis, 2))  # 0: the terms, 1: the columns
        if (along == 0) != bool(block):
            return f"{value} has scales along another axis than its terms in blocks"
        if block:
            scale, zero = (None if p is None else p.transpose(perm).T for p in (scale, zero))
        else:
            scale, zero = (None if p is None else p.reshape(-1, 1) for p in (scale, zero))
    assert scale is not None
    return QuantizedMatrix(qvalues.transpose(perm).T, scale, zero, block or max(depth, 1), factor)


def _is_narrow(element: DType) -> bool:
    return is_quantized_dtype(element) and element.bits <= 8


def _spread(parameter: Array | None, columns: int) -> Array | None:
    return None if parameter is None else np.broadcast_to(parameter.reshape(1, 1), (columns, 1))


def _scales(value: Value) -> tuple[Array, np.float32 | None] | None:
    """Constant scales, or codes of scales and the one number that they are multiples of."""
    known = constant_value(value)
    if known is not None:
        return known, None
    node = value.node
    if node.op != "dequantize" or node.attrs.get("axis") is not None or len(node.inputs) > 2:
        return None
    qvalues, step = (constant_value(v) for v in node.operands)
    if qvalues is None or step is None:
        return None
    if not qvalues.dtype.name.startswith("float8"):
        qvalues = qvalues.astype(np.float32)
    return qvalues, np.float32(step.reshape(-1)[0])


def _not_quantized(m: Match) -> str:
    x, w = m.root.inputs
    assert x is not None and w is not None
    if x.dtype != f32 or not x.rank:
        return f"{x} is no row of f32"
    found = quantized_matrix(w)
    return found if isinstance(found, str) else ""


def _quantized(op: Any, m: Match) -> Any:
    x, w = m.root.inputs
    assert w is not None
    found = quantized_matrix(w)
    assert isinstance(found, QuantizedMatrix)
    arrays = (found.qvalues, found.scale, found.zero)
    constants = [None if a is None else op.constant(np.ascontiguousarray(a)) for a in arrays]
    y = op.dequant_matmul(x, *constants, block=found.block)
    return y if found.factor is None else op.mul(y, found.factor)


def _has_no_bias(m: Match) -> str:
    inputs = m.root.inputs
    return "" if len(inputs) > 4 and inputs[4] is not None else "it has no bias"


def _add_bias(op: Any, m: Match) -> Any:
    *operands, bias = m.root.inputs
    return op.add(op.like(m.root, *operands), bias)


def _is_f32(m: Match) -> str:
    half = m.root.types[0].dtype in (f16, bf16)
    return "" if half and _has_no_bias(m) else "its rows are no half floats"


def _in_f32(op: Any, m: Match) -> Any:
    x, *weight = m.root.inputs
    assert x is not None
    return op.cast(op.like(m.root, op.cast(x, to=f32), *weight), to=x.dtype)


def _is_constant(m: Match) -> str:
    _, q, scale, zero = (*m.root.inputs, None)[:4]
    if all(v is None or v.is_constant for v in (q, scale, zero)):
        return "its weight is a constant"
    if zero is not None and zero.dtype.is_float:
        return "its zero point is no code"
    return "" if _has_no_bias(m) else "it has a bias"


def _expanded(op: Any, m: Match) -> Any:
    """Codes that the run makes are dequantized before the product."""
    x, q, scale, zero = (*m.root.inputs, None)[:4]
    assert x is not None
    w = op.dequantize(q, scale, zero, axis=1, block=m.root.attrs["block"], to=x.dtype)
    return op.matmul(x, op.transpose(w, perm=(1, 0)))


def _one_matrix(m: Match) -> str:
    w = m.root.inputs[1]
    assert w is not None
    if w.rank < 3 or w.node.op not in ("dequantize", "transpose"):
        return "its weight is not several dequantized matrices"
    return "" if _decoded(w) is not None else f"{w} is not made of constants"


def _decoded(value: Value) -> Array | None:
    """The numbers that constants stand for, through what dequantizes and turns them."""
    node = value.node
    if node.op not in ("dequantize", "transpose"):
        return constant_value(value)
    arrays = [None if v is None else _decoded(v) for v in node.inputs]
    if any(a is None and v is not None for a, v in zip(arrays, node.inputs, strict=True)):
        return None
    return np.asarray(run_node(node, arrays)[0])


def _with_decoded(op: Any, m: Match) -> Any:
    x, w, *rest = m.root.inputs
    assert w is not None
    return op.like(m.root, x, op.constant(_decoded(w)), *rest)


RULES = [
    Rule("product-with-several-matrices", lambda op: op.matmul(...), _with_decoded, _one_matrix),
    Rule(
        "experts-with-several-matrices",
        lambda op: op.grouped_matmul(...),
        _with_decoded,
        _one_matrix,
    ),
    Rule("product-with-codes", lambda op: op.matmul(...), _quantized, _not_quantized),
    Rule("bias-of-dequant-matmul", lambda op: op.dequant_matmul(...), _add_bias, _has_no_bias),
    Rule("codes-of-the-run-as-weight", lambda op: op.dequant_matmul(...), _expanded, _is_constant),
    Rule("half-rows-with-codes", lambda op: op.dequant_matmul(...), _in_f32, _is_f32),
]
