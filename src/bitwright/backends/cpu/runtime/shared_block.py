"""The layout of the memory that the threads of a pool share, and of step tables.

Words that different threads write are in different cache lines. Emitted code (`emitted`,
`waiting`) and Python (`pool`) use these offsets. Each word has eight bytes; a word that threads
wait on is followed by the number of threads that sleep on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LINE = 64
# offsets in the shared block
GENERATION = 0  # the current phase, see `emitted`
ROUND = LINE  # runs started so far; idle workers wait on it
SLEEPERS = 8  # relative to a word, i32: threads that sleep on it
DONE = 2 * LINE  # finished parts of the phase
COLLIDED = DONE + 8  # whether a worker ran on the caller's processor
SLEEPS = DONE + 16  # how often a thread slept at a barrier
STEPS, COUNT, CURSOR, CALLER = (3 * LINE + 8 * n for n in range(4))  # the run
# constants: number of threads, stop flag, spin iterations at a barrier, between runs and before
# claiming parts of others, functions to sleep and to yield
THREADS, STOP, SPINS, IDLE_SPINS, STEAL_SPINS, SYSCALL, FUTEX, YIELD = (
    4 * LINE + 8 * n for n in range(8)
)
PROCESSOR = 5 * LINE  # a function that returns the current processor
ACTIVE = PROCESSOR + 8  # workers that are not excluded
CLAIMS = 6 * LINE  # one line per part: the generation of its last claim
EXCLUDED = CLAIMS + 8  # in the line of each thread: whether it takes no part in runs

BARRIER_AFTER, ALONE = 1, 2
"""Flags of a step: a barrier follows; one thread runs its phase."""


def shared_bytes(threads: int) -> int:
    return CLAIMS + threads * LINE


def step_table(steps: list[tuple[int, int, int]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """The table of (kernel address, args address, flags) that the runtime reads."""
    return np.array(steps, np.uint64).reshape(-1, 3)
