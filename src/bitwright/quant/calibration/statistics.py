"""Streaming statistics of arrays: one pass, constant memory, exact merges.

Per tensor, or per index of an axis: count, minimum, maximum, sum, sum of squares, exact zeros, and
a histogram of at most `bins` bins [k * 2**e, (k + 1) * 2**e). The exponent e is the smallest that
spans minimum..maximum. When that range widens, bins are merged in pairs,

    floor(x / 2**(e + 1)) = floor(floor(x / 2**e) / 2)

so the counts equal those of a pass that starts with the wider bins. Hence `merge` gives the counts
of one pass over both streams, in any order and grouping. NaN and infinities are counted, and
excluded from everything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from bitwright.errors import GraphError, ParseError, QuantizationError, UnsupportedError
from bitwright.ir.arrays import Array, as_array
from bitwright.ir.dtype import Family, dtype, f32
from bitwright.ir.quant_params import require_statistics, whole_axis
from bitwright.ir.types import normalize_axis
from bitwright.quant.calibration import fast_statistics

BINS = 2048
CHANNEL_BINS = 512
_CHUNK = 1 << 14  # values converted at a time, so that the f64 copy stays in cache
_CHANNEL_CHUNK = 1 << 16  # the same per axis, where each chunk adds up more bins
_SINGLES = 1 << 17  # values that native code reads twice, the second time from cache
_GROUP_BINS = 1 << 14
_DOT = 1 << 13  # short enough for BLAS to stay on one thread
_LEAST_EXPONENT = -1000
_PRECISION = 40  # no bin is narrower than this many bits below the largest magnitude
_MAGIC = b"BWSTATS1"
_FIELDS = {
    "count": np.int64,
    "zeros": np.int64,
    "minimum": np.float64,
    "maximum": np.float64,
    "total": np.float64,
    "total_squares": np.float64,
    "exponent": np.int64,
    "first": np.int64,
    "counts": np.int64,
}


class Statistics:
    """Statistics of a stream of values: the input of the calibration methods."""

    def __init__(self, axis: int | None = None, bins: int | None = None) -> None:
        self.axis = None if axis is None else whole_axis(axis)
        self.bins = bins or (BINS if axis is None else CHANNEL_BINS)
        if self.bins < 2:
            raise QuantizationError("a histogram needs more bins", expected=2, found=self.bins)
        self.clear()

    def clear(self) -> None:
        """Reset everything, including the number of channels."""
        self.nan = self.infinite = 0
        self._allocate(0 if self.axis is not None else 1)

    def _allocate(self, channels: int) -> None:
        self.count = np.zeros(channels, np.int64)
        self.zeros = np.zeros(channels, np.int64)
        self.minimum = np.full(channels, np.inf)
        self.maximum = np.full(channels, -np.inf)
        self.total = np.zeros(channels)
        self.total_squares = np.zeros(channels)
        self.exponent = np.full(channels, _LEAST_EXPONENT, np.int64)
        self.first = np.zeros(channels, np.int64)  # k of the first bin
        self.counts = np.zeros((channels, self.bins), np.int64)

    @property
    def channels(self) -> int:
        """The number of channels: 1 per tensor; 0 per axis before the first array."""
        return len(self.count)

    @property
    def is_empty(self) -> bool:
        return not self.count.any()

    @property
    def max_abs(self) -> Array:
        """The largest magnitude of each channel, 0 for channels without values."""
        widest = np.maximum(np.abs(self.minimum), np.abs(self.maximum))
        return np.where(self.count > 0, widest, 0.0)

    @property
    def mean(self) -> Array:
        return np.asarray(self.total / np.maximum(self.count, 1))

    @property
    def nbytes(self) -> int:
        """Bytes held, which depend on channels and bins only."""
        return sum(getattr(self, name).nbytes for name in _FIELDS)

    def edges(self) -> Array:
        """Bin edges, [channels, bins + 1]."""
        marks = self.first[:, None] + np.arange(self.bins + 1)
        return np.asarray(np.ldexp(marks.astype(np.float64), self.exponent[:, None]))

    def observed_range(self) -> tuple[Array, Array]:
        """Minimum and maximum, in the shape of the scales."""
        if self.is_empty:
            raise QuantizationError(
                "nothing was observed", hint="Add at least one array with a finite value"
            )
        seen = self.count > 0
        low, high = np.where(seen, self.minimum, 0.0), np.where(seen, self.maximum, 0.0)
        widest = float(np.maximum(-low, high).max())
        if widest > f32.max:
            raise QuantizationError(
                "the observed values exceed f32, the type that quantization computes in",
                expected=f"magnitudes up to {f32.max:.4g}",
                found=widest,
                hint="Clip or rescale the data",
            )
        return (low[0], high[0]) if self.axis is None else (low, high)

    # Adding data

    def add(self, array: Any) -> None:
        """Add every value of an array of any real type and shape."""
        x = real_array(array)
        if self.axis is not None:
            self._require_channels(x.shape[normalize_axis(self.axis, x.ndim)])
        elif x.dtype == np.float32 or dtype(x.dtype).bits <= 16:
            return self._add_singles(x.astype(np.float32, copy=False))
        self._add_blocks(x)

    def _add_blocks(self, x: Array) -> None:
        for start, block in self._blocks(x):
            values = block.astype(np.float64)
            low, high = values.min((0, 2)), values.max((0, 2))
            if np.isfinite(low).all() and np.isfinite(high).all():
                self._count(start, values, low, high)
            else:
                self._count_finite(start, values)

    def _add_singles(self, x: Array) -> None:
        """Add values that are exact in f32, with native code; the counts are the same."""
        flat = x.ravel(order="K")
        for start in range(0, flat.size, _SINGLES):
            part = flat[start : start + _SINGLES]
            found = fast_statistics.summary(part)
            if found is None:
                self._add_blocks(part)
                continue
            low, high, total, squares, zeros = found
            self.count[0] += part.size
            self.zeros[0] += zeros
            self.total[0] += total
            self.total_squares[0] += squares
            if low < self.minimum[0] or high > self.maximum[0]:
                self._widen(slice(0, 1), np.array([low]), np.array([high]))
            exponent, first = int(self.exponent[0]), int(self.first[0])
            fast_statistics.count(part, exponent, first, self.counts[0])

    def _require_channels(self, size: int) -> None:
        if self.channels == 0:
            self._allocate(size)
        elif size != self.channels:
            raise QuantizationError(
                f"the size of axis {self.axis} changed", expected=self.channels, found=size
            )

    def _blocks(self, x: Array) -> Iterator[tuple[int, Array]]:
        """First channel and values [outer, channels, inner], in chunks that fit a cache."""
        if not x.size:
            return
        if self.axis is None:
            flat = x.ravel(order="K")
            for start in range(0, flat.size, _CHUNK):
                yield 0, flat[None, None, start : start + _CHUNK]
            return
        at = normalize_axis(self.axis, x.ndim)
        size = x.shape[at]
        if at == 0:
            spread = x.reshape(1, size, -1)
        else:
            outer = int(np.prod(x.shape[:at]))
            spread = np.ascontiguousarray(x).reshape(outer, size, -1)
        group = max(1, min(size, _GROUP_BINS // self.bins))
        inner = min(spread.shape[2], max(1, _CHANNEL_CHUNK // group))
        rows = max(1, _CHANNEL_CHUNK // (group * inner))
        for c in range(0, size, group):
            for i in range(0, spread.shape[2], inner):
                for o in range(0, spread.shape[0], rows):
                    yield c, spread[o : o + rows, c : c + group, i : i + inner]

    def _count_finite(self, start: int, values: Array) -> None:
        for c in range(values.shape[1]):
            row = values[:, c]
            self.nan += int(np.isnan(row).sum())
            self.infinite += int(np.isinf(row).sum())
            kept = row[np.isfinite(row)]
            if kept.size:
                whole = kept.reshape(1, 1, -1)
                self._count(start + c, whole, whole.min((0, 2)), whole.max((0, 2)))

    def _count(self, start: int, values: Array, low: Array, high: Array) -> None:
        """Add finite values [outer, channels, inner]; overwrites them."""
        channels = values.shape[1]
        own = slice(start, start + channels)
        number = values.shape[0] * values.shape[2]
        self.count[own] += number
        if channels == 1:
            flat = values.reshape(-1)
            self.zeros[start] += np.count_nonzero(flat == 0)
            self.total[start] += flat.sum()
            parts = [flat[at : at + _DOT] for at in range(0, number, _DOT)]
            with np.errstate(over="ignore"):  # f64 data beyond 1e154 gives infinity
                self.total_squares[start] += sum(np.dot(part, part) for part in parts)
        else:
            self.zeros[own] += (values == 0).sum((0, 2))
            self.total[own] += values.sum((0, 2))
            with np.errstate(over="ignore"):
                self.total_squares[own] += np.square(values).sum((0, 2))
        if (low < self.minimum[own]).any() or (high > self.maximum[own]).any():
            self._widen(own, low, high)
        values *= np.ldexp(1.0, -self.exponent[own])[:, None]
        np.floor(values, out=values)
        values += (np.arange(channels) * self.bins - self.first[own])[:, None]
        found = np.bincount(values.astype(np.intp).reshape(-1), minlength=channels * self.bins)
        self.counts[own] += found.reshape(channels, self.bins)

    # The histogram grid

    def _widen(self, own: slice, low: Array, high: Array) -> None:
        """Merge bins until the histogram spans low..high."""
        low = np.minimum(self.minimum[own], low)
        high = np.maximum(self.maximum[own], high)
        seen = low <= high
        exponent, first = self.exponent[own].copy(), self.first[own].copy()
        exponent[seen], first[seen] = _grid(low[seen], high[seen], self.bins)
        moved = (exponent != self.exponent[own]) | (first != self.first[own])
        moved &= self.minimum[own] <= self.maximum[own]  # empty rows have no counts
        rows = own.start + np.flatnonzero(moved)
        if rows.size:
            self.counts[rows] = self._rebinned(rows, exponent[moved], first[moved])
        self.exponent[own], self.first[own] = exponent, first
        self.minimum[own], self.maximum[own] = low, high

    def _rebinned(self, rows: Array, exponent: Array, first: Array) -> Array:
        """Counts of these rows on a coarser or shifted grid."""
        shift = np.minimum(exponent - self.exponent[rows], 62)[:, None]
        marks = (self.first[rows][:, None] + np.arange(self.bins)) >> shift
        place = marks - first[:, None] + np.arange(rows.size)[:, None] * self.bins
        old = self.counts[rows]
        used = old > 0  # f64 represents counts below 2**53 exactly
        new = np.bincount(place[used], weights=old[used], minlength=rows.size * self.bins)
        return new.astype(np.int64).reshape(rows.size, self.bins)

    def merge(self, other: Statistics) -> Statistics:
        """Add the statistics of another stream; returns itself."""
        require_statistics(other)
        if (self.axis, self.bins) != (other.axis, other.bins):
            raise QuantizationError(
                "statistics with different axes or bins do not merge",
                expected=f"axis {self.axis}, {self.bins} bins",
                found=f"axis {other.axis}, {other.bins} bins",
            )
        self.nan += other.nan
        self.infinite += other.infinite
        if other.channels:
            self._require_channels(other.channels)
            everything = slice(0, self.channels)
            theirs = other.copy()
            theirs._widen(everything, self.minimum, self.maximum)
            self._widen(everything, other.minimum, other.maximum)
            for name in ("count", "zeros", "total", "total_squares", "counts"):
                setattr(self, name, getattr(self, name) + getattr(theirs, name))
        return self

    def copy(self) -> Statistics:
        twin = Statistics.__new__(Statistics)
        twin.axis, twin.bins = self.axis, self.bins
        twin._assign(self, copied=True)
        return twin

    def restore(self, saved: Statistics) -> None:
        """Reset to `saved`, an earlier copy of these statistics."""
        self._assign(saved, copied=False)

    def _assign(self, other: Statistics, copied: bool) -> None:
        self.nan, self.infinite = other.nan, other.infinite
        for name in _FIELDS:
            array = getattr(other, name)
            setattr(self, name, array.copy() if copied else array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statistics) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]

    # File format: magic, length of the header, JSON header, then the arrays, little endian

    def to_bytes(self) -> bytes:
        names = ("axis", "bins", "channels", "nan", "infinite")
        header = {name: getattr(self, name) for name in names}
        text = json.dumps(header).encode()
        parts = [_MAGIC, len(text).to_bytes(8, "little"), text]
        for name, element in _FIELDS.items():
            parts.append(getattr(self, name).astype(np.dtype(element).newbyteorder("<")).tobytes())
        return b"".join(parts)

    @staticmethod
    def from_bytes(data: bytes) -> Statistics:
        try:
            return _read(memoryview(data))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ParseError(f"these bytes are not statistics: {error}") from None


def real_array(x: Any) -> Array:
    """Convert anything array-like to an array; raises unless its numbers are real."""
    try:
        array = as_array(x)
        if dtype(array.dtype).family not in (Family.STRING, Family.COMPLEX):
            return array
        found: Any = array.dtype
    except (ValueError, TypeError, GraphError, UnsupportedError) as error:
        found = f"{type(x).__name__}: {str(error).splitlines()[0]}"
    raise QuantizationError("this is not an array of real numbers", found=found)


def _read(data: memoryview) -> Statistics:
    if data[:8] != _MAGIC:
        raise ParseError("these bytes are not statistics", expected=_MAGIC.decode())
    start = 16 + int.from_bytes(data[8:16], "little")
    header = json.loads(bytes(data[16:start]))
    bins, channels = int(header["bins"]), int(header["channels"])
    axis = None if header["axis"] is None else int(header["axis"])
    size = sum(channels * (bins if name == "counts" else 1) * 8 for name in _FIELDS)
    if bins < 2 or channels < 0 or len(data) != start + size:
        raise ParseError("these bytes are not statistics: their length does not fit")
    found = Statistics(axis, bins)
    found.nan, found.infinite = int(header["nan"]), int(header["infinite"])
    for name, element in _FIELDS.items():
        shape = (channels, bins) if name == "counts" else (channels,)
        wire = np.dtype(element).newbyteorder("<")
        array = np.frombuffer(data, wire, int(np.prod(shape)), start).reshape(shape)
        setattr(found, name, array.astype(element))
        start += array.nbytes
    return found


def _grid(low: Array, high: Array, bins: int) -> tuple[Array, Array]:
    """The smallest exponent with which `bins` bins span low..high, and the first bin.

    The exponent never decreases when the range widens; `_rebinned` relies on that.
    """
    magnitude = np.maximum(np.abs(low), np.abs(high))
    least = np.where(magnitude > 0, np.frexp(magnitude)[1] - _PRECISION, _LEAST_EXPONENT)
    half = high / 2 - low / 2
    # a lower bound, which the loop raises
    span = np.where(half > 0, np.frexp(half / bins)[1], _LEAST_EXPONENT)
    exponent = np.maximum(np.maximum(span, least), _LEAST_EXPONENT).astype(np.int64)
    while True:
        first = np.floor(np.ldexp(low, -exponent))
        wide = np.floor(np.ldexp(high, -exponent)) - first >= bins
        if not wide.any():
            return exponent, first.astype(np.int64)
        exponent += wide
