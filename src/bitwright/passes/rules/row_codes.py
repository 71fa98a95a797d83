"""Codes of rows with ranges of their own, and products of them, written out in standard ops.

    top, bottom   max(reduce_max(x), 0), min(reduce_min(x), 0) of each row
    scale         1 where top = bottom, else (top - bottom) / 255
    zero          rne(clip(low - bottom / scale))
    codes         clip(rne(x / scale) + zero)

    (codes - zero) * scale                                  ->  dequantize(dynamic_quantize(x))
    f32(codes @ w - zero * Σ w) * (scale * steps)           ->  matmul(that, dequantize(w, steps))

as the exporter writes them for runtimes that read no functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.dtype import DType, f32, i8, i32, u8
from bitwright.ir.graph import Value, constant_value
from bitwright.passes.codes import centred_weight, whole_numbers
from bitwright.rewrite import Match, Rule

Array = np.ndarray[Any, Any]


def _parts(op: Any, x: Any, axes: Any, to: DType) -> tuple[Any, Any, Any]:
    """Patterns of codes, scale and zero point."""
    low, high = to.min, to.max
    top = op.relu(op.reduce_max(x, axes=axes, keepdims=True))
    bottom = op.minimum(op.reduce_min(x, axes=axes, keepdims=True), 0)
    spread = op.div(op.sub(top, bottom), high - low)
    scale = op.where(op.eq(top, bottom), 1, spread)
    zero = op.round(op.clip(op.sub(low, op.div(bottom, scale)), low, high))
    codes = op.clip(op.add(op.round(op.div(x, scale)), zero), low, high)
    return op.cast(codes, to=to), scale, op.cast(zero, to=to)


def _rows(to: DType) -> Callable[..., Any]:
    def match(op: Any, x: Any, axes: Any) -> Any:
        codes, scale, zero = _parts(op, x, axes, to)
        return op.mul(op.sub(op.cast(codes, to=f32), op.cast(zero, to=f32)), scale)

    return match


def _product(to: DType) -> Callable[..., Any]:
    def match(op: Any, x: Any, axes: Any, w: Any, sums: Any, steps: Any) -> Any:
        codes, scale, zero = _parts(op, x, axes, to)
        product = op.matmul(op.cast(codes, to=i32), w)
        whole = op.sub(product, op.mul(op.cast(zero, to=i32), sums))
        return op.mul(op.cast(whole, to=f32), op.mul(scale, steps))

    return match


def _no_rows(m: Match) -> str | bool:
    if m.x.rank < 2 or list(m.axes) != [m.x.rank - 1]:
        return f"axes {list(m.axes)} are not the last one"
    return not isinstance(m.x.shape[-1], int) and "the size of a row is not known"


def _no_product(m: Match) -> str | bool:
    if refused := _no_rows(m):
        return refused
    array = _weight(m)
    if array is None or centred_weight(array, -1) is None:
        return "the weight is not a matrix of constant codes"
    known, sums = _sums(m.sums), array.sum(0, dtype=np.int64)
    is_row = known is not None and known.shape[-1:] == sums.shape and known.size == sums.size
    if known is None or not is_row or not np.array_equal(known.reshape(-1), sums):
        return "what is taken off are not the sums of its columns"
    if constant_value(m.steps) is None or m.steps.shape not in ((), (array.shape[1],)):
        return "its scale is not one constant for each column"
    return False


def _weight(m: Match) -> Array | None:
    array = whole_numbers(m.w)
    return array if array is not None and array.ndim == 2 else None


def _sums(value: Value) -> Array | None:
    """A constant, or the sums of the columns of one that is too large to be folded."""
    node = value.node
    if node.op == "reduce_sum" and list(node.attrs["axes"] or ()) == [0]:
        array = whole_numbers(next(iter(node.operands)))
        return None if array is None else array.sum(0, dtype=np.int64)
    return constant_value(value)


def _dequantized(op: Any, x: Value, to: DType) -> Value:
    codes, scale, zero = op.dynamic_quantize(x, to=to, per_token=True)
    return op.dequantize(codes, scale, zero, axis=x.rank - 1, block=x.shape[-1])  # type: ignore[no-any-return]


def _make_rows(to: DType) -> Callable[..., Any]:
    return lambda op, x: _dequantized(op, x, to)


def _make_product(to: DType) -> Callable[..., Any]:
    def replace(op: Any, x: Value, steps: Value, m: Match) -> Any:
        array = _weight(m)
        assert array is not None
        weight = centred_weight(array, -1)
        assert weight is not None
        zero = None if weight.zero is None else op.constant(weight.zero.reshape(-1))
        if zero is not None and not steps.rank:
            steps = op.expand(steps, shape=(array.shape[1],))
        axis = 1 if steps.rank else None
        real = op.dequantize(op.constant(weight.codes), steps, zero, axis=axis)
        return op.matmul(_dequantized(op, x, to), real)

    return replace


RULES = [
    rule
    for to in (u8, i8)
    for rule in (
        Rule(f"rows-of-{to}-codes-in-steps", _rows(to), _make_rows(to), _no_rows),
        Rule(f"product-of-{to}-rows-in-steps", _product(to), _make_product(to), _no_product),
    )
]
