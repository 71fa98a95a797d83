"""What calibration saw at the quantized inputs, stored in the metadata of a quantized model.

For each quantization point with quantized activations

    low, high    the range of the calibration data, after smoothing
    clipped      the fraction of values outside of the quantized range (of low ... high for a
                 dynamic range), on rows that the range does not depend on if there are any
    outer        the fractions beyond 1/2, 1/4, 1/8 and 1/16 of the range

A monitor compares these figures with the data of a served model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph
from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.model.assign import Choice
from bitwright.quant.model.weights.choose import ActivationQuant, smoothing_factors
from bitwright.quant.model.weights.nearest import LEVELS, MIDDLE

if TYPE_CHECKING:
    from bitwright.quant.model.stages import QuantizationState

CALIBRATED = "onnx.meta.bitwright.calibrated"
"""The key in `Graph.meta`."""
FORMAT = 1
OCTAVES = 4
"""Fractions in `outer`: beyond 1/2, 1/4, ... of the range."""


@dataclass(frozen=True)
class CalibratedRange:
    """What calibration saw at one quantized input."""

    value: str
    """The name of its quantization point."""
    layers: dict[str, str]
    """Readable names of the products that read it, by path. A product that is an output has the
    output's name too: a file has no other."""
    scheme: str
    low: float
    high: float
    clipped: float | None = None
    """None if no rows of data were kept."""
    outer: list[float] = field(default_factory=list)
    batches: int = 0
    """Batches of calibration data."""


def with_calibrated_ranges(graph: Graph, state: QuantizationState) -> Graph:
    """The quantized graph with the figures in its metadata."""
    found = []
    run, ranges = state.calibration, state.ranges
    batches = run.batches if run is not None else ranges.batches if ranges is not None else 0
    outputs = {value.name: name for name, value in state.graph.outputs}
    for choice in state.choices:
        paths = {product.name: product.name for product in choice.point.products}
        paths |= {outputs[path]: path for path in paths if path in outputs}
        layers = {path: state.names.readable(own) for path, own in paths.items()}
        made = _calibrated(choice, state.stats.get(choice.point.name), layers)
        found += [] if made is None else [replace(made, batches=batches)]
    if not found:
        return graph
    text = json.dumps({"format": FORMAT, "ranges": [asdict(one) for one in found]})
    return graph.with_(meta={**graph.meta, CALIBRATED: text})


def read_calibrated_ranges(meta: Mapping[str, str]) -> list[CalibratedRange]:
    """The figures in a graph's metadata; none if they are missing or damaged."""
    try:
        record = json.loads(meta.get(CALIBRATED, "{}"))
        if record.get("format") != FORMAT:
            return []
        return [_checked(row) for row in record["ranges"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _checked(row: Mapping[str, Any]) -> CalibratedRange:
    layers = {str(path): str(name) for path, name in row["layers"].items()}
    clipped = None if row["clipped"] is None else float(row["clipped"])
    outer = [float(number) for number in row["outer"]]
    low, high = float(row["low"]), float(row["high"])
    if not np.isfinite([low, high, clipped or 0.0, *outer]).all() or len(outer) not in (0, OCTAVES):
        raise ValueError("a figure is not finite")
    texts = str(row["value"]), layers, str(row["scheme"])
    return CalibratedRange(*texts, low, high, clipped, outer, int(row["batches"]))


def _calibrated(
    choice: Choice, stats: CalibrationStats | None, layers: dict[str, str]
) -> CalibratedRange | None:
    activation = choice.activation
    if activation is None or choice.scheme in ("float", "weight_only"):
        return None
    texts = choice.point.name, layers, choice.scheme
    if stats is None:
        if activation.range is None:
            return None
        low, high = _quantized_range(activation)
        return CalibratedRange(*texts, low, high)
    low, high = _ends(stats.every.low, stats.every.high, activation)
    bounds = (low, high) if activation.range is None else _quantized_range(activation, 0.5)
    rows = list(_rows(stats, activation.factors))
    clipped = max(_beyond(rows, bounds), _unseen(stats, activation))
    outer = [_beyond(rows, bounds, 0.5**k) for k in range(1, OCTAVES + 1)]
    return CalibratedRange(*texts, low, high, clipped, outer)


def _ends(low: Array, high: Array, activation: ActivationQuant) -> tuple[float, float]:
    """The range of the smoothed channels."""
    factors = 1.0 if activation.factors is None else activation.inverse
    return float((low * factors).min()), float((high * factors).max())


def _quantized_range(activation: ActivationQuant, margin: float = 0.0) -> tuple[float, float]:
    """The real numbers that the quantized values stand for; `margin` in steps on each side."""
    assert activation.range is not None
    (low, high), scale = activation.range.bounds, float(activation.range.scale)
    if activation.format:
        return low, high
    return low - margin * scale, high + margin * scale


def _unseen(stats: CalibrationStats, activation: ActivationQuant) -> float:
    """The fraction of the odd batches outside of a range and factors of the even ones."""
    some = stats.some
    factors = smoothing_factors(some.peaks, stats.point, activation.smoothquant_alpha)
    inverse = 1.0 if factors is None else 1 / factors
    low, high = float((some.low * inverse).min()), float((some.high * inverse).max())
    if activation.range is not None:
        if activation.format:
            return _beyond(list(_rows(stats, factors)), activation.range.bounds)
        if activation.range.zero_point == MIDDLE:
            low, high = -max(-low, high), max(-low, high)
        low, high = (end * activation.clip_ratio for end in (low, high))
        step = (high - low) / LEVELS
        low, high = low - step / 2, high + step / 2
    return _beyond(list(_rows(stats, factors)), (low, high))


def _rows(stats: CalibrationStats, factors: Array | None) -> Iterable[Array]:
    """Sampled rows of the products, smoothed."""
    seen: set[int] = set()
    for product in stats.point.distinct:
        sample = stats.sample(product)
        if id(sample) not in seen:
            seen.add(id(sample))
            rows = sample.scored
            if factors is not None:
                rows = rows / product.spread(factors)
            yield rows


def _beyond(rows: list[Array], bounds: tuple[float, float], part: float = 1.0) -> float:
    """The fraction of values outside of a part of the range."""
    low, high = (bound * part for bound in bounds)
    count = sum(x.size for x in rows)
    outside = sum(int(np.count_nonzero((x < low) | (x > high))) for x in rows)
    return outside / count if count else 0.0
