"""Algebraic identities. No rule turns NaN or infinity into a finite number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitwright.ir.types import TensorType
from bitwright.rewrite import Match, Rule


def _why_not_constants(m: Match) -> str | bool:
    return not m.is_constant("a", "b") and "the operands are not both constants"


def _why_not_reciprocal(m: Match) -> str | bool:
    """x / c equals x * (1/c) to the bit only for powers of two."""
    if not m.is_constant("c"):
        return "the divisor is not a constant"
    if not m.root.outputs[0].dtype.is_float:
        return "integers divide by truncation"
    array = m.array("c").astype(np.float64)
    exact = all(c and math.isfinite(c) and math.frexp(abs(c))[0] == 0.5 for c in array.reshape(-1))
    return not exact and "its reciprocal is not exact"


def _reciprocal(op: Any, x: Any, m: Match) -> Any:
    array = m.array("c")
    return op.mul(x, (1 / array.astype(np.float64)).astype(array.dtype))


def _why_not_float(m: Match) -> str | bool:
    type_ = m.root.types[0]
    return not (isinstance(type_, TensorType) and type_.dtype.is_float) and "it is not a float"


def _why_not_merge(m: Match) -> str | bool:
    if m.uses(m.inner.outputs[0]) != 1:
        return "the inner result has another reader"
    return _why_not_float(m) or _why_not_constants(m)


RULES = [
    Rule("add-zero", lambda op, x: op.add(x, 0), lambda op, x: x, _why_not_float),
    Rule("sub-zero", lambda op, x: op.sub(x, 0), lambda op, x: x),
    Rule("mul-one", lambda op, x: op.mul(x, 1), lambda op, x: x),
    Rule("div-one", lambda op, x: op.div(x, 1), lambda op, x: x),
    Rule("pow-one", lambda op, x: op.pow(x, 1), lambda op, x: x),
    Rule("square-as-product", lambda op, x: op.pow(x, 2), lambda op, x: op.mul(x, x)),
    Rule(
        "square-root-as-sqrt",
        lambda op, x: op.pow(x, 0.5),
        lambda op, x: op.sqrt(x),
        _why_not_float,
    ),
    Rule("neg-of-neg", lambda op, x: op.neg(op.neg(x)), lambda op, x: x),
    Rule("not-of-not", lambda op, x: op.not_(op.not_(x)), lambda op, x: x),
    Rule("abs-of-abs", lambda op, x: op.abs(op.abs(x)), lambda op, x: op.abs(x)),
    Rule("abs-of-neg", lambda op, x: op.abs(op.neg(x)), lambda op, x: op.abs(x)),
    Rule("relu-of-relu", lambda op, x: op.relu(op.relu(x)), lambda op, x: op.relu(x)),
    Rule("relu-from-maximum", lambda op, x: op.maximum(x, 0), lambda op, x: op.relu(x)),
    Rule("add-neg-as-sub", lambda op, x, y: op.add(x, op.neg(y)), lambda op, x, y: op.sub(x, y)),
    Rule("sub-neg-as-add", lambda op, x, y: op.sub(x, op.neg(y)), lambda op, x, y: op.add(x, y)),
    Rule("reciprocal-of-sqrt", lambda op, x: op.reciprocal(op.sqrt(x)), lambda op, x: op.rsqrt(x)),
    Rule("one-over-sqrt", lambda op, x: op.div(1, op.sqrt(x)), lambda op, x: op.rsqrt(x)),
    Rule("divide-by-power-of-two", lambda op, x, c: op.div(x, c), _reciprocal, _why_not_reciprocal),
    Rule(
        "merge-added-constants",
        lambda op, x, a, b: op.add(op.add(x, a, as_="inner"), b),
        lambda op, x, a, b: op.add(x, op.add(a, b)),
        _why_not_merge,
    ),
    Rule(
        "merge-factors",
        lambda op, x, a, b: op.mul(op.mul(x, a, as_="inner"), b),
        lambda op, x, a, b: op.mul(x, op.mul(a, b)),
        _why_not_merge,
    ),
]
