"""What quantizing a model needs to know of its data, gathered in one pass.

For each site: minimum and maximum of every channel, a bounded number of rows drawn from all
batches, and the Gram matrix of many rows. Memory does not grow with the number of batches.

Ranges come from the even batches and rows from the odd ones when choices are scored, so that a
range too tight for data it has not seen is not chosen; the final ranges come from all batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bitwright import system
from bitwright.errors import CalibrationError
from bitwright.ir.graph import Graph
from bitwright.ops.builder import Builder
from bitwright.quant.products import Product, Site
from bitwright.quant.taps import Taps

Array = np.ndarray[Any, Any]
ROWS_SCORED = 256
ROWS_OF_TERM = 4
FEWEST_ROWS, MOST_ROWS = 512, 4096
NUMBERS_SCORED = 1 << 19
"""Rows that are kept for scoring are fewer where they are long."""
BATCHES_WITH_ROWS = 16


@dataclass
class Channels:
    """Minimum and maximum of each channel; 0 is always between them."""

    low: Array
    high: Array

    @classmethod
    def of(cls, x: Array, axis: int) -> Channels:
        others = tuple(i for i in range(x.ndim) if i != axis)
        return cls(x.min(axis=others, initial=0), x.max(axis=others, initial=0))

    def widened(self, other: Channels) -> Channels:
        return Channels(np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    @property
    def peaks(self) -> Array:
        return np.maximum(-self.low, self.high)


@dataclass
class Sample:
    """Rows that products of one window see: some of them kept, second moments of all."""

    first: Array
    rows: list[Array]
    gram: Array
    total: Array
    counted: int

    @classmethod
    def of(cls, rows: Array) -> Sample:
        groups, terms = rows.shape[1:]
        gram = np.zeros((groups, terms, terms), np.float32)
        return cls(rows[:ROWS_SCORED].copy(), [], gram, np.zeros((groups, terms)), 0)

    def add(self, rows: Array, keep: int) -> None:
        if keep:
            self.rows.append(rows[:keep].copy())
        turned = np.ascontiguousarray(rows.transpose(1, 2, 0))
        self.gram += turned @ turned.transpose(0, 2, 1)
        self.total += rows.sum(axis=0, dtype=np.float64)
        self.counted += len(rows)

    @cached_property
    def scored(self) -> Array:
        """Rows of the odd batches, or of the only one."""
        return np.concatenate(self.rows) if self.rows else self.first

    @property
    def second_moment(self) -> Array:
        return self.gram / np.float32(max(1, self.counted))

    @property
    def mean(self) -> Array:
        return np.asarray((self.total / max(1, self.counted)).astype(np.float32))


@dataclass
class Evidence:
    """All that was seen at one site."""

    site: Site
    every: Channels
    some: Channels
    """Of the even batches alone."""
    samples: dict[Any, Sample] = field(default_factory=dict)

    def widen(self, channels: Channels, is_even: bool) -> None:
        self.every = self.every.widened(channels)
        if is_even:
            self.some = self.some.widened(channels)

    def sample(self, product: Product) -> Sample:
        return self.samples[_window_key(product)]


def _window_key(product: Product) -> Any:
    """Products of a site with the same key see the same rows."""
    return product.groups, product.window, *map(str, product.node.attrs.values())


def collect(
    graph: Graph,
    sites: Iterable[Site],
    batches: Iterable[Mapping[str, Any]],
    *,
    count: int | None,
    threads: int | None = None,
) -> dict[str, Evidence]:
    """Evidence by name of the site's value; `count` is the number of batches, if it is known.

    Rows are drawn from some batches, spread over the data; of the others only minima and maxima of
    the channels are taken, which the compiled model finds itself.
    """
    found = {site.name: site for site in sites}
    whole = Taps(graph, found, threads=threads, simplify=False)
    extremes = _Extremes(graph, found, threads)
    seen: dict[str, Evidence] = {}
    draw = np.random.default_rng(0)
    step = max(1, (count or 1) // BATCHES_WITH_ROWS)
    with_rows = -(-(count or BATCHES_WITH_ROWS) // step)
    for number, batch in enumerate(batches):
        turn, rest = divmod(number, step)
        if rest:
            for name, channels in extremes.run(batch, number):
                if name in seen:
                    seen[name].widen(channels, number % 2 == 0)
            continue
        for name, array in whole.run(batch):
            site = found[name]
            if not array.size:  # a past of no tokens, say
                continue
            channels = Channels.of(array, site.channel_axis)
            _require_finite(name, number, channels)
            evidence = seen.setdefault(name, Evidence(site, channels, channels))
            evidence.widen(channels, turn % 2 == 0)
            for key, product in {_window_key(p): p for p in site.products}.items():
                rows = product.rows(array, -(-_rows_wanted(product) // with_rows), draw)
                if key not in evidence.samples:
                    evidence.samples[key] = Sample.of(rows)
                sample = evidence.samples[key]
                kept = -(-2 * _rows_scored(product) // with_rows)
                sample.add(rows, kept if turn % 2 else 0)
    del whole, extremes
    system.give_memory_back()
    return seen


def _rows_wanted(product: Product) -> int:
    """Rows that second moments of so many terms are taken from."""
    terms = int(product.matrix.shape[2])
    return min(MOST_ROWS, max(FEWEST_ROWS, ROWS_OF_TERM * terms))


def _rows_scored(product: Product) -> int:
    """Rows of this product that errors are measured on."""
    groups, _, terms = product.matrix.shape
    return int(min(ROWS_SCORED, max(32, NUMBERS_SCORED // (groups * terms))))


class _Extremes:
    """Minima and maxima of every channel of every site, found by the compiled model."""

    def __init__(self, graph: Graph, sites: Mapping[str, Site], threads: int | None) -> None:
        self._graph, self._sites, self._threads = graph, sites, threads

    @cached_property
    def _taps(self) -> Taps:
        b = Builder()
        for node in self._graph.nodes:
            b.append(node)
        names = []
        for name, site in self._sites.items():
            axes = [i for i in range(site.value.rank) if i != site.channel_axis]
            for op in ("reduce_min", "reduce_max"):
                value = b.op(op, site.value, axes=axes, keepdims=False, name=f"{name}.{op}")
                names.append(value.name)
        graph = self._graph.with_(nodes=tuple(b.nodes))
        return Taps(graph, names, threads=self._threads, simplify=False)

    def run(self, batch: Mapping[str, Any], number: int) -> Iterator[tuple[str, Channels]]:
        lows: dict[str, Array] = {}
        for name, array in self._taps.run(batch):
            site, _, op = name.rpartition(".")
            if op == "reduce_min":
                lows[site] = np.minimum(array, 0)
            else:
                channels = Channels(lows.pop(site), np.maximum(array, 0))
                _require_finite(site, number, channels)
                yield site, channels


def _require_finite(name: str, number: int, channels: Channels) -> None:
    """Minima and maxima pass NaN on, so they tell of every number they were taken from."""
    bad = ~(np.isfinite(channels.low) & np.isfinite(channels.high))
    if bad.any():
        raise CalibrationError(
            f"the value {name!r} holds NaN or infinity in {int(bad.sum())} of its channels",
            where=f"batch {number} of the data",
            hint="Look for broken samples, or for a model that overflows on them.",
        )
