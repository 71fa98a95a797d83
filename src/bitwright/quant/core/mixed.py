"""A bit width for each channel: the widths with the least squared error within a budget.

Every channel begins at 2 bits; whichever step (2 to 4, 4 to 8) removes the most error for each bit
is taken next, as long as the average stays within the budget.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.quant.calibration.scoring import Distribution
from bitwright.quant.calibration.search import Problem, least_error
from bitwright.quant.core import types
from bitwright.quant.core.types import WIDTHS, Scheme

Array = np.ndarray[Any, Any]


def assign_widths(rows: Array, bits: float) -> tuple[int, ...]:
    """Widths of the rows [channels, n] whose average is at most `bits`."""
    if not WIDTHS[0] <= bits <= WIDTHS[-1]:
        raise QuantizationError(
            "the average width does not fit", expected=f"{WIDTHS[0]}..{WIDTHS[-1]}", found=bits
        )
    errors = _errors(rows)
    level = np.zeros(len(rows), int)
    left = bits * len(rows) - WIDTHS[0] * len(rows)
    steps = [_step(errors, 0, row) for row in range(len(rows))]
    heapq.heapify(steps)
    while steps:
        _, row = heapq.heappop(steps)
        cost = WIDTHS[level[row] + 1] - WIDTHS[level[row]]
        if cost > left:
            continue
        left -= cost
        level[row] += 1
        if level[row] + 1 < len(WIDTHS):
            heapq.heappush(steps, _step(errors, level[row], row))
    return tuple(WIDTHS[one] for one in level)


def _step(errors: Array, level: int, row: int) -> tuple[float, int]:
    gain = errors[level, row] - errors[level + 1, row]
    return -float(gain) / (WIDTHS[level + 1] - WIDTHS[level]), row


def _errors(rows: Array) -> Array:
    """The least squared error of each row at each width, [widths, rows]."""
    data = Distribution.of_rows(rows)
    kinds = [types.get(f"int{width}") for width in WIDTHS]
    problems = [Problem(data, kind, Scheme.symmetric) for kind in kinds]
    return np.stack([problem.error(*least_error(problem)) for problem in problems])
