"""Calibration methods: from statistics to a range, and from the range to parameters.

    minmax          the whole range
    percentile(p)   what holds p percent of the values; one side where all have one sign
    entropy         least divergence of the clipped histogram from its quantized form
    mse             least expected squared error of the quantizer that will run
    adaptive        whichever of these has the lowest error at the consumer
    custom          a function from statistics to (low, high)

All read the same statistics, and every range holds 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.quant.calibration.scoring import Distribution
from bitwright.quant.calibration.search import Problem, least_divergence, least_error
from bitwright.quant.calibration.statistics import Statistics, require_statistics
from bitwright.quant.core import types
from bitwright.quant.core.parameters import (
    QuantizationParameters,
    observed_range,
    require_qvalues_for,
    require_widths,
)
from bitwright.quant.core.types import Granularity, QuantType, Scheme

Array = np.ndarray[Any, Any]
Range = tuple[Any, Any]
Custom = Callable[[Statistics], Range]
ErrorFunction = Callable[[QuantizationParameters], float]

NAMES = ("minmax", "percentile", "entropy", "mse", "adaptive")


@dataclass(frozen=True)
class Percentile:
    """The range that holds this percentage of the values."""

    percent: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise QuantizationError(
                "the percentile does not fit", expected="above 0, up to 100", found=self.percent
            )

    def __str__(self) -> str:
        return f"percentile({self.percent:g})"


Method = str | Percentile | Custom
_TRIED: tuple[Method, ...] = ("mse", "minmax", Percentile(99.99), Percentile(99.9), "entropy")
_TRIED_ON_VALUES: tuple[Method, ...] = ("mse", "minmax")  # few values have no other percentile


def method_of(text: Method) -> Method:
    """A method by name; "percentile(99.9)" gives the percentage."""
    if not isinstance(text, str):
        return text
    found = re.fullmatch(r"percentile(?:\((\d+(?:\.\d+)?)\))?", text)
    if found:
        return Percentile(float(found[1])) if found[1] else Percentile()
    if text not in NAMES:
        raise QuantizationError(
            f"no calibration method is named {text!r}",
            expected=", ".join(NAMES),
            hint="Or pass a function from statistics to (low, high)",
        )
    return text


def choose(
    statistics: Statistics,
    dtype: str | QuantType,
    scheme: str | Scheme | None = None,
    method: Method = "minmax",
    *,
    base: float = 2.0,
    widths: Sequence[int] = (),
    error: ErrorFunction | None = None,
) -> QuantizationParameters:
    """Parameters for values like those observed.

    `adaptive` takes the method whose parameters have the lowest `error`, a function of parameters
    that measures at the consumer; without it, the expected squared error of the values themselves.
    """
    require_statistics(statistics)
    kind = types.get(dtype)
    by = types.scheme(scheme, kind)
    types.check(
        kind, by, Granularity.per_tensor if statistics.axis is None else Granularity.per_axis
    )
    low, high = observed_range(statistics)
    require_qvalues_for(kind, by, low)
    require_widths(kind, widths, statistics.channels)
    problem = Problem(Distribution.of_statistics(statistics), kind, by, base, tuple(widths))

    def finish(bounds: Range, name: str) -> QuantizationParameters:
        bottom, top = (np.reshape(side, np.shape(low)) for side in bounds)
        found = QuantizationParameters.from_range(
            kind, bottom, top, by, statistics.axis, base=base, widths=widths
        )
        return replace(found, minimum=low, maximum=high, method=name)

    return select(problem, lambda: statistics, method, finish, error)


def select(
    problem: Problem,
    statistics: Callable[[], Statistics],
    method: Method,
    finish: Callable[[Range, str], QuantizationParameters],
    error: ErrorFunction | None = None,
) -> QuantizationParameters:
    """The parameters that `finish` makes of the method's range and name."""
    method = method_of(method)
    if method == "entropy":
        bounds, sparse = _entropy(problem, statistics)
        found = finish(bounds, name_of(method))
        return found.with_notes(_sparse_note(sparse)) if sparse.any() else found
    if method != "adaptive":
        return finish(_range(method, statistics, problem), name_of(method))
    tried = []
    for one in _TRIED if problem.data.is_histogram else _TRIED_ON_VALUES:
        bounds = _range(one, statistics, problem)
        found = finish(bounds, f"adaptive({name_of(one)})")
        tried.append((error(found) if error else float(problem.error(*bounds).sum()), found))
    measure, best = min(tried, key=lambda pair: pair[0])
    where = "measured" if error else "expected"
    return best.with_notes(
        f"{best.method}: squared error {measure:.4g} {where}, "
        f"{max(pair[0] for pair in tried):.4g} for the worst of {len(tried)} methods"
    )


def name_of(method: Method) -> str:
    if callable(method):
        return f"custom({getattr(method, '__name__', type(method).__name__)})"
    return str(method)


def expected_error(statistics: Statistics, parameters: QuantizationParameters) -> Array:
    """The expected mean squared error of each scale on values like those observed."""
    data = Distribution.of_statistics(statistics)
    problem = Problem(data, parameters.dtype, parameters.scheme, parameters.base, parameters.widths)
    scale = np.reshape(parameters.effective_scale, -1).astype(np.float64)
    zero_point = np.reshape(parameters.zero_point, -1).astype(np.float64)
    return np.asarray(problem.error_of(scale, zero_point) / data.number)


def _range(method: Method, statistics: Callable[[], Statistics], problem: Problem) -> Range:
    """Low and high of each row, 0 between them."""
    if problem.scheme is Scheme.binary:
        size = problem.data.mean_magnitude  # of all {-s, +s} the one with the least squared error
        return -size, size
    if method == "minmax":
        return problem.data.range
    if isinstance(method, Percentile):
        return _percentile(statistics(), method.percent / 100)
    if method == "mse":
        return least_error(problem)
    if method == "entropy":
        return _entropy(problem, statistics)[0]
    assert callable(method)
    return _custom(method, statistics())


def _entropy(problem: Problem, statistics: Callable[[], Statistics]) -> tuple[Range, Array]:
    """The range of least divergence, and for which rows it is that of least squared error.

    A divergence compares densities. A histogram most of whose bins are empty tells none: within the
    few that hold a value any range fits, and noise would decide.
    """
    bins = problem
    if not problem.data.is_histogram:
        bins = replace(problem, data=Distribution.of_statistics(statistics()))
    sparse = bins.data.is_sparse
    if sparse.all():
        return least_error(problem), sparse
    low, high = least_divergence(bins)
    if sparse.any():
        other_low, other_high = least_error(problem)
        low, high = np.where(sparse, other_low, low), np.where(sparse, other_high, high)
    return (low, high), sparse


def _sparse_note(sparse: Array) -> str:
    rows = "" if sparse.size == 1 else f" for {int(sparse.sum())} of {sparse.size} scales"
    return f"entropy: too few values for a histogram{rows}; the least squared error decided"


def _percentile(statistics: Statistics, share: float) -> tuple[Array, Array]:
    """Quantiles: of each side where a row has both signs, else of the one it has."""
    low, high = (np.atleast_1d(side) for side in observed_range(statistics))
    both = (low < 0) & (high > 0)
    outside = np.where(both, (1 - share) / 2, 1 - share)
    top = _quantile(statistics, 1 - outside, low, high)
    bottom = _quantile(statistics, outside, low, high)
    return np.where(low < 0, np.minimum(bottom, 0), 0.0), np.where(high > 0, np.maximum(top, 0), 0)


def _quantile(statistics: Statistics, share: Array, low: Array, high: Array) -> Array:
    """Linear within a bin, whose edges are cut to the observed range."""
    sums = np.cumsum(statistics.counts, axis=1)
    target = share * statistics.count
    at = np.argmax(sums >= target[:, None], axis=1)[:, None]
    before = np.where(at > 0, np.take_along_axis(sums, np.maximum(at - 1, 0), 1), 0)[:, 0]
    inside = np.maximum(np.take_along_axis(statistics.counts, at, 1)[:, 0], 1)
    edges = np.clip(statistics.edges(), low[:, None], high[:, None])
    left = np.take_along_axis(edges, at, 1)[:, 0]
    right = np.take_along_axis(edges, at + 1, 1)[:, 0]
    return np.asarray(left + (right - left) * np.clip((target - before) / inside, 0, 1))


def _custom(method: Custom, statistics: Statistics) -> tuple[Array, Array]:
    where = name_of(method)
    try:
        low, high = method(statistics)
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        rows = (statistics.channels,)
        low, high = np.broadcast_to(low, rows), np.broadcast_to(high, rows)
    except (TypeError, ValueError) as fault:
        raise QuantizationError(
            f"the method gives no range: {fault}",
            where=where,
            expected=f"(low, high), numbers or arrays[{statistics.channels}]",
        ) from None
    if (low > high).any():
        row = int(np.argmax(low > high))
        raise QuantizationError(
            "the range is reversed",
            where=where,
            expected="(low, high) with low <= high",
            found=f"({low[row]:g}, {high[row]:g})",
        )
    return np.minimum(low, 0), np.maximum(high, 0)
