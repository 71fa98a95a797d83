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

from bitwright.quant.calibration.divergence import Cumulative, divergence
from bitwright.quant.calibration.scoring import Codebook, Distribution, Whole, squared_error
from bitwright.quant.core.levels import levels
from bitwright.quant.core.parameters import scale_and_zero_point
from bitwright.quant.core.scales import ScaleFormat
from bitwright.quant.core.types import MIXED, QuantType, Scheme

Array = np.ndarray[Any, Any]
Objective = Callable[[Array, Array], Array]

_RATIO = 0.8
_COARSE = 20  # steps to a hundredth of the range; more follow where the best is at the end
_LEAST = 4 * _COARSE
_FINE = ((0.75, 0.5, 0.25), (0.125, 0.0625))
_SIDES = ((4.0, 2.0, 1.0, 0.5), (0.5, 0.25), (0.125, 0.0625))
_TOGETHER = 1 << 15  # places scored at a time, to stay in a cache
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

    def cells(self, low: Array, high: Array) -> Array:
        """The ends of the codes' cells within low..high, [..., codes + 1]."""
        scale, zero_point = self.quantizer(low, high)
        if self.codebook is not None:
            inner = self.codebook.thresholds * scale[..., None]
        else:
            whole = self.whole(zero_point)
            steps = np.arange(2**self.kind.bits - 1) + 0.5
            inner = (whole.low[..., None] + steps) * scale[..., None]
        ends = [np.broadcast_to(side[..., None], (*low.shape, 1)) for side in (low, high)]
        inner = np.clip(inner, ends[0], ends[1])
        return np.concatenate([ends[0], inner, ends[1]], -1)

    def whole(self, zero_point: Array) -> Whole:
        """The codes' span, relative to the zero point."""
        if self.kind == MIXED:
            half = 2.0 ** (np.asarray(self.widths) - 1)
            return Whole(-half, half - 1)
        element = self.data.places.dtype
        if self.is_one_ended:
            zero_point = np.zeros(1)
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
    sums = Cumulative.of(problem.data)

    def objective(low: Array, high: Array) -> Array:
        wide = np.maximum(high, -low) >= least
        tries = wide.any(1)
        found = np.full(low.shape, np.inf)
        if tries.any():
            cells = problem.cells(low[tries], high[tries])
            found[tries] = divergence(sums, cells, width)
        return np.where(wide, found, np.inf)

    return _search(problem, objective)


class _Best:
    """The best range so far of each row; ranges are tried many at a time, [tries, rows]."""

    def __init__(self, problem: Problem, objective: Objective) -> None:
        self.objective = objective
        self.low, self.high = problem.data.range
        self.together = max(1, _TOGETHER // max(problem.data.places.size, 1))
        self.least = objective(self.low[None], self.high[None])[0]

    def attempt(self, low: Array, high: Array) -> Array:
        """Score ranges; which try of each row is the best now, -1 where none is better."""
        low, high = np.broadcast_arrays(low, high)
        number = len(low)
        pieces = [slice(at, at + self.together) for at in range(0, number, self.together)]
        errors = np.concatenate([self.objective(low[own], high[own]) for own in pieces])
        at = errors.argmin(0)[None]
        least = np.take_along_axis(errors, at, 0)[0]
        better = least < self.least
        self.low = np.where(better, np.take_along_axis(low, at, 0)[0], self.low)
        self.high = np.where(better, np.take_along_axis(high, at, 0)[0], self.high)
        self.least = np.where(better, least, self.least)
        return np.where(better, at[0], -1)


def _search(problem: Problem, objective: Objective) -> tuple[Array, Array]:
    low, high = problem.data.range
    best = _Best(problem, objective)
    _clip_both(best, low, high)
    if problem.is_one_ended:
        return best.low, best.high
    for steps in _SIDES:
        factors = _RATIO ** np.array([sign * size for size in steps for sign in (1, -1)])[:, None]
        if (high > 0).any():
            best.attempt(best.low[None], np.minimum(best.high * factors, high))
        if (low < 0).any():
            best.attempt(np.maximum(best.low * factors, low), best.high[None])
    return best.low, best.high


def _clip_both(best: _Best, low: Array, high: Array) -> None:
    """Clip at one magnitude on both sides: all scales of it first, then around the best."""
    top = np.maximum(high, -low)
    exponent = np.zeros(top.shape)

    def attempt(exponents: Array) -> Array:
        nonlocal exponent
        magnitude = top * _RATIO**exponents
        at = best.attempt(np.maximum(low, -magnitude), np.minimum(high, magnitude))
        exponents = np.broadcast_to(exponents, magnitude.shape)
        chosen = np.take_along_axis(exponents, np.maximum(at, 0)[None], 0)[0]
        exponent = np.where(at >= 0, chosen, exponent)
        return at

    steps_down = np.arange(1.0, _COARSE + 1)[:, None]
    for start in range(0, _LEAST, _COARSE):
        if (attempt(start + steps_down) < _COARSE - 1).all():
            break
    for steps in _FINE:
        offsets = np.array([sign * size for size in steps for sign in (1, -1)])[:, None]
        attempt(np.maximum(exponent + offsets, 0))
