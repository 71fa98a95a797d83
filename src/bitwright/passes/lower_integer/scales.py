"""Scales that are constants or run-time values, and the scaled values that rules look through.

Scales are multiplied and divided in f64, and rounded to f32 where they become an operand of the
graph: at compile time where all of them are constants, otherwise by nodes that compute the same
numbers at run time, to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, f64
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ir.types import TensorType
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get

Array = np.ndarray[Any, Any]
Scale = Array | Value
"""A constant in f64, or a run-time value in f32 or f64."""
MAX_VISITED = 500
"""Nodes behind a run-time value that are looked at."""
_ACTIVATIONS = frozenset({"dynamic_quantize", "matmul", "conv", "integer_matmul", "integer_conv"})
"""Ops whose results are never parameters, however small."""


def round_f32(exact: Array | float) -> Array:
    return np.asarray(exact, np.float64).astype(np.float32)


def in_f64(op: Any, number: Scale | float) -> Value:
    if isinstance(number, Value):
        return number if number.dtype == f64 else op.cast(number, to=f64)
    return op.constant(np.asarray(number, np.float64))  # type: ignore[no-any-return]


def times(op: Any, a: Scale | float, b: Scale | float) -> Scale:
    if isinstance(a, Value) or isinstance(b, Value):
        return op.mul(in_f64(op, a), in_f64(op, b))  # type: ignore[no-any-return]
    return np.asarray(a * b)


def over(op: Any, a: Scale | float, b: Scale | float) -> Scale:
    if isinstance(a, Value) or isinstance(b, Value):
        return op.div(in_f64(op, a), in_f64(op, b))  # type: ignore[no-any-return]
    return np.asarray(a / b)


def rounded(op: Any, exact: Scale) -> Value:
    """A scale as an f32 value."""
    if isinstance(exact, Value):
        return exact if exact.dtype == f32 else op.cast(exact, to=f32)
    return op.constant(round_f32(exact))  # type: ignore[no-any-return]


def count_of(scale: Scale) -> Any:
    return scale.tensor.count if isinstance(scale, Value) else scale.size


def reshaped(op: Any, scale: Scale, shape: tuple[int, ...]) -> Scale:
    """A scale in another shape, in which -1 is the number of its elements."""
    if isinstance(scale, Value):
        final = tuple(count_of(scale) if size == -1 else size for size in shape)
        return scale if scale.shape == final else op.reshape(scale, shape=final)
    return scale.reshape(shape)


def scale_constant(op: Any, exact: Scale) -> Value:
    """An f32 value, a scalar where it has one element."""
    if count_of(exact) == 1:
        exact = reshaped(op, exact, ())
    return rounded(op, exact)


def match_scaled_product(value: Value) -> tuple[Node, Scale] | None:
    """The integer product and the scale of `cast(product) * scale`."""
    if value.node.op != "mul":
        return None
    for first, second in (value.node.inputs, value.node.inputs[::-1]):
        assert first is not None and second is not None
        known = constant_value(second)
        if first.node.op != "cast" or (known is None and not _is_rounded(second)):
            continue
        product = next(iter(first.node.operands)).node
        if product.op in ("integer_matmul", "integer_conv"):
            return product, second if known is None else known.astype(np.float64)
    return None


def _is_rounded(value: Value) -> bool:
    """Whether a run-time scale was computed in f64: scales of single rows never are."""
    node = value.node
    if node.op == "reshape":
        node = next(iter(node.operands)).node
    return node.op == "cast" and value.dtype == f32 and next(iter(node.operands)).dtype == f64


def match_positive_scale(value: Value) -> tuple[Value, Array] | None:
    """x and s (in f64) of `x * s` with a positive constant s, per tensor or per channel."""
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


def known_scale(value: Value) -> Scale | None:
    """A scale or bias that a deployed model has as a constant: one, or a parameter in training."""
    known = constant_value(value)
    if known is not None:
        return known.astype(np.float64)
    return value if value.dtype == f32 and is_parameter(value) else None


def is_parameter(value: Value) -> bool:
    """Whether a value is computed from states, as parameters are in training.

    Larger values behind it (the weight that a scale is derived from, the activations that an
    observer reduces) do not matter; products, inputs of several elements and
    `dynamic_quantize` make it an activation. An input of one element is a parameter.
    """
    count = _count(value)
    if count is None or value.is_constant:
        return False
    found, seen, left = False, {value.node}, [value.node]
    while left:
        node = left.pop()
        if node.op in _ACTIVATIONS or (node.op == "input" and count != 1):
            return False
        found |= node.is_boundary and node.op != "constant"
        for operand in node.operands:
            size = _count(operand)
            is_small = size is not None and size <= count
            if operand.node not in seen and (is_small or _is_stored(operand)):
                seen.add(operand.node)
                left.append(operand.node)
        if len(seen) > MAX_VISITED:
            return False
    return found


def _count(value: Value) -> int | None:
    """The number of elements, if it is known."""
    count = value.type.count if isinstance(value.type, TensorType) else None
    return count if isinstance(count, int) else None


def _is_stored(value: Value) -> bool:
    """Whether a value is elementwise in a state, such as the absolute value of a weight."""
    while not value.node.is_boundary:
        others = [v for v in value.node.operands if not v.is_constant]
        if get(value.node.op).kind is not Kind.ELEMENTWISE or len(others) != 1:
            return False
        (value,) = others
    return value.node.op in ("state", "parameter")
