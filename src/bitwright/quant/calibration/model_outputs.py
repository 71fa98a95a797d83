"""Per-channel ranges and sampled rows of every quantization point, computed inside the model.

    minima, maxima    reduce_min(x), reduce_max(x) over all axes but the channel axis; one output
                      concatenates those of all points
    rows              gather(x as [positions, channels], places)

Both are nodes of the compiled graph, so full values are not stored. The row indices of all points
are one input [numbers, drawn]; `drawn` is 1, or 0 for batches without sampled rows. Values in
bodies of if / loop / scan, values with data-dependent sizes and empty values are read in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.backends.cpu.lowering.artifact import KernelCode
from bitwright.errors import CalibrationError
from bitwright.ir.arrays import Array
from bitwright.ir.dim import product as count_of
from bitwright.ir.dim import symbol
from bitwright.ir.dtype import i64
from bitwright.ir.feeds import input_sizes
from bitwright.ir.graph import Graph, Value
from bitwright.ir.naming import take_name
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.passes.signs import is_never_negative
from bitwright.quant.calibration.intermediate_outputs import IntermediateOutputs
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Places, Product

Rows = dict[Any, Array]
"""Rows of one point, by window key."""
Place = tuple[QuantizationPoint, Value]
"""A point and one of its values."""
Counts = Mapping[tuple[str, Any], int]
"""Rows to sample from one value, by name of the point and window key."""


@dataclass
class Channels:
    """Minimum and maximum of each channel, with low <= 0 <= high."""

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


@dataclass(frozen=True)
class BatchStats:
    """Channel ranges and sampled rows of one point in one batch."""

    point: QuantizationPoint
    channels: Channels
    rows: Rows = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Window:
    """Rows of one window that the compiled model gathers."""

    point: QuantizationPoint
    value: Value
    key: Any
    product: Product
    count: int
    """Maximum number of rows per batch."""
    first: int
    """Offset of its indices in the input of places."""

    @property
    def end(self) -> int:
        return self.first + self.count * self.product.window_size


class _Compiled:
    """The model with reductions and gathers as nodes; values in `whole` are read in full."""

    def __init__(
        self,
        graph: Graph,
        points: list[QuantizationPoint],
        whole: set[Place],
        counts: Counts,
        threads: int | None,
    ) -> None:
        self.whole: dict[str, list[Place]] = {}
        self.windows: list[_Window] = []
        self.outside = [point for point in points if not point.is_inside]
        for point, value in _places(points):
            if (point, value) in whole:
                self.whole.setdefault(point.path + value.name, []).append((point, value))
                continue
            for key, product in _windows(point, value).items():
                count = counts[point.name, key]
                self.windows.append(_Window(point, value, key, product, count, self.numbers))
        drawn = symbol(take_name("drawn", {s.name for s in graph.input_symbols}))
        self.input = take_name("places", set(graph.values))
        b = Builder(graph.name)
        places = b.input(self.input, TensorType(i64, (self.numbers, drawn)))
        for node in graph.nodes:
            b.append(node)
        self.rows = {_gathered(b, window, places).name: window for window in self.windows}
        outside = _places(self.outside)
        ends = [end for point, value in outside for end in _ends(b, point, value)]
        self.extremes = b.op("concat", *ends, axis=0).name if ends else ""
        names = [*self.whole, *self.rows, *([self.extremes] if ends else [])]
        graph = graph.with_(nodes=tuple(b.nodes))
        self.taps = IntermediateOutputs(graph, names, threads=threads, simplify=False)

    @property
    def numbers(self) -> int:
        """The total number of row indices."""
        return self.windows[-1].end if self.windows else 0


class ReducedOutputs:
    """Runs batches; `counts` is the number of rows to sample per batch, value and window."""

    def __init__(
        self,
        graph: Graph,
        points: Mapping[str, QuantizationPoint],
        counts: Counts,
        threads: int | None,
    ) -> None:
        self._graph, self._points, self._threads = graph, list(points.values()), threads
        self._counts = counts
        known = graph.input_symbols
        self._whole = {
            (point, value)
            for point, value in _places(self._points)
            if point.is_inside or not value.tensor.symbols <= known
        }
        self._made: _Compiled | None = None

    @property
    def kernels(self) -> list[KernelCode]:
        return [] if self._made is None else self._made.taps.kernels

    def run(
        self, batch: Mapping[str, Any], number: int, draw: np.random.Generator | None
    ) -> Iterator[BatchStats]:
        """Statistics of batch `number`; rows are sampled only if `draw` is given."""
        shapes = {} if draw is None else self._shapes(batch)
        empty = {place for place, shape in shapes.items() if 0 in shape} - self._whole
        if self._made is None or empty:
            self._whole |= empty
            given = self._graph, self._points, self._whole, self._counts, self._threads
            self._made = _Compiled(*given)
        model, places = self._made, dict[_Window, Places]()
        flat = np.zeros((model.numbers, 0 if draw is None else 1), np.int64)
        if draw is not None:
            for window in model.windows:
                shape = shapes[window.point, window.value]
                found = places[window] = window.product.places(shape, window.count, draw)
                flat[window.first : window.first + found.flat.size, 0] = found.flat
        rows: dict[Place, Rows] = {place: {} for place in _places(self._points)}
        for name, array in model.taps.run({**batch, model.input: flat}):
            if name == model.extremes:
                is_finite = np.isfinite(array).all()
                for point, channels in _split(array, model.outside):
                    if not is_finite:
                        _require_finite(point.name, number, channels)
                    yield BatchStats(
                        point, channels, _joined([rows[point, v] for v in point.values])
                    )
            elif name in model.rows:
                window = model.rows[name]
                if window in places:
                    held = array[: places[window].flat.size, 0]
                    drawn = window.product.as_rows(held, places[window])
                    rows[window.point, window.value][window.key] = drawn
            elif array.size:  # e.g. an empty key-value cache
                for point, value in model.whole[name]:
                    rows[point, value] = self._sampled(point, value, array, draw)
                    if point.is_inside:
                        channels = Channels.of(array, _channel_axis(point, value))
                        _require_finite(point.name, number, channels)
                        yield BatchStats(point, channels, rows[point, value])

    def _shapes(self, batch: Mapping[str, Any]) -> dict[Place, tuple[int, ...]]:
        """Shapes of the values that are not read in full."""
        bindings = input_sizes(self._graph, batch)
        reduced = [place for place in _places(self._points) if place not in self._whole]
        return {(point, value): value.tensor.concrete(bindings) for point, value in reduced}

    def _sampled(
        self, point: QuantizationPoint, value: Value, array: Array, draw: np.random.Generator | None
    ) -> Rows:
        if draw is None:
            return {}
        windows = _windows(point, value)
        return {k: p.rows(array, self._counts[point.name, k], draw) for k, p in windows.items()}


def _places(points: list[QuantizationPoint]) -> list[Place]:
    return [(point, value) for point in points for value in point.values]


def _windows(point: QuantizationPoint, value: Value) -> dict[Any, Product]:
    """One product for each window key of the products that read a value."""
    return {product.window_key: product for product in point.readers(value)}


def _channel_axis(point: QuantizationPoint, value: Value) -> int:
    return point.readers(value)[0].channel_axis


def _joined(parts: list[Rows]) -> Rows:
    """Rows of all values of a point, interleaved."""
    if len(parts) == 1:
        return parts[0]
    found: Rows = {}
    for key in dict.fromkeys(key for rows in parts for key in rows):
        drawn = [rows[key] for rows in parts if key in rows]
        order = np.argsort(np.concatenate([np.arange(len(rows)) for rows in drawn]), kind="stable")
        found[key] = np.concatenate(drawn)[order]
    return found


def _gathered(b: Builder, window: _Window, places: Value) -> Value:
    """The rows of x at the indices of this window, [places, drawn, channels]."""
    x, axis = window.value, window.product.channel_axis
    order = [*(i for i in range(x.rank) if i != axis), axis]
    transposed = b.transpose(x, perm=order)
    flat = b.reshape(transposed, shape=(count_of(transposed.shape[:-1]), transposed.shape[-1]))
    own = b.slice(places, starts=(window.first,), stops=(window.end,), steps=(1,), axes=(0,))
    value = b.gather(flat, own, axis=0)
    assert isinstance(value, Value)
    return value


def _ends(b: Builder, point: QuantizationPoint, value: Value) -> Iterator[Value]:
    """Minima and maxima of the channels; maxima only for values that are never negative.

    NaN propagates to the maxima.
    """
    axes = [i for i in range(value.rank) if i != _channel_axis(point, value)]
    if not is_never_negative(value):
        yield b.op("reduce_min", value, axes=axes, keepdims=False)
    yield b.op("reduce_max", value, axes=axes, keepdims=False)


def _split(
    ends: Array, points: list[QuantizationPoint]
) -> Iterator[tuple[QuantizationPoint, Channels]]:
    """Channel ranges of each point, from the concatenated output of `_ends`."""
    lows, highs, start = np.minimum(ends, 0), np.maximum(ends, 0), 0
    for point in points:
        count, found = point.channels, None
        for value in point.values:
            low = np.zeros(count, np.float32)
            if not is_never_negative(value):
                low = lows[start : start + count]
                start += count
            channels = Channels(low, highs[start : start + count])
            start += count
            found = channels if found is None else found.widened(channels)
        assert found is not None
        yield point, found


def _require_finite(name: str, number: int, channels: Channels) -> None:
    """Raise if a range is not finite; minima and maxima propagate NaN."""
    bad = ~(np.isfinite(channels.low) & np.isfinite(channels.high))
    if bad.any():
        raise CalibrationError(
            f"the value {name!r} holds NaN or infinity in {int(bad.sum())} of its channels",
            where=f"batch {number} of the data",
            hint="Check the samples, and whether the model overflows on them.",
        )
