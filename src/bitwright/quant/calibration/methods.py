"""Calibration methods: statistics -> range -> QuantParams.

    minmax          the full range
    percentile(p)   contains p percent of the values; one-sided if all values have one sign
    entropy         lowest KL divergence of the clipped histogram from its quantized form
    mse             lowest expected squared error of the quantizer
    adaptive        the method with the lowest error at the consumer
    custom          a function from statistics to (low, high)

All methods read the same statistics, and every range contains 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir import quant_params, quant_types
from bitwright.ir.arrays import Array
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import QuantType, Scheme
from bitwright.quant.calibration.scoring import Distribution
from bitwright.quant.calibration.search import RangeProblem, least_divergence, least_error
from bitwright.quant.calibration.statistics import Statistics

Range = tuple[Any, Any]
Custom = Callable[[Statistics], Range]
ErrorFunction = Callable[[QuantParams], float]

NAMES = ("minmax", "percentile", "entropy", "mse", "adaptive")


@dataclass(frozen=True)
class Percentile:
    """The range that contains this percentage of the values."""

    percent: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise QuantizationError(
                "the percentile is out of range", expected="above 0, up to 100", found=self.percent
            )

    def __str__(self) -> str:
        return f"percentile({self.percent:g})"


Method = str | Percentile | Custom
_TRIED: tuple[Method, ...] = ("mse", "minmax", Percentile(99.99), Percentile(99.9), "entropy")
_TRIED_ON_VALUES: tuple[Method, ...] = ("mse", "minmax")  # percentiles need many values


def method_of(text: Method) -> Method:
    """The method of this name; "percentile(99.9)" includes the percentage."""
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
) -> QuantParams:
    """Choose parameters for the observed values.

    `adaptive` picks the method whose parameters have the lowest `error`, a function that measures
    parameters at the consumer. The default is the expected squared error of the values.
    """
    quant_params.require_statistics(statistics)
    kind = quant_types.get(dtype)
    by = quant_types.scheme(scheme, kind)
    quant_types.check(kind, by, quant_types.granularity(statistics.axis))
    low, high = statistics.observed_range()
    quant_params.require_negative_values(kind, by, low)
    quant_params.require_widths(kind, widths, statistics.channels)
    problem = RangeProblem(Distribution.of_statistics(statistics), kind, by, base, tuple(widths))

    def finish(bounds: Range, name: str) -> QuantParams:
        bottom, top = (np.reshape(side, np.shape(low)) for side in bounds)
        found = QuantParams.from_range(
            kind, bottom, top, by, statistics.axis, base=base, widths=widths
        )
        return replace(found, minimum=low, maximum=high, method=name)

    return select(problem, lambda: statistics, method, finish, error)


def select(
    problem: RangeProblem,
    statistics: Callable[[], Statistics],
    method: Method,
    finish: Callable[[Range, str], QuantParams],
    error: ErrorFunction | None = None,
) -> QuantParams:
    """Apply a method; `finish` turns its range and name into parameters."""
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


def expected_error(statistics: Statistics, parameters: QuantParams) -> Array:
    """Expected mean squared error of each scale on the observed values."""
    data = Distribution.of_statistics(statistics)
    problem = RangeProblem(
        data, parameters.dtype, parameters.scheme, parameters.base, parameters.widths
    )
    scale = np.reshape(parameters.effective_scale, -1).astype(np.float64)
    zero_point = np.reshape(parameters.zero_point, -1).astype(np.float64)
    return np.asarray(problem.error_of(scale, zero_point) / data.number)


def _range(method: Method, statistics: Callable[[], Statistics], problem: RangeProblem) -> Range:
    """Low and high of each row, with low <= 0 <= high."""
    if problem.scheme is Scheme.binary:
        size = problem.data.mean_magnitude  # {-s, +s} has the least squared error at s = mean |x|
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


def _entropy(problem: RangeProblem, statistics: Callable[[], Statistics]) -> tuple[Range, Array]:
    """The range of lowest divergence, and the rows that use the lowest squared error instead.

    A divergence compares densities. A sparse histogram has none, so noise would decide.
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
    return f"entropy: too few values for a histogram{rows}; used the lowest squared error"


def _percentile(statistics: Statistics, share: float) -> tuple[Array, Array]:
    """Quantiles on both sides for rows with both signs, else on one side."""
    low, high = (np.atleast_1d(side) for side in statistics.observed_range())
    both = (low < 0) & (high > 0)
    outside = np.where(both, (1 - share) / 2, 1 - share)
    top = _quantile(statistics, 1 - outside, low, high)
    bottom = _quantile(statistics, outside, low, high)
    return np.where(low < 0, np.minimum(bottom, 0), 0.0), np.where(high > 0, np.maximum(top, 0), 0)


def _quantile(statistics: Statistics, share: Array, low: Array, high: Array) -> Array:
    """Quantiles, linear within a bin; bin edges are clipped to the observed range."""
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
            f"the method did not return a range: {fault}",
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
