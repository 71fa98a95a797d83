"""Excludes workers that often wait for a processor which another process occupies.

A worker that the system suspends holds its part of a phase, and all others wait for it: with one
of two cores occupied, two threads are slower than one. Linux counts how long each thread was ready
without a processor. Where that is a large share of the time, runs go on without the worker, and the
others run its parts; results do not change. From time to time it is tried again.

Runs in which no thread slept at a barrier cost the read of one word.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.runtime import shared_block as shared

CHECK_SECONDS, LARGEST_COST = 5e-3, 0.01
"""The least time between two looks, longer than the slice that the system gives to a thread, and
what looks may cost of the time."""
LARGEST_SHARE, LARGEST_OF_MANY = 0.3, 0.5
"""Of the time, without a processor, for one worker and for several. One of two threads keeps 60 to
75% of the speed where memory limits it; without one of more, another thread runs two parts."""
FIRST_SECONDS, LAST_SECONDS = 0.1, 0.8
"""How long a worker is excluded; twice as long each time that it still has to wait."""


class Contention:
    """Watches the workers of a pool, whose ids in the system are `workers`, and the caller."""

    def __init__(
        self, words: np.ndarray[Any, np.dtype[np.uint64]], workers: Sequence[int | None]
    ) -> None:
        self._words, self._workers = words, workers
        self._sleeps = 0
        self._limit = LARGEST_SHARE if len(workers) == 1 else LARGEST_OF_MANY
        self._interval = CHECK_SECONDS
        self._until = self._since = 0.0
        self._pause = FIRST_SECONDS
        self._spins = words[shared.STEAL_SPINS // 8]
        self._caller = threading.get_native_id()
        self._waited: dict[int, int] = {}
        self._exclude(0)

    def after_run(self) -> None:
        """Decides after a run who takes part in the next one."""
        if self._excluded:
            if time.perf_counter() >= self._until:
                self._exclude(0)
                self._look()
            return
        sleeps = int(self._words[shared.SLEEPS // 8])
        if sleeps == self._sleeps:
            return
        self._sleeps = sleeps
        passed = time.perf_counter() - self._since
        if passed < self._interval:
            return
        before, caller = self._waited, self._caller
        self._look()
        if caller != self._caller:
            before.pop(0, None)  # it is another thread's time
        shares = {
            number: (waited - before[number]) / (passed * 1e9)
            for number, waited in self._waited.items()
            if number in before
        }
        if max(shares.values(), default=0.0) > self._limit:
            slowest = max(range(1, len(self._workers) + 1), key=lambda n: shares.get(n, 0.0))
            self._exclude(slowest)
            self._until = time.perf_counter() + self._pause
            self._pause = min(2 * self._pause, LAST_SECONDS)
        elif passed < FIRST_SECONDS:
            self._pause = FIRST_SECONDS

    def _exclude(self, number: int) -> None:
        """Lets all workers take part except this one; 0 excludes none."""
        words, self._excluded = self._words, number
        for worker in range(1, len(self._workers) + 1):
            words[(shared.EXCLUDED + worker * shared.LINE) // 8] = worker == number
        active = len(self._workers) - bool(number)
        words[shared.ACTIVE // 8] = active
        words[shared.STEAL_SPINS // 8] = self._spins if active else 1

    def _look(self) -> None:
        """Reads how long each thread has waited so far; the caller is number 0."""
        self._since = time.perf_counter()
        self._caller = threading.get_native_id()
        threads = (self._caller, *self._workers)
        found = {number: waiting_nanoseconds(thread) for number, thread in enumerate(threads)}
        self._waited = {number: waited for number, waited in found.items() if waited is not None}
        took = time.perf_counter() - self._since
        self._interval = max(CHECK_SECONDS, took / LARGEST_COST)


def waiting_nanoseconds(thread: int | None) -> int | None:
    """How long a thread of this process was ready without a processor; None if unknown."""
    try:
        file = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    except OSError:
        return None
    try:
        fields = os.read(file, 100).split()
    except OSError:
        return None
    finally:
        os.close(file)
    return int(fields[1]) if len(fields) == 3 else None
