"""What quantizing a model needs to know of its data, gathered in one pass.

For each site: minimum and maximum of every channel, a bounded number of rows drawn from all
batches, and the Gram matrix of many rows. Memory does not grow with the number of batches.

Ranges come from the even batches and rows from the odd ones when choices are scored, so that a
range too tight for data it has not seen is not chosen; the final ranges come from all batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bitwright import system
from bitwright.ir.graph import Graph
from bitwright.quant.calibration.model_outputs import Channels, ReducedOutputs, Seen
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product

Array = np.ndarray[Any, Any]
ROWS_SCORED = 256
ROWS_OF_TERM = 4
FEWEST_ROWS, MOST_ROWS = 512, 4096
NUMBERS_SCORED = 1 << 19
"""Rows that are kept for scoring are fewer where they are long."""
BATCHES_WITH_ROWS = 16
FEWEST_BYTES = 1 << 20
"""Of rows, before their second moments are taken."""


@dataclass
class Sample:
    """Rows that products of one window see: some of them kept, second moments of all.

    New rows wait until there are as many as make a product of matrices worth its result.
    """

    first: Array
    rows: list[Array]
    gram: Array
    """Σ xᵀx over the rows x, but those that wait, [groups, terms, terms]."""
    total: Array
    counted: int
    waiting: list[Array] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Array) -> Sample:
        groups, terms = rows.shape[1:]
        gram = np.zeros((groups, terms, terms), np.float32)
        return cls(rows[:ROWS_SCORED].copy(), [], gram, np.zeros((groups, terms)), 0)

    def add(self, rows: Array, keep: int) -> None:
        if keep:
            self.rows.append(rows[:keep].copy())
        is_first = not self.counted  # what a product takes in memory is taken early, then no more
        self.counted += len(rows)
        self.waiting.append(rows)
        held = sum(part.nbytes for part in self.waiting)
        if is_first or held >= max(FEWEST_BYTES, self.gram.nbytes // 4):
            self._settle()

    def _settle(self) -> None:
        """Second moments and sums of the rows that wait."""
        if not self.waiting:
            return
        rows = np.concatenate(self.waiting)
        self.waiting.clear()
        if rows.shape[1] == 1:
            self.gram[0] += rows[:, 0].T @ rows[:, 0]
        else:
            transposed = np.ascontiguousarray(rows.transpose(1, 2, 0))
            self.gram += transposed @ transposed.transpose(0, 2, 1)
        ones = np.ones(len(rows), np.float32)
        self.total += (ones @ rows.reshape(len(rows), self.total.size)).reshape(self.total.shape)

    @cached_property
    def scored(self) -> Array:
        """Rows of the odd batches, or of the only one."""
        return np.concatenate(self.rows) if self.rows else self.first

    @property
    def second_moment(self) -> Array:
        self._settle()
        return self.gram / np.float32(max(1, self.counted))

    @property
    def mean(self) -> Array:
        self._settle()
        return np.asarray((self.total / max(1, self.counted)).astype(np.float32))


@dataclass
class CalibrationStats:
    """All that was seen at one site."""

    point: QuantizationPoint
    every: Channels
    some: Channels
    """Of the even batches alone."""
    samples: dict[Any, Sample] = field(default_factory=dict)

    def widen(self, channels: Channels, is_even: bool) -> None:
        self.every = self.every.widened(channels)
        if is_even:
            self.some = self.some.widened(channels)

    def sample(self, product: Product) -> Sample:
        """The rows that a product sees; where its own value was always empty, those of another
        product that has the same number of terms."""
        found = self.samples.get(product.window_key)
        if found is not None:
            return found
        groups, _, terms = product.matrix.shape
        fitting = (s for s in self.samples.values() if s.gram.shape == (groups, terms, terms))
        return next(fitting)


class StatsBuilder:
    """Gathers evidence by name of the site's value; `count` is the number of batches, if known.

    Rows are drawn from every `stride`-th batch; of the others only minima and maxima of the
    channels are taken. Where there are more batches than were announced, the stride doubles and
    every other part of the kept rows goes.
    """

    def __init__(
        self,
        graph: Graph,
        points: Iterable[QuantizationPoint],
        *,
        count: int | None,
        threads: int | None = None,
    ) -> None:
        self.points = {point.name: point for point in points}
        self.stats: dict[str, CalibrationStats] = {}
        self.batches = 0
        self.reached: set[str] = set()
        """The bodies whose sites the last batch showed."""
        self.is_between_batches = True
        """False while a batch runs, and after one that was broken off: it is counted in part."""
        self.stride = max(1, (count or 1) // BATCHES_WITH_ROWS)
        self.turns = -(-(count or BATCHES_WITH_ROWS) // self.stride)
        """Batches that rows are drawn from, as far as is known."""
        self.draw = np.random.default_rng(0)
        counts = {
            (point.name, key): -(-_rows_wanted(product) // (self.turns * len(point.values)))
            for point in self.points.values()
            for key, product in point.windows.items()
        }
        self._reduced = ReducedOutputs(graph, self.points, counts, threads)

    def step(self, batch: Mapping[str, Any]) -> None:
        """Run one batch and add what it shows."""
        if self.batches // self.stride >= 2 * BATCHES_WITH_ROWS:
            self.stride *= 2
            for stats in self.stats.values():
                for sample in stats.samples.values():
                    del sample.rows[1::2]
        self.is_between_batches = False
        turn, rest = divmod(self.batches, self.stride)
        is_even = (self.batches if rest else turn) % 2 == 0
        self.reached = set()
        for seen in self._reduced.run(batch, self.batches, None if rest else self.draw):
            self._add(seen, is_even)
            self.reached.add(seen.point.path)
        self.batches += 1
        self.is_between_batches = True

    def _add(self, seen: Seen, is_even: bool) -> None:
        point, channels = seen.point, seen.channels
        if point.name not in self.stats:
            if not seen.rows:
                return
            self.stats[point.name] = CalibrationStats(point, channels, channels)
        stats = self.stats[point.name]
        stats.widen(channels, is_even)
        for key, rows in seen.rows.items():
            if key not in stats.samples:
                stats.samples[key] = Sample.of(rows)
            wanted = 2 * _rows_scored(point.windows[key])
            full = point.is_inside and sum(map(len, stats.samples[key].rows)) >= wanted
            stats.samples[key].add(rows, 0 if is_even or full else -(-wanted // self.turns))

    def close(self) -> None:
        """Give back what only running batches needed, but the kernels: models compiled next have
        the same ones."""
        self._kernels = self._reduced.kernels
        del self._reduced
        system.trim_memory()


def _rows_wanted(product: Product) -> int:
    """Rows that second moments of so many terms are taken from."""
    terms = int(product.matrix.shape[2])
    return min(MOST_ROWS, max(FEWEST_ROWS, ROWS_OF_TERM * terms))


def _rows_scored(product: Product) -> int:
    """Rows of this product that errors are measured on."""
    groups, _, terms = product.matrix.shape
    return int(min(ROWS_SCORED, max(32, NUMBERS_SCORED // (groups * terms))))
