"""Matmuls with dequantized constants become weight-only matmuls that read quantized weights.

    matmul(x, dequantize(q))             ->  dequant_matmul(x, q')
    matmul(x, transpose(dequantize(q)))  ->  dequant_matmul(x, q)
    … with quantized scales              ->  the same, times the scale of the scales
    dequant_matmul(x, q, …, bias)        ->  dequant_matmul(x, q, …) + bias
    dequant_matmul(half x, q)            ->  cast(dequant_matmul(cast(x), q)), summed in f32
    … with a non-constant q              ->  matmul(x, transpose(dequantize(q)))
    matmul(x, dequantize(q[e, k, n]))    ->  matmul(x, w), dequantized at compile time

q'[n, k] has a scale per block of k. `lower_integer` handles products of two quantized operands. A
weight with other scales becomes a floating-point matmul, and the trace says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import bf16, f16, f32
from bitwright.ir.graph import Graph, Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.interpret import run_node
from bitwright.ops.quant.quantize import is_quantized_dtype
from bitwright.passes.lower_integer.operands import constant_qvalues
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite

Array = np.ndarray[Any, Any]


def lower_weights(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def lower_weights_of_half_rows(graph: Graph, trace: Trace) -> Graph:
    """`lower_weights` for targets whose kernels take f16 and bf16 rows."""
    return rewrite(graph, RULES[:-1], trace)


@dataclass(frozen=True)
class QuantizedMatrix:
    """(q - zero) * scale * factor [n, k] with scales and zero points per block of k."""

    qvalues: Array
    scale: Array
    zero: Array | None
    block: int
    factor: np.float32 | None


def match_quantized_matrix(value: Value) -> QuantizedMatrix | str:
    """The quantized constant behind a matrix [k, n], or why there is none."""
    perm: Sequence[int] = (0, 1)
    if value.node.op == "transpose":
        perm = value.node.attrs["perm"]
        (value,) = value.node.operands
    node = value.node
    if node.op != "dequantize" or value.rank != 2:
        return f"{value} is not a dequantized matrix"
    q, scale_value, zero_value = (*node.inputs, None)[:3]
    assert q is not None and scale_value is not None
    found = _constant_scales(scale_value)
    qvalues = constant_qvalues(q)
    zero = None if zero_value is None else constant_value(zero_value)
    if qvalues is None or found is None or (zero is None and zero_value is not None):
        return f"{value} is not made of constants"
    if not is_quantized_dtype(q.dtype) or q.dtype.bits > 8:
        return f"{value} is dequantized from {q.dtype}"
    if value.dtype != f32:
        return f"{value} is {value.dtype}"
    scale, factor = found
    axis, block = node.attrs.get("axis"), node.attrs.get("block") or 0
    depth, columns = (qvalues.shape[at] for at in perm)
    if axis is not None and (perm.index(normalize_axis(axis, 2)) == 0) != bool(block):
        return f"{value} has scales along another axis than blocks of its reduction axis"

    def arranged(parameter: Array) -> Array:
        """[n, blocks of k]"""
        if axis is None:
            return np.broadcast_to(parameter.reshape(1, 1), (columns, 1))
        return parameter.transpose(perm).T if block else parameter.reshape(-1, 1)

    return QuantizedMatrix(
        qvalues.transpose(perm).T,
        arranged(scale),
        None if zero is None else arranged(zero),
        (block if axis is not None else 0) or max(depth, 1),
        factor,
    )


def _constant_scales(value: Value) -> tuple[Array, np.float32 | None] | None:
    """Constant scales; for quantized scales, their quantized values and the scale of those."""
    known = constant_value(value)
    if known is not None:
        return known, None
    node = value.node
    if node.op != "dequantize" or node.attrs.get("axis") is not None or len(node.inputs) > 2:
        return None
    qvalues, scale = (constant_value(v) for v in node.operands)
    if qvalues is None or scale is None:
        return None
    if not qvalues.dtype.name.startswith("float8"):
        qvalues = qvalues.astype(np.float32)
    return qvalues, np.float32(scale.reshape(-1)[0])


def _plan_matmul(m: Match) -> QuantizedMatrix | str:
    x, w = m.root.inputs
    assert x is not None and w is not None
    if x.dtype != f32 or not x.rank:
        return f"{x} is not f32, or is a scalar"
    return match_quantized_matrix(w)


def _lower_matmul(op: Any, m: Match, found: QuantizedMatrix) -> Any:
    x = m.root.inputs[0]
    arrays = (found.qvalues, found.scale, found.zero)
    constants = [None if a is None else op.constant(np.ascontiguousarray(a)) for a in arrays]
    y = op.dequant_matmul(x, *constants, block=found.block)
    return y if found.factor is None else op.mul(y, found.factor)


def _why_not_bias(m: Match) -> str:
    inputs = m.root.inputs
    return "" if len(inputs) > 4 and inputs[4] is not None else "it has no bias"


def _add_bias(op: Any, m: Match) -> Any:
    *operands, bias = m.root.inputs
    return op.add(op.like(m.root, *operands), bias)


def _why_not_f32(m: Match) -> str:
    is_half = m.root.outputs[0].dtype in (f16, bf16)
    return "" if is_half and _why_not_bias(m) else "its input is not f16 or bf16"


def _compute_in_f32(op: Any, m: Match) -> Any:
    x, *weight = m.root.inputs
    assert x is not None
    return op.cast(op.like(m.root, op.cast(x, to=f32), *weight), to=x.dtype)


def _why_not_dynamic(m: Match) -> str:
    _, q, scale, zero = (*m.root.inputs, None)[:4]
    if all(v is None or v.is_constant for v in (q, scale, zero)):
        return "its weight is a constant"
    if zero is not None and zero.dtype.is_float:
        return "its zero point is a float"
    return "" if _why_not_bias(m) else "it has a bias"


def _dequantize_dynamic(op: Any, m: Match) -> Any:
    x, q, scale, zero = (*m.root.inputs, None)[:4]
    assert x is not None
    w = op.dequantize(q, scale, zero, axis=1, block=m.root.attrs["block"], to=x.dtype)
    return op.matmul(x, op.transpose(w, perm=(1, 0)))


def _batched_weight(m: Match) -> Array | str:
    w = m.root.inputs[1]
    assert w is not None
    if w.rank < 3 or w.node.op not in ("dequantize", "transpose"):
        return "its weight is not a batch of dequantized matrices"
    found = _dequantized(w)
    return f"{w} is not made of constants" if found is None else found


def _dequantized(value: Value) -> Array | None:
    """The constant that dequantize and transpose compute from constants."""
    node = value.node
    if node.op not in ("dequantize", "transpose"):
        return constant_value(value)
    arrays = [None if v is None else _dequantized(v) for v in node.inputs]
    if any(a is None and v is not None for a, v in zip(arrays, node.inputs, strict=True)):
        return None
    return np.asarray(run_node(node, arrays)[0])


def _fold_weight(op: Any, m: Match, weight: Array) -> Any:
    x, _, *rest = m.root.inputs
    return op.like(m.root, x, op.constant(weight), *rest)


_MATMUL, _DEQUANT_MATMUL = any_operands("matmul"), any_operands("dequant_matmul")
RULES = [
    Rule.from_plan("dequantize-batched-weight", _MATMUL, _batched_weight, _fold_weight),
    Rule.from_plan(
        "dequantize-expert-weights", any_operands("grouped_matmul"), _batched_weight, _fold_weight
    ),
    Rule.from_plan("matmul-to-dequant-matmul", _MATMUL, _plan_matmul, _lower_matmul),
    Rule("bias-of-dequant-matmul", _DEQUANT_MATMUL, _add_bias, _why_not_bias),
    Rule("dequantize-dynamic-weight", _DEQUANT_MATMUL, _dequantize_dynamic, _why_not_dynamic),
    Rule("dequant-matmul-in-f32", _DEQUANT_MATMUL, _compute_in_f32, _why_not_f32),
]
