"""A limit for the time of a quantization, checked between its batches, layers and runs.

with time_limit(stop):  # as time.perf_counter()
    bw.quantize(...)    # raises OutOfTimeError
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from bitwright.errors import BitwrightError

_STOP: ContextVar[float | None] = ContextVar("stop", default=None)


class OutOfTimeError(BitwrightError):
    """A quantization exceeded its time."""


@contextmanager
def time_limit(stop: float) -> Iterator[None]:
    """Ends quantizations inside the context at this time."""
    token = _STOP.set(stop)
    try:
        yield
    finally:
        _STOP.reset(token)


def check_time() -> None:
    """Raise OutOfTimeError if the limit is exceeded."""
    stop = _STOP.get()
    if stop is not None and time.perf_counter() > stop:
        raise OutOfTimeError("quantization takes longer than its time allows")
