"""CalibrationStats: statistics of each quantization point, for quantizing a model.

For each point: minimum and maximum of every channel, a bounded sample of rows, and the Gram matrix
of more rows. Memory does not grow with the number of batches.

Candidates are scored with ranges of the even batches on rows of the odd batches, which penalizes
ranges that are too narrow for unseen data. Final ranges use all batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bitwright import system
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.quant.calibration.model_outputs import BatchStats, Channels, ReducedOutputs
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product

ROWS_SCORED = 256
ROWS_OF_TERM = 4
FEWEST_ROWS, MOST_ROWS = 512, 4096
NUMBERS_SCORED = 1 << 19
"""Upper bound of rows x row length for scoring."""
BATCHES_WITH_ROWS = 16
FEWEST_BYTES = 1 << 20
"""Pending rows are accumulated when they reach this size."""


@dataclass
class Sample:
    """Rows of one window: a sample of them, and second moments of all.

    New rows are buffered, because one large matrix product is faster than many small ones.
    """

    first: Array
    rows: list[Array]
    gram: Array
    """Σ xᵀx over the rows x, without pending rows, [groups, terms, terms]."""
    total: Array
    counted: int
    pending: list[Array] = field(default_factory=list)

    @classmethod
    def of(cls, rows: Array) -> Sample:
        groups, terms = rows.shape[1:]
        gram = np.zeros((groups, terms, terms), np.float32)
        return cls(rows[:ROWS_SCORED].copy(), [], gram, np.zeros((groups, terms)), 0)

    def add(self, rows: Array, keep: int) -> None:
        if keep:
            self.rows.append(rows[:keep].copy())
        is_first = not self.counted  # allocate the memory of the product early
        self.counted += len(rows)
        self.pending.append(rows)
        held = sum(part.nbytes for part in self.pending)
        if is_first or held >= max(FEWEST_BYTES, self.gram.nbytes // 4):
            self._accumulate()

    def _accumulate(self) -> None:
        """Add the pending rows to second moments and sums."""
        if not self.pending:
            return
        rows = np.concatenate(self.pending)
        self.pending.clear()
        if rows.shape[1] == 1:
            self.gram[0] += rows[:, 0].T @ rows[:, 0]
        else:
            transposed = np.ascontiguousarray(rows.transpose(1, 2, 0))
            self.gram += transposed @ transposed.transpose(0, 2, 1)
        ones = np.ones(len(rows), np.float32)
        self.total += (ones @ rows.reshape(len(rows), self.total.size)).reshape(self.total.shape)

    @cached_property
    def scored(self) -> Array:
        """Rows of the odd batches; if there is one batch, its rows."""
        return np.concatenate(self.rows) if self.rows else self.first

    @property
    def second_moment(self) -> Array:
        self._accumulate()
        return self.gram / np.float32(max(1, self.counted))

    @property
    def mean(self) -> Array:
        self._accumulate()
        return np.asarray((self.total / max(1, self.counted)).astype(np.float32))


@dataclass
class CalibrationStats:
    """Statistics of one quantization point."""

    point: QuantizationPoint
    every: Channels
    some: Channels
    """Ranges of the even batches only."""
    samples: dict[Any, Sample] = field(default_factory=dict)

    def widen(self, channels: Channels, is_even: bool) -> None:
        self.every = self.every.widened(channels)
        if is_even:
            self.some = self.some.widened(channels)

    def sample(self, product: Product) -> Sample:
        """The rows of a product's window; if its value was always empty, those of another product
        with the same number of terms."""
        found = self.samples.get(product.window_key)
        if found is not None:
            return found
        groups, _, terms = product.matrix.shape
        fitting = (s for s in self.samples.values() if s.gram.shape == (groups, terms, terms))
        return next(fitting)


class StatsBuilder:
    """Accumulates CalibrationStats by name of point; `count` is the number of batches, if known.

    Rows are sampled from every `stride`-th batch; other batches contribute channel ranges only. If
    there are more batches than expected, the stride doubles and every other part of the sampled
    rows is dropped.
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
        """The bodies that the last batch executed."""
        self.is_between_batches = True
        """False while a batch runs, and after a batch that was aborted and is counted in part."""
        self.stride = max(1, (count or 1) // BATCHES_WITH_ROWS)
        self.turns = -(-(count or BATCHES_WITH_ROWS) // self.stride)
        """The expected number of batches that rows are sampled from."""
        self.draw = np.random.default_rng(0)
        counts = {
            (point.name, key): -(-_rows_wanted(product) // (self.turns * len(point.values)))
            for point in self.points.values()
            for key, product in point.windows.items()
        }
        self._reduced = ReducedOutputs(graph, self.points, counts, threads)

    def step(self, batch: Mapping[str, Any]) -> None:
        if self.batches // self.stride >= 2 * BATCHES_WITH_ROWS:
            self.stride *= 2
            for stats in self.stats.values():
                for sample in stats.samples.values():
                    del sample.rows[1::2]
        self.is_between_batches = False
        turn, rest = divmod(self.batches, self.stride)
        is_even = (self.batches if rest else turn) % 2 == 0
        self.reached = set()
        for found in self._reduced.run(batch, self.batches, None if rest else self.draw):
            self._add(found, is_even)
            self.reached.add(found.point.path)
        self.batches += 1
        self.is_between_batches = True

    def _add(self, batch: BatchStats, is_even: bool) -> None:
        point, channels = batch.point, batch.channels
        if point.name not in self.stats:
            if not batch.rows:
                return
            self.stats[point.name] = CalibrationStats(point, channels, channels)
        stats = self.stats[point.name]
        stats.widen(channels, is_even)
        for key, rows in batch.rows.items():
            if key not in stats.samples:
                stats.samples[key] = Sample.of(rows)
            wanted = 2 * _rows_scored(point.windows[key])
            full = point.is_inside and sum(map(len, stats.samples[key].rows)) >= wanted
            stats.samples[key].add(rows, 0 if is_even or full else -(-wanted // self.turns))

    def close(self) -> None:
        """Free memory that only running batches needs; keeps the kernels, because the models
        compiled next share them."""
        self._kernels = self._reduced.kernels
        del self._reduced
        system.trim_memory()


def _rows_wanted(product: Product) -> int:
    """The number of rows for second moments."""
    terms = int(product.matrix.shape[2])
    return min(MOST_ROWS, max(FEWEST_ROWS, ROWS_OF_TERM * terms))


def _rows_scored(product: Product) -> int:
    """The number of rows for measuring errors."""
    groups, _, terms = product.matrix.shape
    return int(min(ROWS_SCORED, max(32, NUMBERS_SCORED // (groups * terms))))
