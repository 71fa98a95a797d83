"""Matmuls and convolutions of quantized values become integer products.

    matmul(dequantize(x), dequantize(w))   ->  cast(integer_matmul(x, w, …)) * (s_x s_w)
    matmul(cast(x) - x_zero, w) in i32     ->  integer_matmul(x, w, x_zero, …)

and the same for convolutions. A constant bias joins the i32 sum where there is room for it.

Weights, scales and biases that training changes are values. The graph then computes the scale and
the bias of the sum, and decides at run time whether there is room, so that results are the same as
those of the constants that deployment makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i32
from bitwright.ir.graph import Node, Value
from bitwright.passes.lower_integer import operands
from bitwright.passes.lower_integer.bias import all_of, constant_bias, join_at_run_time
from bitwright.passes.lower_integer.scales import (
    Scale,
    count_of,
    in_f64,
    is_parameter,
    over,
    reshaped,
    scale_constant,
    times,
)
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
    """The operands of an integer product: the right one is a constant, a weight that training
    changes, or another quantized value."""

    left: operands.QuantizedOperand
    right: operands.Weight | operands.RuntimeWeight | operands.QuantizedOperand
    room: int = 0
    """What a bias must stay below so that the sum cannot overflow."""


def _plan(m: Match) -> Product | str:
    node = m.root
    x, w = node.inputs[:2]
    assert x is not None and w is not None
    channel = -1 if node.op == "matmul" else 0
    if node.outputs[0].dtype == f32 and (w.rank == 2 or node.op == "conv"):
        changing = operands.match_runtime_weight(w, channel)
        if changing is not None:
            return changing if isinstance(changing, str) else _plan_runtime(node, x, w, changing)
    if node.op == "matmul" and (pair := operands.match_dynamic_matmul(node)) is not None:
        return pair if isinstance(pair, str) else Product(*pair)
    if reason := _why_not_shapes(node.op, x, w):
        return reason
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
    if len(node.inputs) > 2 and not _is_bias(node.inputs[2], node.outputs[0].dtype == f32):
        return "its bias is neither a constant nor a parameter"
    terms = weight.qvalues.size // max(weight.qvalues.shape[channel], 1)
    return Product(source, weight, operands.INT32_LIMIT - _bound(bound, terms, weight.zero))


def _bound(exact: int, terms: int, zero: Any) -> int:
    """A bound of the sums that does not depend on the weights, unless it takes half the range.

    Training decides by it too, so that a bias joins the sum in both or in neither.
    """
    most = terms * operands.MAX_DISTANCE * (128 if zero is None else operands.MAX_DISTANCE)
    return most if most < operands.INT32_LIMIT // 2 else exact


def _is_bias(value: Value | None, may_change: bool = True) -> bool:
    if value is None or constant_bias(value) is not None:
        return True
    return may_change and is_parameter(value)


def _plan_runtime(node: Node, x: Value, w: Value, weight: operands.RuntimeWeight) -> Product | str:
    if reason := _why_not_shapes(node.op, x, w):
        return reason
    source = operands.match_dequantize(x, node.op == "matmul")
    if isinstance(source, str):
        return source
    if node.op == "conv" and (source.zero_count != 1 or weight.zero is not None):
        return f"{x} has more than one zero point, or {w} has a zero point"
    depth = w.shape[0] if node.op == "matmul" else w.tensor.count // max(w.shape[0], 1)
    if not isinstance(depth, int):
        return f"the number of terms of a sum is not known: {depth}"
    bound = depth * operands.max_product(source, weight.zero is not None)
    if bound >= operands.INT32_LIMIT:
        return f"its sums may reach {bound}, beyond 32 bits"
    if len(node.inputs) > 2 and not _is_bias(node.inputs[2]):
        return "its bias is neither a constant nor a parameter"
    return Product(source, weight, operands.INT32_LIMIT - _bound(bound, depth, weight.zero))


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
    if isinstance(plan.right, operands.QuantizedOperand):
        return _lower_dynamic_product(op, m.root, plan.left, plan.right)
    return _lower_weight_product(op, m.root, plan.left, plan.right, plan.room)


def _lower_weight_product(
    op: Any,
    node: Node,
    source: operands.QuantizedOperand,
    weight: operands.Weight | operands.RuntimeWeight,
    room: int,
) -> Any:
    is_matmul, is_real = node.op == "matmul", node.outputs[0].dtype == f32
    is_batched = is_matmul and len(weight.qvalues.shape) > 2
    scale = weight.scale if is_batched else reshaped(op, weight.scale, (-1,))
    bias = _bias_of(op, node)
    total: Array | Value | None = None  # the bias in units of the integer sum
    x_scale = source.known_scale
    factor = None if x_scale is None else times(op, x_scale, scale)
    if bias is not None and (factor is not None or not is_real):
        total, bias = _in_units(op, bias, 1.0 if factor is None else factor, room, is_real)
    qvalues, zero = _weight_values(op, weight)
    y = op.op(
        "integer_matmul" if is_matmul else "integer_conv",
        source.qvalues,
        qvalues,
        source.zero,
        zero,
        total,
        **({} if is_matmul else node.attrs),
    )
    if not is_real:
        return y
    shape = scale.shape if is_batched else (-1,) if is_matmul else (-1, *(1,) * (y.rank - 2))
    is_one = count_of(scale) == 1
    real = op.cast(y, to=f32)
    if factor is None:
        scales = scale_constant(op, scale if is_one else reshaped(op, scale, shape))
        y = op.mul(real, op.mul(source.dynamic_scale, scales))
    else:
        y = op.mul(real, scale_constant(op, factor if is_one else reshaped(op, factor, shape)))
    if bias is None:
        return y
    if isinstance(bias, np.ndarray):
        return op.add(y, op.constant(bias.astype(np.float32).reshape(shape)))
    return op.add(y, reshaped(op, bias, shape))


def _weight_values(
    op: Any, weight: operands.Weight | operands.RuntimeWeight
) -> tuple[Value, Value | None]:
    """The quantized weight and its zero points as operands of the product."""
    if isinstance(weight, operands.Weight):
        zero = None if weight.zero is None else op.constant(_column_zeros(weight.zero))
        return op.constant(weight.qvalues), zero
    qvalues = weight.qvalues
    if weight.perm is not None:
        qvalues = op.transpose(qvalues, perm=tuple(weight.perm))
    return qvalues, weight.zero


def _bias_of(op: Any, node: Node) -> Array | Value | None:
    """The bias operand: an array in f64, or a value in f32 that training changes."""
    value = node.inputs[2] if len(node.inputs) > 2 else None
    known = constant_bias(value)
    return value if known is None else known


def _in_units(
    op: Any, bias: Array | Value, factor: Scale | float, room: int, is_real: bool
) -> tuple[Value | None, Array | Value | None]:
    """The bias in units of the sum, where there is room for it, and what is added later."""
    if isinstance(bias, Value) or isinstance(factor, Value):
        value = bias if isinstance(bias, Value) else op.constant(bias.astype(np.float32))
        exact = op.round(in_f64(op, over(op, in_f64(op, bias), factor)))
        fits = all_of(op, op.lt(op.abs(exact), op.constant(np.float64(room))))
        return join_at_run_time(op, exact, fits, value)
    total = np.rint(bias / factor)
    if is_real and not np.abs(total).max(initial=0) < room:
        return None, bias
    return op.constant(total.astype(np.int32)), None


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
    if (a := left.known_scale) is not None and (b := right.known_scale) is not None:
        return op.mul(real, scale_constant(op, times(op, a, b)))
    scales = [
        op.constant(np.float32(side.scale)) if side.dynamic_scale is None else side.dynamic_scale
        for side in (left, right)
    ]
    return op.mul(real, op.mul(*scales))


def _column_zeros(zero: Array) -> Array:
    """Zero points per column; a vector for a single matrix."""
    return zero if max(zero.shape[:-1], default=1) > 1 else zero.reshape(-1)
