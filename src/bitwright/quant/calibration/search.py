"""Range search: clip both sides at one magnitude, then move each end, in shrinking steps.

A `RangeProblem` is a distribution and a quantizer. It scores ranges row by row, so all channels are
searched at once. A search stays within the observed range and always scores it, so its result is at
least as good as minmax by its own measure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.quant_params import scale_and_zero_point
from bitwright.ir.quant_types import MIXED, QuantType, Scheme
from bitwright.quant.calibration.divergence import Cumulative, divergence
from bitwright.quant.calibration.scoring import Distribution, IntegerGrid, squared_error
from bitwright.quant.core.levels import Codebook, codebook
from bitwright.quant.core.scales import ScaleFormat

Objective = Callable[[Array, Array], Array]

_RATIO = 0.8
_COARSE = 20  # steps down to 1% of the range; repeated while the best is the last step
_LEAST = 4 * _COARSE
_FINE = ((0.75, 0.5, 0.25), (0.125, 0.0625))
_SIDES = ((4.0, 2.0, 1.0, 0.5), (0.5, 0.25), (0.125, 0.0625))
_CHUNK = 1 << 15  # places scored at a time, to stay in cache
_MOST_LEVELS = 256  # entropy needs a histogram finer than the quantization levels


@dataclass(frozen=True)
class RangeProblem:
    """A distribution, and the quantizer whose range is searched."""

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
    def is_symmetric(self) -> bool:
        """Whether one magnitude determines the range."""
        return self.scheme is not Scheme.asymmetric

    @cached_property
    def codebook(self) -> Codebook | None:
        return codebook(self.kind, self.scheme, self.base)

    def error(self, low: Array, high: Array) -> Array:
        """Squared error of each row for the range low..high."""
        return self.error_of(*self.quantizer(low, high))

    def quantizer(self, low: Array, high: Array) -> tuple[Array, Array]:
        scale, zero_point, _ = scale_and_zero_point(
            self.kind, self.scheme, low, high, self.widths, self.scales.rounded
        )
        return scale.astype(np.float64), zero_point

    def error_of(self, scale: Array, zero_point: Array) -> Array:
        """Squared error of each row for these parameters."""
        if self.codebook is not None:
            return squared_error(self.data, scale, self.codebook)
        return squared_error(self.data, scale, self.grid(zero_point))

    def cells(self, low: Array, high: Array) -> Array:
        """Boundaries of the quantization cells within low..high, [..., levels + 1]."""
        scale, zero_point = self.quantizer(low, high)
        if self.codebook is not None:
            inner = self.codebook.thresholds * scale[..., None]
        else:
            grid = self.grid(zero_point)
            steps = np.arange(2**self.kind.bits - 1) + 0.5
            inner = (grid.low[..., None] + steps) * scale[..., None]
        ends = [np.broadcast_to(side[..., None], (*low.shape, 1)) for side in (low, high)]
        inner = np.clip(inner, ends[0], ends[1])
        return np.concatenate([ends[0], inner, ends[1]], -1)

    def grid(self, zero_point: Array) -> IntegerGrid:
        """The integers of the type, relative to the zero point."""
        if self.kind == MIXED:
            half = 2.0 ** (np.asarray(self.widths) - 1)
            return IntegerGrid(-half, half - 1)
        element = self.data.places.dtype
        if self.is_symmetric:
            zero_point = np.zeros(1)
        low = (self.kind.min - zero_point).astype(element)
        return IntegerGrid(low, (self.kind.max - zero_point).astype(element))


def least_error(problem: RangeProblem) -> tuple[Array, Array]:
    """The range with the lowest expected squared error."""
    return _search(problem, problem.error)


def least_divergence(problem: RangeProblem) -> tuple[Array, Array]:
    """The range with the lowest KL divergence; the full range if levels are finer than bins."""
    low, high = problem.data.range
    number = 2 ** min(problem.kind.bits, 16)
    if not problem.data.is_histogram or number > _MOST_LEVELS:
        return low, high
    width = np.diff(problem.data.places).max(1)
    least = width * number / (2 if problem.is_symmetric and (low < 0).any() else 1)
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
    """The best range of each row so far; many ranges are tried at once, [tries, rows]."""

    def __init__(self, problem: RangeProblem, objective: Objective) -> None:
        self.objective = objective
        self.low, self.high = problem.data.range
        self.chunk = max(1, _CHUNK // max(problem.data.places.size, 1))
        self.least = objective(self.low[None], self.high[None])[0]

    def attempt(self, low: Array, high: Array) -> Array:
        """Score ranges; returns the index of the new best of each row, -1 if none is better."""
        low, high = np.broadcast_arrays(low, high)
        number = len(low)
        pieces = [slice(at, at + self.chunk) for at in range(0, number, self.chunk)]
        errors = np.concatenate([self.objective(low[own], high[own]) for own in pieces])
        at = errors.argmin(0)[None]
        least = np.take_along_axis(errors, at, 0)[0]
        better = least < self.least
        self.low = np.where(better, np.take_along_axis(low, at, 0)[0], self.low)
        self.high = np.where(better, np.take_along_axis(high, at, 0)[0], self.high)
        self.least = np.where(better, least, self.least)
        return np.where(better, at[0], -1)


def _search(problem: RangeProblem, objective: Objective) -> tuple[Array, Array]:
    low, high = problem.data.range
    best = _Best(problem, objective)
    _clip_both(best, low, high)
    if problem.is_symmetric:
        return best.low, best.high
    for steps in _SIDES:
        factors = _RATIO ** np.array([sign * size for size in steps for sign in (1, -1)])[:, None]
        if (high > 0).any():
            best.attempt(best.low[None], np.minimum(best.high * factors, high))
        if (low < 0).any():
            best.attempt(np.maximum(best.low * factors, low), best.high[None])
    return best.low, best.high


def _clip_both(best: _Best, low: Array, high: Array) -> None:
    """Clip both sides at one magnitude: coarse steps first, then fine steps around the best."""
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
