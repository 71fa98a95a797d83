"""Choose a bit width for each channel: least squared error within a budget of average bits.

Greedy: all channels start at 2 bits; the step (2 to 4, 4 to 8) that removes the most error per bit
is taken next, while the average stays within the budget.
"""

from __future__ import annotations

import heapq

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.arrays import Array
from bitwright.ir.quant_types import WIDTHS, Scheme
from bitwright.quant.calibration.scoring import Distribution
from bitwright.quant.calibration.search import RangeProblem, least_error


def assign_widths(rows: Array, bits: float) -> tuple[int, ...]:
    """Widths for the rows [channels, n], with an average of at most `bits`."""
    if not WIDTHS[0] <= bits <= WIDTHS[-1]:
        raise QuantizationError(
            "the average width is out of range", expected=f"{WIDTHS[0]}..{WIDTHS[-1]}", found=bits
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
    """Negated error reduction per bit of the next step of a row, for the heap."""
    gain = errors[level, row] - errors[level + 1, row]
    return -float(gain) / (WIDTHS[level + 1] - WIDTHS[level]), row


def _errors(rows: Array) -> Array:
    """The least squared error of each row at each width, [widths, rows]."""
    data = Distribution.of_rows(rows)
    kinds = [quant_types.get(f"int{width}") for width in WIDTHS]
    problems = [RangeProblem(data, kind, Scheme.symmetric) for kind in kinds]
    return np.stack([problem.error(*least_error(problem)) for problem in problems])
