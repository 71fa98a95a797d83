"""Q/DQ graphs become integer operators.

    matmul(dequantize(x), dequantize(w))  ->  cast(integer_matmul(x, w, …)) * (s_x s_w)
    … + bias                              ->  a bias of the product, in units of s_x s_w
    quantize(relu(… * m) + residual)      ->  requantize(relu(… * (m / s_y)) + residual / s_y)
    quantize(gelu(… * m))                 ->  requantize(gelu(… * m) * (1 / s_y))
    transpose(dequantize(x)), …           ->  dequantize(transpose(x)), …  (`moved_codes`)
    quantize(sigmoid(dequantize(x))), …   ->  lookup_table(x, table)          (`code_tables`)

and the same for convolutions, and for products of i32 that importers wrote for integer operators
of other tools. Factors are computed in f64 and rounded once. What stays a product of real numbers
is in the trace, with the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.registry import get
from bitwright.passes.lower_integer.bias import (
    EXACT,
    has_room,
    is_by_channel,
    known_bias,
    steps_are_coarse,
)
from bitwright.passes.lower_integer.grouped_matmul import grouped_rule
from bitwright.passes.lower_integer.lookup_tables import table_rule
from bitwright.passes.lower_integer.mean import mean_rules
from bitwright.passes.lower_integer.movement import moving_rules
from bitwright.passes.lower_integer.operands import (
    LIMIT,
    QuantizedOperand,
    Weight,
    centred,
    centred_weight,
    comes_from_product,
    deepest_sum,
    largest_sum,
    match_dequantize,
    parts_of,
    quantized_pair,
    weight_of,
    whole_numbers,
)
from bitwright.passes.lower_integer.recurrent import recurrence_rules
from bitwright.rewrite import Match, Rule, Trace, rewrite

Array = np.ndarray[Any, Any]
BOUND = 2.0**29
"""What a sum must stay below to be rounded and moved by a zero point without a check."""
INTEGER_PRODUCTS = ("product-of-codes", "convolution-of-codes")
"""The rules that bring products to integers."""
MOST_TAPS = 256
"""Taps of a depthwise filter; its sums of products are exact in f32."""


def lower_integer(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, _Lowering().rules, trace)


class _Lowering:
    """The rules of one run, and what they tell each other."""

    def __init__(self) -> None:
        self.plans: dict[Node, tuple[QuantizedOperand, Weight | QuantizedOperand]] = {}
        self.sums: dict[Node, int] = {}
        """How large sums of products with constant weights may become."""
        self.factors: dict[Value, Array] = {}
        """Factors behind integer products, in f64."""
        self.rules = [
            *(
                Rule(name, _any(op), self._product, self._no_product)
                for name, op in zip(INTEGER_PRODUCTS, ("matmul", "conv"), strict=True)
            ),
            Rule("bias-of-product-of-codes", _any("add"), self._bias, self._no_bias),
            *moving_rules(),
            *mean_rules(self._factor),
            table_rule(),
            Rule("codes-of-scaled", _any("quantize"), self._quantize, self._no_quantize),
            *recurrence_rules(),
            grouped_rule(),
        ]

    # products

    def _no_product(self, m: Match) -> str:
        """Why a product stays what it is; else its plan is kept."""
        node = m.root
        x, w = node.inputs[:2]
        assert x is not None and w is not None
        channel = -1 if node.op == "matmul" else 0
        pair = quantized_pair(node) if node.op == "matmul" else None
        if isinstance(pair, tuple):
            self.plans[node] = pair
            return ""
        if pair is not None:
            return pair
        if reason := _no_kernel(node.op, x, w):
            return reason
        if node.outputs[0].dtype == i32:
            source = centred(x)
            array = whole_numbers(w)
            weight: Weight | str | None = f"{w} is not a constant"
            if array is not None:
                weight = centred_weight(array, channel) or f"{w} has more than 8 bits"
        else:
            source, weight = match_dequantize(x, node.op == "matmul"), weight_of(w, channel)
        if isinstance(source, str):
            return source
        if isinstance(weight, str):
            return weight
        assert weight is not None
        if node.op == "conv" and source.zero_count != 1:
            return "the zero point differs from place to place"
        bound = largest_sum(weight, channel, source.reach)
        if bound >= LIMIT:
            return f"its sums may reach {bound}, beyond 32 bits"
        if len(node.inputs) > 2 and known_bias(node.inputs[2]) is None:
            return "its bias is not a constant"
        self.plans[node] = source, weight
        self.sums[node] = bound
        return ""

    def _product(self, op: Any, m: Match) -> Any:
        node = m.root
        source, weight = self.plans.pop(node)
        if isinstance(weight, QuantizedOperand):
            return self._product_of_run(op, node, source, weight)
        is_matmul, is_real = node.op == "matmul", node.outputs[0].dtype == f32
        attrs = {} if is_matmul else dict(node.attrs)
        is_batched = weight.qvalues.ndim > 2 and is_matmul
        scale = weight.scale if is_batched else weight.scale.reshape(-1)
        bias = known_bias(node.inputs[2]) if len(node.inputs) > 2 else None
        total: Array | None = None
        factor = None
        if source.step is not None:
            factor = source.step * scale
        if bias is not None and (factor is not None or not is_real):
            total, bias = np.rint(bias / (1 if factor is None else factor)), None
        room = LIMIT - self.sums.pop(node)
        if is_real and total is not None and not np.abs(total).max(initial=0) < room:
            total, bias = None, known_bias(node.inputs[2])
        y = op.op(
            "integer_matmul" if is_matmul else "integer_conv",
            source.qvalues,
            op.constant(weight.qvalues),
            source.zero,
            None if weight.zero is None else op.constant(_along_columns(weight.zero)),
            None if total is None else op.constant(total.astype(np.int32)),
            **attrs,
        )
        if not is_real:
            return y
        shape = scale.shape if is_batched else (-1,) if is_matmul else (-1, *(1,) * (y.rank - 2))
        real = op.cast(y, to=f32)
        if factor is None:
            assert source.scale is not None
            scales = op.constant(scale.astype(np.float32).reshape(shape))
            if scale.size == 1:
                scales = op.constant(np.float32(scale.reshape(-1)[0]))
            y = op.mul(real, op.mul(source.scale, scales))
        else:
            y = op.mul(real, self._factor(op, factor.reshape(shape) if scale.size > 1 else factor))
        if bias is None:
            return y
        return op.add(y, op.constant(bias.astype(np.float32).reshape(shape)))

    def _product_of_run(
        self, op: Any, node: Node, left: QuantizedOperand, right: QuantizedOperand
    ) -> Any:
        """A product of two values that the run makes."""
        is_real = node.outputs[0].dtype == f32
        is_open = is_real and not isinstance(left.qvalues.shape[-1], int)
        y = op.op(
            "integer_matmul",
            *(left.qvalues, right.qvalues, left.zero, right.zero),
            deepest=deepest_sum(left, right) if is_open else None,
        )
        if not is_real:
            return y
        real = op.cast(y, to=f32)
        if left.step is not None and right.step is not None:
            return op.mul(real, self._factor(op, np.asarray(left.step * right.step)))
        scales = [
            op.constant(np.float32(side.step)) if side.scale is None else side.scale
            for side in (left, right)
        ]
        return op.mul(real, op.mul(*scales))

    def _factor(self, op: Any, exact: Array) -> Value:
        """A factor rounded to f32, once."""
        held = exact.astype(np.float32)
        found: Value = op.constant(held.reshape(()) if held.size == 1 else held)
        self.factors[found] = exact.reshape(found.shape)
        return found

    def _scaled_product(self, value: Value) -> tuple[Node, Array] | None:
        """The integer product behind `cast(product) * factor`, and the factor in f64."""
        if value.node.op != "mul":
            return None
        for first, second in (value.node.inputs, value.node.inputs[::-1]):
            assert first is not None and second is not None
            known = constant_value(second)
            if known is None or first.node.op != "cast":
                continue
            product = next(iter(first.node.operands)).node
            if product.op in ("integer_matmul", "integer_conv"):
                return product, self.factors.get(second, known.astype(np.float64))
        return None

    # biases

    def _bias_parts(self, m: Match) -> tuple[Value, Node, Array, Array] | str:
        for value, other in (m.root.inputs, m.root.inputs[::-1]):
            assert value is not None and other is not None
            found, bias = self._scaled_product(value), known_bias(other)
            if found is None or bias is None:
                continue
            product, factor = found
            if len(product.inputs) > 4 or m.uses(value) != 1:
                return "the product has a bias already, or is read elsewhere"
            per_channel = [is_by_channel(bias, product), is_by_channel(factor, product)]
            if not per_channel[0] or not (per_channel[1] or factor.size == 1):
                return "the other operand, or the scale, is not one number for each channel"
            whole = np.rint(bias.reshape(-1) / factor.reshape(-1))
            if not has_room(product, np.abs(whole).max(initial=0)):
                return "the sum with the bias may leave 32 bits"
            lost = np.abs(whole * factor.reshape(-1) - bias.reshape(-1))
            is_exact = (lost <= EXACT * np.abs(bias.reshape(-1))).all()
            if not is_exact and steps_are_coarse(product):
                return "the bias is no whole number of steps, which are not much finer than codes"
            return value, product, whole, factor
        return "it is not a product of codes and a constant"

    def _no_bias(self, m: Match) -> str:
        found = self._bias_parts(m)
        return found if isinstance(found, str) else ""

    def _bias(self, op: Any, m: Match) -> Any:
        found = self._bias_parts(m)
        assert not isinstance(found, str)
        _, product, whole, factor = found
        operands = [*product.inputs, *(None,) * (4 - len(product.inputs))]
        y = op.like(product, *operands, op.constant(whole.astype(np.int32)))
        return op.mul(op.cast(y, to=f32), self._factor(op, factor))

    # back to codes

    def _no_quantize(self, m: Match) -> str:
        node = m.root
        x, scale = node.inputs[:2]
        assert x is not None and scale is not None
        known = constant_value(scale)
        to = node.attrs["to"]
        if node.attrs.get("axis") is not None or known is None or not to.is_integer:
            return "it is not one known scale for integer codes"
        if x.dtype != f32 or scale.dtype != f32 or to.bits > 16:
            return "it is not f32"
        if not (np.isfinite(known).all() and (known > 0).all()):
            return "its scale is not a positive number"
        if self._scales(m, x) or comes_from_product(x):
            return ""
        return "it does not come from a product"

    def _scales(self, m: Match, value: Value, top: bool = True) -> bool:
        """Whether a value is codes times factors, added up and cut off, and nothing else."""
        node = value.node
        if constant_value(value) is not None:
            return not top
        known = match_dequantize(value)
        if isinstance(known, QuantizedOperand):
            is_known = known.zero is None or known.known_zero is not None
            return known.step is not None and is_known and not top
        if m.uses(value) != 1 and not top:
            return False
        if self._scaled_product(value) is not None:
            return True
        if node.op in ("add", "sub"):
            parts = [self._scales(m, v, False) for v in node.operands]
            return all(parts) and not all(v.is_constant for v in node.operands)
        if node.op in ("relu", "clip"):
            return all(self._scales(m, v, False) for v in node.operands)
        if factor := _positive_factor(value):
            return self._scales(m, factor[0], False) and not factor[0].is_constant
        return False

    def _quantize(self, op: Any, m: Match) -> Any:
        node = m.root
        x, scale, zero = parts_of(node)
        to = node.attrs["to"]
        step = np.float64(np.reshape(constant_value(scale), -1)[0])  # type: ignore[arg-type]
        point = constant_value(zero) if zero is not None else np.zeros(())
        if zero is not None and zero.rank:
            zero = op.reshape(zero, shape=())
        ends = None
        if point is not None:
            first = float(point.reshape(-1)[0])
            ends = float(to.min) - first, float(to.max) - first
        inner, step, highest = self._ends(x, step, ends)
        bounded = self._largest(inner, step) < BOUND
        if highest is not None:
            highest = op.constant(highest)
        divided = self._scaled if self._scales(m, x) else self._divided
        return op.requantize(divided(op, inner, step), zero, highest, to=to, bounded=bounded)

    def _divided(self, op: Any, value: Value, step: Array) -> Value:
        """value / step, with the division in a factor and a constant that come last, if there are.

        A sum of products and its bias are rounded as the graph says, like in other runtimes.
        """
        if value.node.op == "add":
            for x, other in (value.node.inputs, value.node.inputs[::-1]):
                known = None if other is None else constant_value(other)
                if known is None or x is None or x.shape != value.shape:
                    continue
                if _positive_factor(x):
                    rest = op.constant(_held(known / step))
                    return op.add(self._divided(op, x, step), rest)  # type: ignore[no-any-return]
        if factor := _positive_factor(value):
            value, step = factor[0], step / factor[1]
        return op.mul(value, op.constant(_held(1 / step)))  # type: ignore[no-any-return]

    def _ends(
        self, value: Value, step: Array, ends: tuple[float, float] | None
    ) -> tuple[Value, Array, Array | None]:
        """The value that is left when what codes saturate at anyway is taken off: the value, its
        step, and a bound in codes below which it is to be cut off beside that."""
        highest: Array | None = None
        while ends is not None and self._scaled_product(value) is None:
            node = value.node
            if factor := _positive_factor(value):
                value, step = factor[0], step / factor[1]
                continue
            if node.op not in ("relu", "clip"):
                break
            x, low, high = (*node.inputs, None, None)[:3]
            if node.op == "relu":
                low = None
            lows, highs = (None if v is None else constant_value(v) for v in (low, high))
            if (low is not None and lows is None) or (high is not None and highs is None):
                break
            bottom = np.zeros(()) if node.op == "relu" else lows
            if bottom is not None and not (_held(bottom / step) <= ends[0]).all():
                break
            if highs is not None:
                top = _held(highs / step)
                if highest is not None:
                    top = np.minimum(top, highest)
                if not (np.rint(top) >= ends[1]).all():
                    highest = top
            assert x is not None
            value = x
        return value, step, highest

    def _largest(self, value: Value, step: Array) -> float:
        """A bound of |value / step|."""
        node = value.node
        array = constant_value(value)
        if array is not None:
            return float(np.abs(array / step).max(initial=0))
        known = match_dequantize(value)
        if isinstance(known, QuantizedOperand) and known.step is not None:
            return float(known.reach * np.max(known.step / step))
        found = self._scaled_product(value)
        if found is not None:
            return float(LIMIT * np.abs(found[1] / step).max(initial=0))
        if factor := _positive_factor(value):
            return self._largest(factor[0], step / factor[1])
        opdef = get(node.op)
        if np.isfinite(opdef.max_abs):
            return float(np.max(opdef.max_abs / step))
        if opdef.shrinks:
            return self._largest(next(iter(node.operands)), step)
        if node.op in ("add", "sub", "clip"):
            return sum(self._largest(v, step) for v in node.operands)
        return float("inf")

    def _scaled(self, op: Any, value: Value, step: Array) -> Value:
        """value / step, with the division in the factors; the step may differ by channel."""
        node = value.node
        array = constant_value(value)
        if array is not None:
            return op.constant(_held(array / step))  # type: ignore[no-any-return]
        known = match_dequantize(value)
        if isinstance(known, QuantizedOperand) and known.step is not None:
            # (q - zero) f as q f - (zero f), which needs one operation less
            ratio = known.step / step
            real = op.mul(op.cast(known.qvalues, to=f32), op.constant(_held(ratio)))
            zero = known.known_zero
            if zero is not None and zero.any():
                real = op.add(real, op.constant(_held(-float(zero.reshape(-1)[0]) * ratio)))
            return real  # type: ignore[no-any-return]
        found = self._scaled_product(value)
        if found is not None:
            product, factor = found
            real = op.cast(product.outputs[0], to=f32)
            return op.mul(real, self._factor(op, factor / step))  # type: ignore[no-any-return]
        if scale := _positive_factor(value):
            return self._scaled(op, scale[0], step / scale[1])
        parts = [None if v is None else self._scaled(op, v, step) for v in node.inputs]
        return op.like(node, *parts)  # type: ignore[no-any-return]


def _along_columns(zero: Array) -> Array:
    """Zero points of columns, of one matrix as a vector."""
    return zero if max(zero.shape[:-1], default=1) > 1 else zero.reshape(-1)


def _held(exact: Array) -> Array:
    """Rounded to f32."""
    return np.asarray(exact, np.float64).astype(np.float32)


def _positive_factor(value: Value) -> tuple[Value, Array] | None:
    """What a value is a positive multiple of, and the factor: one number, or some by channel."""
    if value.node.op != "mul":
        return None
    for x, other in (value.node.inputs, value.node.inputs[::-1]):
        assert x is not None and other is not None
        known = constant_value(other)
        if known is None or x.is_constant or x.shape != value.shape or known.dtype != np.float32:
            continue
        if np.isfinite(known).all() and (known > 0).all():
            return x, known.astype(np.float64)
    return None


def _no_kernel(op: str, x: Value, w: Value) -> str:
    """Why integer kernels do not take operands of these shapes."""
    if op == "matmul":
        return f"{x} and {w} are not rows and matrices" if w.rank < 2 or x.rank < 2 else ""
    taps = w.tensor.count // max(w.shape[0], 1) if isinstance(w.tensor.count, int) else 0
    if x.rank not in (3, 4) or taps < 1:
        return f"{w} is not a filter of a line or an image"
    is_depthwise = w.shape[1] == 1 and x.shape[1] != 1
    return f"{taps} taps are too many for one channel" if is_depthwise and taps > MOST_TAPS else ""


def _any(name: str) -> Any:
    return lambda op: getattr(op, name)(...)
