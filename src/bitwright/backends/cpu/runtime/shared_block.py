"""The memory that the threads of a pool share, and the table of steps they run.

The words lie in one block, those that different threads write a cache line apart from each other.
Emitted code (`runtime`, `waiting`) and Python (`pool`) agree on the offsets here. All are eight
bytes; a word that threads wait for has the number of those that sleep on it behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LINE = 64
# offsets in the shared block
GENERATION = 0  # the phase that runs now: see `runtime`
ROUND = LINE  # runs begun so far; idle workers watch it
SLEEPERS = 8  # behind a word, i32: threads asleep on it
DONE = 2 * LINE  # parts of the phase that are finished
COLLIDED = DONE + 8  # whether a worker found itself on the caller's processor
STEPS, COUNT, CURSOR, CALLER = (3 * LINE + 8 * n for n in range(4))  # the run
# facts: how many threads, whether to end, turns to wait for each other, for a run, for a part to be
# begun; how to sleep, how to yield
THREADS, STOP, SPINS, IDLE_SPINS, PATIENCE, SYSCALL, FUTEX, YIELD = (
    4 * LINE + 8 * n for n in range(8)
)
PROCESSOR = 5 * LINE  # a function that tells where a thread runs
CLAIMS = 6 * LINE  # one line for each thread: the last generation of which its part was claimed

BARRIER_AFTER, ALONE = 1, 2
"""Flags of a step: the next one reads its results; its phase is done by one thread."""


def shared_bytes(threads: int) -> int:
    return CLAIMS + threads * LINE


def step_table(steps: list[tuple[int, int, int]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """(kernel address, args address, flags) as the table that the runtime reads."""
    return np.array(steps, np.uint64).reshape(-1, 3)
