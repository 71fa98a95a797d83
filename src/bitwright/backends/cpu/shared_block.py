"""The memory that the threads of a pool share, and the table of steps they run.

The words lie in one block, those that different threads write a cache line apart from each other.
Emitted code (`runtime`) and Python (`pool`) agree on the offsets here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# offsets in the shared block
ARRIVED = 0  # i32: threads that have reached the barrier
GENERATION = 64  # i32: barriers passed so far
SLEEPERS = 128  # i32: threads asleep at the barrier or for want of work
ROUND = 192  # i32: runs begun so far; idle workers watch it
SPINS = 256  # i64: turns to spin before sleeping
SYSCALL, FUTEX, YIELD = 264, 272, 280  # ptr, i64, ptr: how to sleep
STEPS, COUNT, THREADS, STOP = 320, 328, 336, 344  # the run: ptr, i64, i64, and whether to end
SHARED_BYTES = 384

BARRIER_AFTER = 1
"""The flag of a step whose results the next step reads."""


def step_table(steps: list[tuple[int, int, int]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """(kernel address, args address, flags) as the table that `run` reads."""
    return np.array(steps, np.uint64).reshape(-1, 3)
