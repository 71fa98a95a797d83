"""Matmuls and convolutions of quantized values become integer products.

    matmul(dequantize(x), dequantize(w))   ->  cast(integer_matmul(x, w, …)) * (s_x s_w)
    matmul(cast(x) - x_zero, w) in i32     ->  integer_matmul(x, w, x_zero, …)

and the same for convolutions. A constant bias joins the i32 sum where there is room for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i32
from bitwright.ir.graph import Node, Value
from bitwright.passes.lower_integer import operands
from bitwright.passes.lower_integer.bias import constant_bias
from bitwright.passes.lower_integer.scales import scale_constant
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
INTEGER_PRODUCTS = ("matmul-to-integer", "conv-to-integer")
"""The rules that make integer products."""
MAX_TAPS = 256
"""Depthwise filters of at most so many taps have exact sums in f32."""


def product_rules() -> list[Rule]:
    ops = ("matmul", "conv")
    return [
        Rule.from_plan(name, any_operands(op), _plan, _lower)
        for name, op in zip(INTEGER_PRODUCTS, ops, strict=True)
    ]


@dataclass(frozen=True)
class Product:
    """The operands of an integer product: the right one is a constant, or computed at run time."""

    left: operands.QuantizedOperand
    right: operands.Weight | operands.QuantizedOperand
    room: int = 0
    """What a bias must stay below so that the sum cannot overflow."""


def _plan(m: Match) -> Product | str:
    node = m.root
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    if node.op == "matmul" and (pair := operands.match_dynamic_matmul(node)) is not None:
        return pair if isinstance(pair, str) else Product(*pair)
    if reason := _why_not_shapes(node.op, x, w):
        return reason
    channel = -1 if node.op == "matmul" else 0
    source, weight = _operands(node, x, w, channel)
    if isinstance(source, str):
        return source
    if isinstance(weight, str):
        return weight
    if node.op == "conv" and source.zero_count != 1:
        return f"{x} has more than one zero point"
    bound = operands.max_abs_sum(weight, channel, source.max_distance)
    if bound >= operands.INT32_LIMIT:
        return f"its sums may reach {bound}, beyond 32 bits"
    if len(node.inputs) > 2 and constant_bias(node.inputs[2]) is None:
        return "its bias is not a constant"
    return Product(source, weight, operands.INT32_LIMIT - bound)


def _operands(
    node: Node, x: Value, w: Value, channel: int
) -> tuple[operands.QuantizedOperand | str, operands.Weight | str]:
    if node.outputs[0].dtype != i32:
        return operands.match_dequantize(x, node.op == "matmul"), operands.match_weight(w, channel)
    array = operands.integer_constant(w)
    if array is None:
        return operands.match_integer_operand(x), f"{w} is not a constant"
    weight = operands.integer_weight(array, channel)
    return operands.match_integer_operand(x), weight or f"{w} has more than 8 bits"


def _why_not_shapes(op: str, x: Value, w: Value) -> str:
    """Why integer kernels do not take operands of these shapes."""
    if op == "matmul":
        return f"{x} and {w} are not matrices" if w.rank < 2 or x.rank < 2 else ""
    taps = w.tensor.count // max(w.shape[0], 1) if isinstance(w.tensor.count, int) else 0
    if x.rank not in (3, 4) or taps < 1:
        return f"{w} is not a 1-d or 2-d filter"
    is_depthwise = w.shape[1] == 1 and x.shape[1] != 1
    return f"{taps} taps are too many for one channel" if is_depthwise and taps > MAX_TAPS else ""


def _lower(op: Any, m: Match, plan: Product) -> Any:
    if isinstance(plan.right, operands.Weight):
        return _lower_weight_product(op, m.root, plan.left, plan.right, plan.room)
    return _lower_dynamic_product(op, m.root, plan.left, plan.right)


def _lower_weight_product(
    op: Any, node: Node, source: operands.QuantizedOperand, weight: operands.Weight, room: int
) -> Any:
    is_matmul, is_real = node.op == "matmul", node.outputs[0].dtype == f32
    is_batched = weight.qvalues.ndim > 2 and is_matmul
    scale = weight.scale if is_batched else weight.scale.reshape(-1)
    bias = constant_bias(node.inputs[2]) if len(node.inputs) > 2 else None
    total: Array | None = None  # the bias in units of the integer sum
    factor = None if source.scale is None else source.scale * scale
    if bias is not None and (factor is not None or not is_real):
        total, bias = np.rint(bias / (1 if factor is None else factor)), None
    if is_real and total is not None and not np.abs(total).max(initial=0) < room:
        total, bias = None, constant_bias(node.inputs[2])
    y = op.op(
        "integer_matmul" if is_matmul else "integer_conv",
        source.qvalues,
        op.constant(weight.qvalues),
        source.zero,
        None if weight.zero is None else op.constant(_column_zeros(weight.zero)),
        None if total is None else op.constant(total.astype(np.int32)),
        **({} if is_matmul else node.attrs),
    )
    if not is_real:
        return y
    shape = scale.shape if is_batched else (-1,) if is_matmul else (-1, *(1,) * (y.rank - 2))
    real = op.cast(y, to=f32)
    if factor is None:
        scales = scale_constant(op, scale.reshape(shape) if scale.size > 1 else scale)
        y = op.mul(real, op.mul(source.dynamic_scale, scales))
    else:
        y = op.mul(real, scale_constant(op, factor.reshape(shape) if scale.size > 1 else factor))
    if bias is None:
        return y
    return op.add(y, op.constant(bias.astype(np.float32).reshape(shape)))


def _lower_dynamic_product(
    op: Any, node: Node, left: operands.QuantizedOperand, right: operands.QuantizedOperand
) -> Any:
    is_real = node.outputs[0].dtype == f32
    is_open = is_real and not isinstance(left.qvalues.shape[-1], int)
    y = op.op(
        "integer_matmul",
        *(left.qvalues, right.qvalues, left.zero, right.zero),
        deepest=operands.max_depth(left, right) if is_open else None,
    )
    if not is_real:
        return y
    real = op.cast(y, to=f32)
    if left.scale is not None and right.scale is not None:
        return op.mul(real, scale_constant(op, np.asarray(left.scale * right.scale)))
    scales = [
        op.constant(np.float32(side.scale)) if side.dynamic_scale is None else side.dynamic_scale
        for side in (left, right)
    ]
    return op.mul(real, op.mul(*scales))


def _column_zeros(zero: Array) -> Array:
    """Zero points per column; a vector for a single matrix."""
    return zero if max(zero.shape[:-1], default=1) > 1 else zero.reshape(-1)
