"""Expected squared error of a quantizer on a distribution.

A quantizer maps u = x / scale to its nearest representable value v(u). The density is constant
within a histogram bin, so the error of a bin is a difference of the antiderivative of
(u - v(u))**2,

    F(u) = C(v) + (u - v)**3 / 3        C makes F continuous where v steps,

which is exact for any bin width and for clipped values. For integers C(v) = v / 12. Arrays without
a histogram are scored value by value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.core.levels import Codebook

_FEW = 4  # bins with fewer values give no usable density
_SPARSE = 0.01  # a histogram with more than this fraction of its values in such bins is sparse
_LEAST_WIDTH = 2.0**-10  # minimum bin width, relative to the grid


@dataclass(frozen=True)
class Distribution:
    """Rows of bins or of values: `places` is [rows, bins + 1] edges or [rows, n] values."""

    places: Array
    weights: Array
    is_histogram: bool
    number: Array  # values in each row, zeros included, at least 1
    low: Array  # the lowest and highest value of each row
    high: Array

    @staticmethod
    def of_statistics(statistics: Statistics) -> Distribution:
        """Bins clipped to minimum..maximum, without exact zeros, which have no error."""
        edges = statistics.edges()
        width = np.ldexp(1.0, statistics.exponent) * _LEAST_WIDTH
        weights = statistics.counts.astype(np.float64)
        used = np.flatnonzero(statistics.counts.any(0))
        last = int(used[-1]) + 1 if used.size else 1
        edges, weights = edges[:, : last + 1], weights[:, :last]
        rows = np.arange(statistics.channels)
        origin = -statistics.first
        held = (origin >= 0) & (origin < last)
        weights[rows[held], origin[held]] -= statistics.zeros[held]
        seen = statistics.count > 0
        low = np.where(seen, statistics.minimum, 0.0)
        high = np.where(seen, statistics.maximum, 0.0)
        end = (weights.shape[1] - 1 - (statistics.counts[:, :last] > 0)[:, ::-1].argmax(1))[:, None]
        edges = np.maximum(edges, low[:, None])
        right = np.maximum(high[:, None], np.take_along_axis(edges, end, 1) + width[:, None])
        number = np.maximum(statistics.count, 1)
        return Distribution(np.minimum(edges, right), weights, True, number, low, high)

    @staticmethod
    def of_rows(rows: Array) -> Distribution:
        """Values [rows, n]; NaN pads short rows."""
        valid = ~np.isnan(rows)
        number = np.maximum(valid.sum(1), 1)
        weights = np.ones((1, 1), rows.dtype) if valid.all() else valid.astype(rows.dtype)
        places = np.where(valid, rows, 0) if rows.shape[1] else np.zeros((len(rows), 1), rows.dtype)
        return Distribution(places, weights, False, number, places.min(1), places.max(1))

    @cached_property
    def density(self) -> Array:
        """Values per unit length in each bin."""
        width = np.diff(self.places)
        return np.asarray(self.weights / np.where(width > 0, width, np.inf))

    @cached_property
    def is_sparse(self) -> Array:
        """Whether the histogram of each row has too few values for a density."""
        thin = np.where(self.weights < _FEW, self.weights, 0).sum(1)
        return np.asarray(thin > _SPARSE * self.weights.sum(1))

    @cached_property
    def middles(self) -> Array:
        return (self.places[:, 1:] + self.places[:, :-1]) / 2 if self.is_histogram else self.places

    @cached_property
    def range(self) -> tuple[Array, Array]:
        """Lowest and highest value of each row, widened to contain 0."""
        return np.minimum(self.low, 0), np.maximum(self.high, 0)

    @cached_property
    def mean_magnitude(self) -> Array:
        weights = np.broadcast_to(self.weights, self.middles.shape)
        return np.asarray((np.abs(self.middles) * weights).sum(1, dtype=np.float64) / self.number)


@dataclass(frozen=True)
class IntegerGrid:
    """Integers low..high, relative to the zero point, rounded half to even."""

    low: Array
    high: Array

    def values(self, u: Array) -> tuple[Array, Array]:
        """The nearest integer of each u, and its offset C."""
        v = np.rint(u)
        low, high = self.low[..., None], self.high[..., None]
        np.clip(v, low.item() if low.size == 1 else low, high.item() if low.size == 1 else high, v)
        return v, v * (1 / 12)


def squared_error(data: Distribution, scale: Array, quantizer: IntegerGrid | Codebook) -> Array:
    """Sum of squared errors of each row, for scales [..., rows]."""
    factor = np.asarray(scale, data.places.dtype)[..., None]
    u = data.places / factor
    v, offsets = quantizer.values(u)
    np.subtract(u, v, out=u)
    if not data.is_histogram:
        u *= u
        if data.weights.size > 1:
            u *= data.weights
        return np.asarray(u.sum(-1) * factor[..., 0].astype(np.float64) ** 2)
    cube = u * u
    cube *= u
    cube *= 1 / 3
    cube += offsets
    gains = np.diff(cube)
    return np.asarray(np.einsum("...b,...b->...", gains, data.density) * factor[..., 0] ** 3)
