"""Counters of the watched tensors over all observed runs, and the tests on them.

A test of "clipped" (static ranges) or "outside" (dynamic ones) asks whether the mean fraction of
values outside of the range exceeds 2 p + tolerance + 0.2 / (n + 1), with p that of calibration and
n its batches: of further batches of the same kind, 1 / (n + 1) exceed the range of n on each side,
with a tenth of their values at most, as is assumed. A test of "unused" asks
whether less than a quarter as many values as in calibration lie beyond a part of the range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitwright.drift.sequential_tests import SequentialTests
from bitwright.drift.tensors import WatchedTensor
from bitwright.errors import BitwrightError, ParseError
from bitwright.ir.arrays import Array
from bitwright.ir.container import write_atomically
from bitwright.ops.math.range_counts import EXTRA
from bitwright.quant.model.calibrated_ranges import OCTAVES

FORMAT = "bitwright drift counters 1"
UNKNOWN_LIMIT = 0.01
"""The clipped fraction that is allowed where calibration's is unknown."""
MARGIN = 2.0
"""The factor of the calibrated fraction that is allowed: it is measured on a sample."""
FEW_BATCHES = 0.2
"""The fraction that is allowed for a range from no batch; it falls with their number."""
SHRINK = 4.0
"""Fewer values than in calibration by this factor count as an unused range."""
LEAST_OUTER, LEAST_USEFUL = 0.2, 0.02
FIRST_PART = 2
"""Tests of an unused range look at values beyond 1/4 of it, or less."""


@dataclass(frozen=True)
class Test:
    """One sequential test."""

    tensor: int
    kind: str
    """"clipped", "outside" or "unused"."""
    mean: float
    """The bound of the mean fraction."""
    part: int = 0
    """The fraction is of values beyond 2**-part of the range."""

    __test__ = False  # not a test of pytest


def make_tests(tensors: Sequence[WatchedTensor], tolerance: float) -> list[Test]:
    """The tests of all tensors."""
    found = []
    for index, one in enumerate(tensors):
        expected = one.expected
        limit = UNKNOWN_LIMIT
        if expected is not None and one.calibrated is not None:
            few = FEW_BATCHES / (one.calibrated.batches + 1)
            limit = MARGIN * expected + tolerance + few
        kind = "clipped" if one.is_static else "outside"
        if limit < 1:
            found.append(Test(index, kind, limit))
        outer = [] if one.calibrated is None or not one.is_static else one.calibrated.outer
        parts = [k for k in range(FIRST_PART, len(outer) + 1) if outer[k - 1] >= LEAST_OUTER]
        if outer and (parts or outer[-1] >= LEAST_USEFUL):
            part = parts[0] if parts else OCTAVES
            found.append(Test(index, "unused", outer[part - 1] / SHRINK, part))
    return found


@dataclass
class Window:
    """Sums over runs: row i belongs to tensor i, or to test i."""

    bins: Array
    missing: Array
    low: Array
    high: Array

    @classmethod
    def empty(cls, rows: int, bins: int) -> Window:
        ends = np.full(rows, np.inf)
        return cls(np.zeros((rows, bins), np.int64), np.zeros(rows, np.int64), ends, -ends)

    def add(self, counters: Array) -> None:
        bins = self.bins.shape[1]
        self.bins += counters[:, :bins].astype(np.int64)
        self.missing += counters[:, bins].astype(np.int64)
        self.low = np.minimum(self.low, counters[:, bins + 1])
        self.high = np.maximum(self.high, counters[:, bins + 2])

    def clear(self, rows: Array) -> None:
        self.bins[rows], self.missing[rows] = 0, 0
        self.low[rows], self.high[rows] = np.inf, -np.inf

    def beyond(self, row: int, part: int = 0) -> tuple[int, int]:
        """Values beyond 2**-part of the range, below and above."""
        bins = self.bins[row]
        return int(bins[: part + 1].sum()), int(bins[len(bins) - part - 1 :].sum())

    def count(self, row: int) -> int:
        return int(self.bins[row].sum())


class Counters:
    """Counters and tests of one monitor."""

    def __init__(self, tensors: Sequence[WatchedTensor], tolerance: float, level: float) -> None:
        self.tensors = list(tensors)
        self.tolerance, self.level = tolerance, level
        self.tests = make_tests(tensors, tolerance)
        self._owner = np.array([test.tensor for test in self.tests], np.int64)
        self._parts = np.array([test.part for test in self.tests], np.int64)
        means = [test.mean for test in self.tests]
        self.wealths = SequentialTests(means, [test.kind != "unused" for test in self.tests])
        self.bins = 2 * OCTAVES + 3
        self.reset()

    def reset(self) -> None:
        """Forget all runs."""
        self.runs = self.observed = 0
        self.total = Window.empty(len(self.tensors), self.bins)
        self.since = Window.empty(len(self.tests), self.bins)
        self.since_run = np.zeros(len(self.tests), np.int64)
        self.alarmed_run = np.zeros(len(self.tests), np.int64)
        self.wealths.reset()

    @property
    def limit(self) -> float:
        """The wealth that raises an alarm."""
        return max(len(self.tests), 1) / self.level

    def update(self, counters: Array, run: int) -> list[int]:
        """Add the counters [tensors, numbers] of a run; returns the tests that now alarm."""
        assert counters.shape == (len(self.tensors), self.bins + EXTRA - 1)
        self.observed += 1
        self.total.add(counters)
        if not self.tests:
            return []
        own = counters[self._owner]
        counts = own[:, : self.bins].sum(axis=1)
        sums = np.cumsum(own[:, : self.bins], axis=1)
        rows = np.arange(len(self.tests))
        below = sums[rows, self._parts]
        above = counts - sums[rows, self.bins - 2 - self._parts]
        is_observed = counts > 0
        fractions = (below + above) / np.maximum(counts, 1)
        is_start = self.wealths.update(fractions, is_observed)
        self.since.clear(is_start)
        self.since_run[is_start] = run
        self.since.add(own)
        is_new = (self.wealths.wealth >= self.limit) & (self.alarmed_run == 0)
        self.alarmed_run[is_new] = run
        return [int(index) for index in np.flatnonzero(is_new)]

    # files

    @property
    def _identity(self) -> list[list[Any]]:
        """What ties a file to a model: names and edges."""
        return [[one.name, one.is_static, one.edges.tolist()] for one in self.tensors]

    def save(self, path: str | Path) -> None:
        """Write the counters as JSON; infinities are null."""
        windows = {"total": self.total, "since": self.since}
        record = {
            "format": FORMAT,
            "tensors": _plain(self._identity),
            "tests": [[t.tensor, t.kind, t.mean, t.part] for t in self.tests],
            "runs": self.runs,
            "observed": self.observed,
            **{
                name: _plain({k: v.tolist() for k, v in vars(w).items()})
                for name, w in windows.items()
            },
            "since_run": self.since_run.tolist(),
            "alarmed_run": self.alarmed_run.tolist(),
            "wealths": {
                key: getattr(self.wealths, key).tolist() for key in ("runs", "stakes", "sums")
            },
        }
        text = json.dumps(record, allow_nan=False).encode()

        def write(file: IO[bytes]) -> None:
            file.write(text)

        write_atomically(path, write)

    def load(self, path: str | Path) -> None:
        """Continue the counters of a file; raises if it belongs to another model or options."""
        try:
            record = json.loads(Path(path).read_bytes())
            if record["format"] != FORMAT:
                raise ValueError("it has another format")
            same = record["tensors"] == _plain(self._identity)
            tests = [[t.tensor, t.kind, t.mean, t.part] for t in self.tests]
            if not same or record["tests"] != tests:
                raise BitwrightError(
                    f"the counters in {path} belong to another model or other options",
                    expected=f"the counters of these {len(self.tensors)} tensors, with tolerance "
                    f"{self.tolerance:g}",
                    hint="Use another file, or remove this one.",
                )
            total, since = (
                _window(record[name], rows, self.bins)
                for name, rows in (("total", len(self.tensors)), ("since", len(self.tests)))
            )
            numbers = [
                np.array(record[name], np.int64).reshape(len(self.tests))
                for name in ("since_run", "alarmed_run")
            ]
            wealths = {
                "runs": np.array(record["wealths"]["runs"], np.int64).reshape(len(self.tests)),
                "stakes": np.array(record["wealths"]["stakes"], np.float64).reshape(
                    self.wealths.stakes.shape
                ),
                "sums": np.array(record["wealths"]["sums"], np.float64).reshape(len(self.tests)),
            }
            runs, observed = int(record["runs"]), int(record["observed"])
        except OSError as error:
            raise BitwrightError(f"cannot read {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ParseError(
                f"the counters in {path} are damaged: {error}", hint="Remove the file."
            ) from None
        self.total, self.since, self.runs, self.observed = total, since, runs, observed
        self.since_run, self.alarmed_run = numbers
        for key, array in wealths.items():
            setattr(self.wealths, key, array)


def _plain(item: Any) -> Any:
    """Nested lists with None in place of infinities, which JSON lacks."""
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    if isinstance(item, list):
        return [_plain(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def _window(record: Any, rows: int, bins: int) -> Window:
    low, high = (
        np.array([end if v is None else v for v in record[key]], np.float64).reshape(rows)
        for key, end in (("low", np.inf), ("high", -np.inf))
    )
    missing = np.array(record["missing"], np.int64).reshape(rows)
    return Window(np.array(record["bins"], np.int64).reshape(rows, bins), missing, low, high)
