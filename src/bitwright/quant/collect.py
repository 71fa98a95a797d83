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
from bitwright.backends.cpu.code import KernelCode
from bitwright.errors import CalibrationError
from bitwright.ir.graph import Graph, Value, constant_value
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


def windows(site: Site) -> dict[Any, Product]:
    """One product for each kind of rows that the site's products see."""
    return {_window_key(product): product for product in site.products}


class Collector:
    """Gathers evidence by name of the site's value; `count` is the number of batches, if known.

    Rows are drawn from every `stride`-th batch; of the others only minima and maxima of the
    channels are taken, which the compiled model finds itself. Where there are more batches than
    were announced, the stride doubles and every other part of the kept rows goes.
    """

    def __init__(
        self, graph: Graph, sites: Iterable[Site], *, count: int | None, threads: int | None = None
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.evidence: dict[str, Evidence] = {}
        self.batches = 0
        self.is_between_batches = True
        """False while a batch runs, and after one that was broken off: it is counted in part."""
        self.stride = max(1, (count or 1) // BATCHES_WITH_ROWS)
        self.turns = -(-(count or BATCHES_WITH_ROWS) // self.stride)
        """Batches that rows are drawn from, as far as is known."""
        self.draw = np.random.default_rng(0)
        self._read: dict[str, list[Site]] = {}
        for site in self.sites.values():
            self._read.setdefault(site.tap, []).append(site)
        self._whole = Taps(graph, self._read, threads=threads, simplify=False)
        self._extremes = _Extremes(graph, self.sites, threads)

    def step(self, batch: Mapping[str, Any]) -> None:
        """Run one batch and add what it shows."""
        if self.batches // self.stride >= 2 * BATCHES_WITH_ROWS:
            self.stride *= 2
            for evidence in self.evidence.values():
                for sample in evidence.samples.values():
                    del sample.rows[1::2]
        self.is_between_batches = False
        turn, rest = divmod(self.batches, self.stride)
        if rest:
            for name, channels in self._extremes.run(batch, self.batches):
                if name in self.evidence:
                    self.evidence[name].widen(channels, self.batches % 2 == 0)
        else:
            for tap, array in self._whole.run(batch):
                for site in self._read[tap]:
                    if array.size:  # a past of no tokens has nothing to show
                        self._add(site, array, turn % 2 == 0)
        self.batches += 1
        self.is_between_batches = True

    def _add(self, site: Site, array: Array, is_even: bool) -> None:
        channels = Channels.of(array, site.channel_axis)
        _require_finite(site.name, self.batches, channels)
        evidence = self.evidence.setdefault(site.name, Evidence(site, channels, channels))
        evidence.widen(channels, is_even)
        for key, product in windows(site).items():
            rows = product.rows(array, -(-_rows_wanted(product) // self.turns), self.draw)
            if key not in evidence.samples:
                evidence.samples[key] = Sample.of(rows)
            wanted = 2 * _rows_scored(product)
            full = site.is_inside and sum(map(len, evidence.samples[key].rows)) >= wanted
            evidence.samples[key].add(rows, 0 if is_even or full else -(-wanted // self.turns))

    def close(self) -> None:
        """Give back what only running batches needed, but the kernels: models compiled next have
        the same ones."""
        self._kernels = self._whole.kernels + self._extremes.kernels
        del self._whole, self._extremes
        system.give_memory_back()


def _rows_wanted(product: Product) -> int:
    """Rows that second moments of so many terms are taken from."""
    terms = int(product.matrix.shape[2])
    return min(MOST_ROWS, max(FEWEST_ROWS, ROWS_OF_TERM * terms))


def _rows_scored(product: Product) -> int:
    """Rows of this product that errors are measured on."""
    groups, _, terms = product.matrix.shape
    return int(min(ROWS_SCORED, max(32, NUMBERS_SCORED // (groups * terms))))


class _Extremes:
    """Minima and maxima of every channel of every site, found by the compiled model.

    They come as one vector, minima and maxima of a site behind those of the one before it; of a
    value that is never negative there are no minima.
    """

    def __init__(self, graph: Graph, sites: Mapping[str, Site], threads: int | None) -> None:
        self._graph, self._threads = graph, threads
        self._outside = [site for site in sites.values() if not site.is_inside]
        self._inside: dict[str, list[Site]] = {}
        """Values of branches are seen as they are."""
        for site in sites.values():
            if site.is_inside:
                self._inside.setdefault(site.tap, []).append(site)

    @cached_property
    def _taps(self) -> Taps:
        b = Builder()
        for node in self._graph.nodes:
            b.append(node)
        ends = []
        for site in self._outside:
            axes = [i for i in range(site.value.rank) if i != site.channel_axis]
            if not _is_never_negative(site.value):
                ends.append(b.op("reduce_min", site.value, axes=axes, keepdims=False))
            ends.append(b.op("reduce_max", site.value, axes=axes, keepdims=False))
        graph, names = self._graph, list(self._inside)
        if ends:
            names.append(b.op("concat", *ends, axis=0, name="extremes").name)
            graph = graph.with_(nodes=tuple(b.nodes))
        return Taps(graph, names, threads=self._threads, simplify=False)

    def run(self, batch: Mapping[str, Any], number: int) -> Iterator[tuple[str, Channels]]:
        for name, array in self._taps.run(batch):
            if name in self._inside:
                found = [(s, Channels.of(array, s.channel_axis)) for s in self._inside[name]]
            else:
                found = list(self._split(array))
            if not np.isfinite(array).all():
                for site, channels in found:
                    _require_finite(site.name, number, channels)
            yield from ((site.name, channels) for site, channels in found)

    @property
    def kernels(self) -> list[KernelCode]:
        return self._taps.kernels

    def _split(self, ends: Array) -> Iterator[tuple[Site, Channels]]:
        start = 0
        for site in self._outside:
            count = site.channels
            low = np.zeros(count, np.float32)
            if not _is_never_negative(site.value):
                low = np.minimum(ends[start : start + count], 0)
                start += count
            yield site, Channels(low, np.maximum(ends[start : start + count], 0))
            start += count


def _is_never_negative(value: Value) -> bool:
    """Whether what makes a value says so; NaN is seen among its maxima."""
    node = value.node
    if node.op == "clip":
        lowest = constant_value(node.inputs[1]) if len(node.inputs) > 1 else None
        return lowest is not None and bool((lowest >= 0).all())
    return node.op in ("relu", "sigmoid", "softmax", "hard_sigmoid")


def _require_finite(name: str, number: int, channels: Channels) -> None:
    """Minima and maxima pass NaN on, so they tell of every number they were taken from."""
    bad = ~(np.isfinite(channels.low) & np.isfinite(channels.high))
    if bad.any():
        raise CalibrationError(
            f"the value {name!r} holds NaN or infinity in {int(bad.sum())} of its channels",
            where=f"batch {number} of the data",
            hint="Look for broken samples, or for a model that overflows on them.",
        )
