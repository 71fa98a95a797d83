"""Comparisons of symbolic sizes before their values are known.

    below(seq, seq + 1) -> True      equal(seq, -1) -> False      equal(seq, 4) -> None

A rule on single sizes returns None if only the data decides. `decided` makes a `sizes` form of it,
which returns None unless every element is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bitwright.ir.dim import UNKNOWN, Size, bounds
from bitwright.ops.core.opdef import Array
from bitwright.ops.core.symbolic import on_elements


def decided(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The `sizes` form of an elementwise op: `rule` on every element, with broadcasting."""

    def elements(*operands: Array, **attrs: Any) -> Array | None:
        ruled = np.frompyfunc(partial(rule, **attrs), len(operands), 1)(*operands)
        answers = np.asarray(ruled, dtype=object)
        return None if any(answer is None for answer in answers.reshape(-1)) else answers

    return on_elements(elements)


def _difference(a: Size, b: Size) -> tuple[float, float]:
    """The bounds of a - b."""
    return (-math.inf, math.inf) if a is UNKNOWN or b is UNKNOWN else bounds(a - b)


def below(a: Size, b: Size) -> bool | None:
    """Whether a < b."""
    low, high = _difference(a, b)
    return True if high < 0 else False if low >= 0 else None


def equal(a: Size, b: Size) -> bool | None:
    """Whether a == b."""
    low, high = _difference(a, b)
    return False if low > 0 or high < 0 else True if low == high else None


def negated(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def magnitude(size: Size) -> Size | None:
    """|size|, or None if its sign is not known."""
    low, high = _difference(size, 0)
    return size if low >= 0 else -size if high <= 0 else None
