"""The parts of `Statistics` that touch every value, as machine code, for f32 arrays.

A call releases the interpreter lock, so statistics of different values can be kept in parallel.
"""

from __future__ import annotations

import ctypes
import math
import threading
from functools import cache
from typing import Any

import numpy as np

from bitwright.backends.cpu import jit
from bitwright.target import host

Array = np.ndarray[Any, Any]
TURNS = 2  # histograms that take turns, as in `backends.cpu.kernels.statistics`
_scratch = threading.local()
_loading = threading.Lock()


def _text() -> str:
    # the emitter is slow to import, and a warm start does not need it
    from bitwright.backends.cpu.kernels.statistics import statistics_text

    return statistics_text(host())


class _Functions:
    def __init__(self) -> None:
        self._library = jit.load_named("statistics", _text, host())
        address, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        self.range = self._function("range_f32", address, number, address)
        self.histogram = self._function(
            "histogram_f32", address, number, real, real, number, address, address
        )

    def _function(self, name: str, *params: Any) -> Any:
        return ctypes.CFUNCTYPE(None, *params)(self._library.address(name))


@cache
def _loaded() -> _Functions:
    return _Functions()


def _functions() -> _Functions:
    """The one set of functions: a second one, made at the same time, would go with its code."""
    with _loading:
        return _loaded()


def summary(flat: Array) -> tuple[float, float, float, float, int] | None:
    """Minimum, maximum, sum, sum of squares, zeros; None if a value is not finite."""
    result = np.empty(5)
    _functions().range(flat.ctypes.data, flat.size, result.ctypes.data)
    low, high, total, squares, zeros = result.tolist()
    return (low, high, total, squares, int(zeros)) if math.isfinite(squares) else None


def count(flat: Array, exponent: int, first: int, counts: Array) -> None:
    """counts[floor(x / 2**exponent) - first] += 1 for every x, all of which have a bin.

    At most 2**31 values, which are counted in 32 bits before they are added.
    """
    bins = counts.size
    held = getattr(_scratch, "array", None)
    if held is None or held.size < TURNS * bins:
        held = _scratch.array = np.zeros(TURNS * bins, np.int32)
    factor = math.ldexp(1.0, -exponent)
    _functions().histogram(
        flat.ctypes.data, flat.size, factor, first, bins, counts.ctypes.data, held.ctypes.data
    )
