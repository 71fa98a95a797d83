"""Products and convolutions with an empty operand become zeros.

    matmul(x[n, 0], w[0, 4])   ->   expand(reduce_sum(x, axis 1), [n, 4])

The input stays an operand, so that its symbolic sizes stay bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright.ir.graph import Value
from bitwright.rewrite import Match, Rule

_DEPTH_OF_W = {"conv": 1, "integer_conv": 1, "conv_transpose": 0}
"""The axis of the input channels in a filter."""


def _why_not_empty(m: Match) -> str | bool:
    op, result = m.root.op, m.root.outputs[0]
    depth = m.w.shape[_DEPTH_OF_W[op]] if op in _DEPTH_OF_W else m.x.shape[-1]
    is_empty = depth == 0 or 0 in result.shape
    return not is_empty and "its sums are not empty"


def _zeros(op: Any, m: Match) -> Value:
    """Zeros of the result's type: broadcast sums over an empty axis."""
    result = m.root.outputs[0]
    axes = range(1, m.x.rank) if m.root.op in _DEPTH_OF_W else [m.x.rank - 1]
    total = op.reduce_sum(m.x, axes=tuple(axes), keepdims=True)
    if total.dtype != result.dtype:
        total = op.cast(total, to=result.dtype.name)
    if total.rank > result.rank:
        total = op.reshape(total, shape=total.shape[: result.rank])
    return op.expand(total, shape=result.shape)  # type: ignore[no-any-return]


def _empty_product(op: Any, m: Match) -> Value:
    return _with_bias(op, m, _zeros(op, m), m.bindings.get("b"))


def _with_bias(op: Any, m: Match, zeros: Value, bias: Value | None) -> Value:
    if bias is None or 0 in m.root.outputs[0].shape:
        return zeros
    if m.root.op in _DEPTH_OF_W:
        bias = op.reshape(bias, shape=(bias.shape[0], *(1,) * (m.x.rank - 2)))
    return op.add(zeros, bias)  # type: ignore[no-any-return]


def _with_maybe_bias(kind: str) -> Callable[..., Any]:
    return lambda op, x, w, b: getattr(op, kind)(x, w, op.maybe(b))


def _with_zero_points(kind: str) -> Callable[..., Any]:
    return lambda op, x, w, p, q, b: getattr(op, kind)(x, w, *map(op.maybe, (p, q, b)))


_PATTERNS: dict[str, Callable[..., Any]] = {
    "product-of-empty": lambda op, x, w: op.matmul(x, w),
    "integer-product-of-empty": _with_zero_points("integer_matmul"),
    "convolution-of-empty": _with_maybe_bias("conv"),
    "transposed-convolution-of-empty": _with_maybe_bias("conv_transpose"),
    "integer-convolution-of-empty": _with_zero_points("integer_conv"),
}
RULES = [Rule(name, match, _empty_product, _why_not_empty) for name, match in _PATTERNS.items()]
