"""Activation quantization of one point: candidates, each scored by its error at the products.

    static               one range for the tensor, fixed at calibration
    dynamic_per_token    one range per row, computed at run time
    dynamic_per_tensor   one range for the tensor, computed at run time

SmoothQuant moves magnitude from activations to weights, x / f and w * f, with
f = |x|^a / |w|^(1 - a) per channel. The search covers alpha (a) and the clip ratio of the range.
Errors are measured on rows that did not set the ranges, without the mean error: bias correction
removes that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.calibration.model_outputs import Channels
from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product
from bitwright.quant.model.weights import nearest
from bitwright.quant.model.weights.nearest import F8Range, Range
from bitwright.quant.model.weights.round_scales import nearest_power, rounded, rounded_down

AnyRange = Range | F8Range
MakeRange = Callable[[float, float], AnyRange]
ALPHAS = (0.0, 0.5, 1.0)
DYNAMIC_ALPHAS = (0.0, 0.5)
CLIP_RATIOS = (0.75, 1.25)
MIN_FACTOR = 0.03
"""Channels with a calibration range near zero keep this factor: later data may exceed the range."""
REQUIRED_GAIN = 0.9
"""A candidate replaces a simpler one if its error is below this fraction of the simpler one's."""


@dataclass(frozen=True)
class ActivationQuant:
    """How one value is quantized, and the measured error."""

    scheme: str
    factors: Array | None
    """SmoothQuant factors per channel, or None."""
    range: AnyRange | None
    error: float
    """Mean squared error of the products' results, relative to their mean square."""
    smoothquant_alpha: float = 0.0
    clip_ratio: float = 1.0
    format: str = ""
    """"f8" for f8e4m3fn, in place of u8."""

    @property
    def sqnr(self) -> float:
        return nearest.decibels(self.error)

    @property
    def inverse(self) -> Array:
        """The f64 factors that multiply channels before quantization."""
        assert self.factors is not None
        inverse = 1 / self.factors.astype(np.float64)
        return inverse if self.range is None else rounded(inverse)

    def with_power_of_two(self, channels: int) -> ActivationQuant:
        """The same quantized values with a power-of-two scale; the factors absorb the rest."""
        if self.range is None:
            return self
        scale = self.range.scale
        power = nearest_power(scale)
        factors = np.ones(channels) if self.factors is None else self.factors
        inverse = rounded(power / (factors * np.float64(scale)))
        range_ = self.range._replace(scale=power)
        return replace(self, factors=(1 / inverse).astype(np.float32), range=range_)

    def round_trip(self, rows: Array, factors: Array | None) -> Array:
        """Quantize and dequantize rows [rows, groups, terms] / `factors` [groups, terms]."""
        x = rows if factors is None else rows / factors
        if self.range is not None:
            return self.range.round_trip(x)
        return nearest.f8_rows_round_trip(x) if self.format else nearest.rows_round_trip(x)


def static_activation(
    stats: CalibrationStats, smooth: bool = True, symmetric: bool = False, format: str = ""
) -> ActivationQuant:
    """The best static quantization; `symmetric` centers the range at 0."""
    scores = Scores(stats)
    if format:  # a float range has headroom, and clipping gains nothing
        return replace(_whole_range(scores, smooth, F8Range.over), format=format)
    make = Range.around_zero if symmetric else Range.over
    best = _whole_range(scores, smooth, make)
    for clip_ratio in CLIP_RATIOS:
        best = _better(best, scores, best.smoothquant_alpha, clip_ratio, make)
    return best


def dynamic_tensor_activation(
    stats: CalibrationStats, smooth: bool = True, format: str = ""
) -> ActivationQuant:
    """The best dynamic per-tensor quantization.

    It is scored with the range over all batches, an upper bound of each tensor's range.
    """
    best = _whole_range(Scores(stats), smooth, F8Range.over if format else Range.over)
    return replace(best, scheme="dynamic_per_tensor", format=format)


def _whole_range(scores: Scores, smooth: bool, make: MakeRange) -> ActivationQuant:
    """The best static quantization without clipping."""
    best: ActivationQuant | None = None
    for alpha in ALPHAS if smooth else ALPHAS[:1]:
        best = _better(best, scores, alpha, 1.0, make)
    assert best is not None
    return best


def _better(
    best: ActivationQuant | None, scores: Scores, alpha: float, clip_ratio: float, make: MakeRange
) -> ActivationQuant:
    """`best`, or the static candidate with this alpha and clip ratio if it is better."""
    stats = scores.stats
    sample = _activation("static", stats, stats.some, alpha, clip_ratio, make)
    error = scores.error(sample)
    if best is not None and error >= REQUIRED_GAIN * best.error:
        return best
    final = _activation("static", stats, stats.every, alpha, clip_ratio, make)
    if final.factors is not None:
        final = final.with_power_of_two(len(final.factors))
    return replace(final, error=error)


def dynamic_activation(
    stats: CalibrationStats, smooth: bool = True, format: str = ""
) -> ActivationQuant:
    """The best dynamic per-token quantization."""
    best: ActivationQuant | None = None
    scores = Scores(stats)
    for alpha in DYNAMIC_ALPHAS if smooth else DYNAMIC_ALPHAS[:1]:
        made = _activation("dynamic_per_token", stats, stats.every, alpha, 1.0)
        activation = replace(made, format=format)
        error = scores.error(activation)
        if best is None or error < REQUIRED_GAIN * best.error:
            best = replace(activation, error=error)
    assert best is not None
    return best


def _activation(
    scheme: str,
    stats: CalibrationStats,
    seen: Channels,
    alpha: float,
    clip_ratio: float,
    make: MakeRange = Range.over,
) -> ActivationQuant:
    factors = smoothing_factors(seen.peaks, stats.point, alpha)
    range_: AnyRange | None = None
    if scheme == "static":
        low, high = seen.low, seen.high
        if factors is not None:
            low, high = low / factors, high / factors
        found = make(float(low.min()) * clip_ratio, float(high.max()) * clip_ratio)
        range_ = found._replace(scale=np.float32(rounded_down(found.scale)))
    return ActivationQuant(scheme, factors, range_, 0.0, alpha, clip_ratio)


def smoothing_factors(peaks: Array, point: QuantizationPoint, alpha: float) -> Array | None:
    """One factor per channel, the largest 1; None for alpha 0.

    `MIN_FACTOR` bounds the ratio of factors, beyond the ratio that `point.sizes` explains.
    """
    if alpha == 0 or not peaks.max(initial=0) > 0:
        return None
    sizes = 1 if point.sizes is None else point.sizes
    weights = np.max([product.channel_peaks for product in point.distinct], axis=0) * sizes
    inputs = peaks / sizes
    largest = inputs.max()
    inputs = np.where(inputs > 0, inputs, largest)  # an all-zero channel has no known range
    inputs = np.maximum(inputs, largest * MIN_FACTOR) * sizes
    floor = max(float(weights.max()) * MIN_FACTOR, float(np.finfo(np.float32).tiny))
    factors = inputs**alpha / (np.maximum(weights, floor) / sizes) ** (1 - alpha)
    return np.asarray((factors / factors.max()).astype(np.float32))


class Scores:
    """Scores candidates by their error at the products of one quantization point.

    Candidates with the same alpha share factors and quantized weights.
    """

    def __init__(self, stats: CalibrationStats) -> None:
        self.stats = stats
        self._exact: dict[str, tuple[Array, float]] = {}
        self._weights: dict[tuple[str, float, bool], Array] = {}

    def error(self, activation: ActivationQuant) -> float:
        """Mean squared error of the products' results over their mean square."""
        inputs: dict[int, Array] = {}
        errors = []
        for product in self.stats.point.distinct:
            sample = self.stats.sample(product)
            factors = None if activation.factors is None else product.spread(activation.factors)
            if id(sample) not in inputs:
                inputs[id(sample)] = activation.round_trip(sample.scored, factors)
            exact, power = self._exact_of(product)
            is_f8 = bool(activation.format) or isinstance(activation.range, F8Range)
            weights = self._weights_of(product, activation.smoothquant_alpha, factors, is_f8)
            error = times(inputs[id(sample)], weights)
            error -= exact
            error -= error.mean(axis=1, keepdims=True)
            errors.append(float(np.vdot(error, error)) / max(power, 1e-30))
        return float(np.mean(errors))

    def _exact_of(self, product: Product) -> tuple[Array, float]:
        """Float results and the sum of their squares."""
        if product.name not in self._exact:
            exact = times(self.stats.sample(product).scored, product.some_columns)
            self._exact[product.name] = exact, float(np.vdot(exact, exact))
        return self._exact[product.name]

    def _weights_of(
        self, product: Product, alpha: float, factors: Array | None, is_f8: bool
    ) -> Array:
        """The weights after quantize and dequantize."""
        key = product.name, alpha, is_f8
        if key not in self._weights:
            matrix = product.some_columns
            scaled = matrix if factors is None else matrix * factors[:, None, :]
            if is_f8:
                self._weights[key] = nearest.f8_weights_round_trip(scaled)
            else:
                scales = nearest.weight_scales(scaled)
                self._weights[key] = nearest.weight_qvalues(scaled, scales) * scales
        return self._weights[key]


def times(rows: Array, matrix: Array) -> Array:
    """Rows [rows, groups, terms] times [groups, columns, terms], as [groups, rows, columns]."""
    if matrix.shape[1] == 1:  # one column per group: matmul would be all overhead
        return np.asarray(np.einsum("rgk,gk->gr", rows, matrix[:, 0])[:, :, None])
    return np.asarray(rows.transpose(1, 0, 2) @ matrix.transpose(0, 2, 1))
