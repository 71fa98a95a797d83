"""Search of a range: clip at one magnitude, then move each end, in ever smaller geometric steps.

A `Problem` is a distribution and the quantizer that will run on it; it scores ranges row by row, so
all channels are searched at once. A search never leaves the observed range and always scores it,
so its result is at least as good as minmax by its own measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.quant.levels import levels
from bitwright.quant.parameters import scale_and_zero_point
from bitwright.quant.scales import ScaleFormat
from bitwright.quant.scoring import Codebook, Distribution, Whole, squared_error
from bitwright.quant.types import MIXED, QuantType, Scheme

Array = np.ndarray[Any, Any]
Objective = Callable[[Array, Array], Array]

_RATIO = 0.88
_COARSE = 36  # steps to a hundredth of the range; more follow where the best is at the end
_LEAST = 4 * _COARSE
_FINE = ((0.75, 0.5, 0.25), (0.125, 0.0625))
_SIDES = ((6.0, 3.0, 1.5, 0.75), (1.0, 0.5, 0.25), (0.125, 0.0625))
_MOST_LEVELS = 256  # for entropy, whose histogram must be finer than the codes


@dataclass(frozen=True)
class Problem:
    """What is quantized, and how."""

    data: Distribution
    kind: QuantType
    scheme: Scheme
    base: float = 2.0
    widths: tuple[int, ...] = ()
    scales: ScaleFormat = field(default_factory=ScaleFormat)

    @property
    def rows(self) -> int:
        return len(self.data.places)

    @property
    def is_one_ended(self) -> bool:
        """Whether one magnitude says all about the range."""
        return self.scheme is not Scheme.asymmetric

    @cached_property
    def codebook(self) -> Codebook | None:
        return levels(self.kind, self.scheme, self.base)

    def error(self, low: Array, high: Array) -> Array:
        """The squared error of each row if the codes span low..high."""
        return self.error_of(*self.quantizer(low, high))

    def quantizer(self, low: Array, high: Array) -> tuple[Array, Array]:
        """Scale and zero point, in f64."""
        scale, zero_point, _ = scale_and_zero_point(
            self.kind, self.scheme, low, high, self.widths, self.scales
        )
        return scale.astype(np.float64), zero_point

    def error_of(self, scale: Array, zero_point: Array) -> Array:
        if self.codebook is not None:
            return squared_error(self.data, scale, self.codebook)
        return squared_error(self.data, scale, self.whole(zero_point))

    def codes(self, u: Array, zero_point: Array) -> Array:
        """The numbers of the codes, from 0, of x / scale."""
        if self.codebook is not None:
            return np.searchsorted(self.codebook.thresholds, u)
        whole = self.whole(zero_point)
        return np.asarray((whole.values(u)[0] - whole.low[:, None]).astype(np.intp))

    def whole(self, zero_point: Array) -> Whole:
        """The codes' span, relative to the zero point."""
        if self.kind == MIXED:
            half = 2.0 ** (np.asarray(self.widths) - 1)
            return Whole(-half, half - 1)
        element = self.data.places.dtype
        low = (self.kind.min - zero_point).astype(element)
        return Whole(low, (self.kind.max - zero_point).astype(element))


def least_error(problem: Problem) -> tuple[Array, Array]:
    """The range with the least expected squared error."""
    return _search(problem, problem.error)


def least_divergence(problem: Problem) -> tuple[Array, Array]:
    """The range with the least divergence; the whole one where codes are finer than bins."""
    low, high = problem.data.range
    number = 2 ** min(problem.kind.bits, 16)
    if not problem.data.is_histogram or number > _MOST_LEVELS:
        return low, high
    width = np.diff(problem.data.places).max(1)
    least = width * number / (2 if problem.is_one_ended and (low < 0).any() else 1)

    def objective(low: Array, high: Array) -> Array:
        found = _divergence(problem, low, high)
        return np.where(np.maximum(high, -low) < least, np.inf, found)

    return _search(problem, objective)


def _divergence(problem: Problem, low: Array, high: Array) -> Array:
    """KL(P || Q): P is the histogram with what lies outside added to its ends; Q spreads what lies
    inside, code by code, evenly over the bins of that code that hold anything.
    """
    data = problem.data
    scale, zero_point = problem.quantizer(low, high)
    middles, weights = data.middles, data.weights
    codes = problem.codes(middles / scale[:, None], zero_point)
    span = 2**problem.kind.bits
    codes += np.arange(problem.rows)[:, None] * span
    inside = (middles >= low[:, None]) & (middles <= high[:, None])
    kept = np.where(inside, weights, 0.0)
    size = problem.rows * span
    mass = np.bincount(codes.reshape(-1), kept.reshape(-1), size)
    used = np.bincount(codes.reshape(-1), (kept > 0).reshape(-1).astype(np.float64), size)
    q = np.where(kept > 0, (mass / np.maximum(used, 1))[codes], 0.0)
    p = kept.copy()
    rows = np.arange(problem.rows)
    first = inside.argmax(1)
    last = inside.shape[1] - 1 - inside[:, ::-1].argmax(1)
    p[rows, first] += np.where(middles < low[:, None], weights, 0.0).sum(1)
    p[rows, last] += np.where(middles > high[:, None], weights, 0.0).sum(1)
    p /= np.maximum(p.sum(1, keepdims=True), 1)
    q /= np.maximum(q.sum(1, keepdims=True), 1)
    floor = 1e-12  # an end that only clipped values fill has no mass of its own
    log = np.log(np.where(p > 0, p, 1) / np.where(p > 0, np.maximum(q, floor), 1))
    return np.asarray((p * log).sum(1))


def _search(problem: Problem, objective: Objective) -> tuple[Array, Array]:
    low, high = problem.data.range
    top = np.maximum(high, -low)
    magnitude, least = _clip_both(low, high, top, objective)
    found_low, found_high = np.maximum(low, -magnitude), np.minimum(high, magnitude)
    if problem.is_one_ended:
        return found_low, found_high
    for steps in _SIDES:
        for step in (sign * size for size in steps for sign in (1, -1)):
            tried = np.minimum(found_high * _RATIO**step, high)
            errors = objective(found_low, tried)
            found_high = np.where(errors < least, tried, found_high)
            least = np.minimum(errors, least)
            tried = np.maximum(found_low * _RATIO**step, low)
            errors = objective(tried, found_high)
            found_low = np.where(errors < least, tried, found_low)
            least = np.minimum(errors, least)
    return found_low, found_high


def _clip_both(low: Array, high: Array, top: Array, objective: Objective) -> tuple[Array, Array]:
    """The best single magnitude to clip at, and its score."""

    def score(exponent: Array) -> Array:
        magnitude = top * _RATIO**exponent
        return objective(np.maximum(low, -magnitude), np.minimum(high, magnitude))

    best = np.zeros(top.shape)
    least = score(best)
    start = 0
    while start == 0 or (start < _LEAST and (best >= start).any()):
        for step in range(start + 1, start + _COARSE + 1):
            errors = score(np.full(top.shape, float(step)))
            best = np.where(errors < least, step, best)
            least = np.minimum(errors, least)
        start += _COARSE
    for steps in _FINE:
        centre = best
        for offset in (sign * size for size in steps for sign in (1, -1)):
            exponent = np.maximum(centre + offset, 0)
            errors = score(exponent)
            best = np.where(errors < least, exponent, best)
            least = np.minimum(errors, least)
    return top * _RATIO**best, least
