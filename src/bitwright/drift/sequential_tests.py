"""Sequential tests of the counters: whether the mean of a fraction has left its bound.

One number f in [0, 1] per observed run and test. Under the null hypothesis the mean of each run's
f, given the runs before, is at most m (or at least m). A bet multiplies a stake by

    e = 1 + rate (f - m)        or 1 + rate (m - f)

whose mean is at most 1 then, for every rate that keeps e positive. A bet may start at any run s,
with stake 1 / (s (s + 1)); these sum to 1. With several rates of equal weight the wealth is

    W_t = mean over rates of (A_t + 1 / (t + 1)),   A_t = (A_{t-1} + 1 / (t (t + 1))) e_t

a nonnegative supermartingale that starts at 1. By Ville's inequality P(some W_t >= 1 / a) <= a.
With a = level / tests, the probability that any test of a monitor ever gives a false alarm is at
most `level`, over its whole life and whenever it is looked at. No distribution is assumed, and
values of one run may depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwright.ir.arrays import Array

RATES = (0.5, 0.1, 0.02)
"""Rates of tests for too large a mean, as parts of the largest rate that keeps e positive."""
LOW_RATES = (0.9, 0.3, 0.1)
"""The same for too small a mean."""
LARGEST = 1e200
PEAK = 1e12
"""The largest value of the running sum that marks the start of a change."""


class SequentialTests:
    """The wealth of several tests; row i of every array belongs to test i.

    `means` are the bounds; `is_upper` says whether a test looks for a mean above its bound.
    """

    def __init__(self, means: Sequence[float], is_upper: Sequence[bool]) -> None:
        self._means = np.asarray(means, np.float64)
        self._sign = np.where(np.asarray(is_upper, bool), 1.0, -1.0)
        upper = np.array(RATES) / np.maximum(self._means, 1e-9)[:, None]
        lower = np.array(LOW_RATES) / np.maximum(1 - self._means, 1e-9)[:, None]
        self._rates = np.where(self._sign[:, None] > 0, upper, lower)
        self.reset()

    def reset(self) -> None:
        count = len(self._means)
        self.runs = np.zeros(count, np.int64)
        self.stakes = np.zeros((count, len(RATES)))
        self.sums = np.zeros(count)
        """The wealth of bets since the most likely start of a change."""

    def update(self, fractions: Array, is_observed: Array) -> Array:
        """Add one run; returns where a change starts anew at this run."""
        runs = self.runs + is_observed
        factors = 1 + self._rates * (self._sign * (fractions - self._means))[:, None]
        with np.errstate(divide="ignore"):
            start = np.where(runs > 0, 1 / (runs * (runs + 1.0)), 0.0)
        stakes = np.clip((self.stakes + start[:, None]) * factors, 0, LARGEST)
        is_start = is_observed & (self.sums <= 1)
        sums = np.minimum(np.maximum(self.sums, 1) * factors[:, 1], PEAK)
        self.runs = runs
        self.stakes = np.where(is_observed[:, None], stakes, self.stakes)
        self.sums = np.where(is_observed, sums, self.sums)
        return is_start

    @property
    def wealth(self) -> Array:
        """W of each test."""
        return np.asarray(self.stakes.mean(axis=1) + 1 / (self.runs + 1.0))
