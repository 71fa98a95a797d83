"""Times of runs: after a warm-up, sides interleaved, medians with quartiles.

    found = time_sides({"f32": run_f32, "int8": run_int8}, seconds=0.5)
    found["int8"].median, found["int8"].quartiles

Every round calls each side once to warm caches and threads, then times one call, so that load from
other processes affects all sides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Run = Callable[[], object]
Key = TypeVar("Key")
LEAST_ROUNDS = 3
LEAST_CALLS = 1 + 2 * LEAST_ROUNDS
"""Calls of each side, with the warm-up."""


@dataclass(frozen=True)
class Timing:
    """The seconds of each timed run."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    def times_faster_than(self, other: Timing) -> float:
        """The median over rounds of the other's time divided by this one's."""
        pairs = zip(other.seconds, self.seconds, strict=False)
        return statistics.median(theirs / max(own, 1e-9) for theirs, own in pairs)

    def as_json(self) -> dict[str, Any]:
        return {
            "median_seconds": self.median,
            "quartiles_seconds": self.quartiles,
            "minimum_seconds": self.minimum,
            "rounds": len(self.seconds),
        }


def time_sides(
    sides: Mapping[Key, Run], seconds: float, most_rounds: int = 200, warmup: int = 1
) -> dict[Key, Timing]:
    """The timing of each side; ends after `seconds`, but not before three rounds."""
    for run in sides.values():
        for _ in range(warmup):
            run()
    stop = time.perf_counter() + seconds
    found: dict[Key, list[float]] = {key: [] for key in sides}
    for number in range(most_rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() >= stop:
            break
        for key, run in sides.items():
            run()
            begin = time.perf_counter()
            run()
            found[key].append(time.perf_counter() - begin)
    return {key: Timing(tuple(times)) for key, times in found.items()}
