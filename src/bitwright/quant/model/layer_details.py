"""Histograms and chosen ranges of quantized layers, for reports.

Histograms come from the rows that calibration sampled and from the weights. Smoothing factors are
applied, so that a histogram and the range of its layer have the same unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.quant.model.weights.nearest import LEVELS

if TYPE_CHECKING:
    from bitwright.quant.calibration.stats import CalibrationStats
    from bitwright.quant.model.assign import Choice
    from bitwright.quant.model.products import Product
    from bitwright.quant.model.weights.weights import QuantizedWeights

BINS = 64
MOST_COUNTED = 1 << 16
"""Values that a histogram counts; of more, evenly spaced ones."""


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of equal width over [low, high]."""

    low: float
    high: float
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Array, bins: int = BINS) -> Histogram | None:
        """The histogram of an array, or of evenly spaced elements of a large one."""
        flat = values.reshape(-1)
        low, high = (float(flat.min()), float(flat.max())) if flat.size else (0.0, 0.0)
        if not flat.size or not np.isfinite((low, high)).all():
            return None
        # an odd stride visits all channels of an axis with an even size
        stride = -(-flat.size // MOST_COUNTED)
        some = flat[:: stride | 1].astype(np.float64)
        if low == high or not np.isfinite(high - low):
            return cls(low, high, (len(some),))
        counts, _ = np.histogram(some, bins, (low, high))
        return cls(low, high, tuple(map(int, counts)))


@dataclass(frozen=True)
class LayerDetail:
    """Value histograms of one layer, and the ranges that quantization gave it."""

    values: Histogram | None = None
    """Of the layer's input, after smoothing."""
    observed: tuple[float, float] | None = None
    """The smallest and largest input over all calibration batches, after smoothing."""
    range: tuple[float, float] | None = None
    """The smallest and largest representable input of a static range; values beyond it clip."""
    scale: float | None = None
    zero_point: int | None = None
    weights: Histogram | None = None
    weight_range: tuple[float, float] | None = None
    """The widest representable range of the weight's channels or blocks."""
    weight_type: str = ""
    weight_scales: int = 0
    """The number of scales of the weight."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def static_range(scale: float, zero_point: int, levels: int = LEVELS) -> tuple[float, float]:
    """The smallest and largest value that 0 .. levels represent."""
    return -zero_point * float(scale), (levels - zero_point) * float(scale)


def product_detail(
    product: Product,
    choice: Choice,
    stats: CalibrationStats | None,
    made: QuantizedWeights | None,
) -> LayerDetail:
    """The detail of one product; without statistics, that of its weights."""
    activation = choice.activation if choice.scheme not in ("float", "weight_only") else None
    factors = None if activation is None else activation.factors
    spread = None if factors is None else product.spread(factors)
    matrix = product.matrix if spread is None else product.matrix * spread[:, None, :]
    facts: dict[str, Any] = {"weights": Histogram.of(matrix)}
    if stats is not None:
        rows = stats.sample(product).scored
        low, high = stats.every.low, stats.every.high
        if spread is not None and factors is not None:
            rows, low, high = rows / spread, low / factors, high / factors
        facts["values"] = Histogram.of(rows)
        facts["observed"] = float(low.min()), float(high.max())
    if activation is not None and activation.range is not None:
        scale, zero_point = activation.range
        facts |= {"scale": float(scale), "zero_point": int(zero_point)}
        facts["range"] = activation.range.bounds
    if made is not None:
        facts |= weight_facts(made.qvalues, made.scales)
    return LayerDetail(**facts)


def weight_facts(qvalues: Array, scales: Array) -> Mapping[str, Any]:
    """Element type, number of scales and widest range of a quantized weight."""
    largest = float(scales.astype(np.float64).max(initial=0.0))
    wide = qvalues.astype(np.float32)  # narrow types have no reductions
    low, high = float(wide.min(initial=0)), float(wide.max(initial=0))
    return {
        "weight_range": (low * largest, high * largest),
        "weight_type": str(qvalues.dtype),
        "weight_scales": int(scales.size),
    }
