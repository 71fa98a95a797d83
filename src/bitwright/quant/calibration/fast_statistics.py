"""Native code for the per-element loops of `Statistics`, for f32 arrays.

Calls release the GIL, so statistics of different values are computed in parallel.
"""

from __future__ import annotations

import math
import threading

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.calibration.machine_code import ADDRESS, NUMBER, REAL, MachineCode

TURNS = 2  # alternating histograms, as in `kernels.calibration.statistics`
_scratch = threading.local()


_FUNCTIONS = MachineCode(
    "statistics",
    "statistics",
    {
        "range_f32": (ADDRESS, NUMBER, ADDRESS),
        "histogram_f32": (ADDRESS, NUMBER, REAL, REAL, NUMBER, ADDRESS, ADDRESS),
    },
)


def summary(flat: Array) -> tuple[float, float, float, float, int] | None:
    """Minimum, maximum, sum, sum of squares and number of zeros; None if a value is not finite."""
    result = np.empty(5)
    _FUNCTIONS["range_f32"](flat.ctypes.data, flat.size, result.ctypes.data)
    low, high, total, squares, zeros = result.tolist()
    return (low, high, total, squares, int(zeros)) if math.isfinite(squares) else None


def count(flat: Array, exponent: int, first: int, counts: Array) -> None:
    """counts[floor(x / 2**exponent) - first] += 1 for every x; every x must have a bin.

    Takes at most 2**31 values, because it counts in 32 bits.
    """
    bins = counts.size
    held = getattr(_scratch, "array", None)
    if held is None or held.size < TURNS * bins:
        held = _scratch.array = np.zeros(TURNS * bins, np.int32)
    factor = math.ldexp(1.0, -exponent)
    _FUNCTIONS["histogram_f32"](
        flat.ctypes.data, flat.size, factor, first, bins, counts.ctypes.data, held.ctypes.data
    )
