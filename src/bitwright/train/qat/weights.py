"""Weights of a quantized model as trainable parameters: start values, and scales by mode.

learned          start * max(factor, 2^-10); the factor is a parameter that starts at 1, so one
                 learning rate fits all scales, and none becomes negative
fixed            a constant
per_batch        from the weights of the step: max |w| / Qmax, or a multiple of mean |w| for
                 2 bits and below
moving_average   of the same, in the first steps; then frozen
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Node, Value
from bitwright.ir.quant_types import Granularity, PerAxis, PerGroup, PerTensor
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.quant.quantize import integer_qvalues, spread
from bitwright.train.qat.config import WEIGHT_RANGES, Bits, QatConfig
from bitwright.train.qat.model import FACTOR
from bitwright.train.qat.observers import Observers

SMALLEST_FACTOR = 2.0**-10
MEAN_FACTORS = {-1: 1.53, -2: 1.25}
"""Scale of least squared error over mean |w| for normally distributed weights, by lowest value."""
CANDIDATES = 64
"""Clip ratios that are tried for the scale of least squared error."""


@dataclass(frozen=True)
class WeightStart:
    """A weight before training: its values, range and scales."""

    name: str
    values: Array
    """f32"""
    scale: Array
    low: int
    high: int
    axis: int | None
    block: int = 0
    is_binary: bool = False

    @property
    def granularity(self) -> dict[str, int | None]:
        return {"axis": self.axis, "block": self.block}


def keep(name: str, qvalues: Array, scale: Array, axis: int | None, block: int) -> WeightStart:
    """A weight at the width that it has; it starts at exactly these quantized values."""
    whole = qvalues.astype(np.int8)
    factor = spread(scale, whole.shape, axis, block)
    assert factor is not None
    values = (whole.astype(np.float32) * factor).astype(np.float32)
    lowest, highest = int(whole.min(initial=0)), int(whole.max(initial=0))
    fits = (
        r for r in ((-1, 1), (-2, 1), (-8, 7), (-127, 127)) if r[0] <= lowest <= highest <= r[1]
    )
    low, high = next(fits, (-128, 127))
    is_binary = high == 1 and bool((np.abs(whole) == 1).all())
    return WeightStart(name, values, scale, low, high, axis, block, is_binary)


def requantized(given: WeightStart, bits: Bits, granularity: Granularity | None) -> WeightStart:
    """A weight at another width or granularity, with scales of least squared error."""
    low, high = WEIGHT_RANGES[bits]
    axis, block, is_binary = given.axis, given.block, bits == "binary"
    if isinstance(granularity, PerTensor):
        axis, block = None, 0
    elif isinstance(granularity, PerAxis):
        block = 0
    elif isinstance(granularity, PerGroup) and given.axis is not None:
        axis, block = _term_axis(given), granularity.size
    start = WeightStart(given.name, given.values, given.scale, low, high, axis, block, is_binary)
    return replace(start, scale=least_error_scale(start))


def _term_axis(given: WeightStart) -> int:
    """The axis that a product sums over: the other one of a matrix, the channels of a filter."""
    assert given.axis is not None
    if given.block:
        return given.axis
    return 1 - given.axis if given.values.ndim == 2 else 1


def least_error_scale(start: WeightStart) -> Array:
    """Scales (f32) of least squared error of the quantized weights; binary ones have a formula."""
    if start.is_binary:
        return _positive(_reduced(start, np.abs(start.values), np.mean))
    peaks = _reduced(start, np.abs(start.values), np.max)
    best, least = peaks / start.high, np.full(peaks.shape, np.inf)
    for ratio in np.linspace(1.2, 0.15, CANDIDATES):
        scale = _positive(peaks * (ratio / start.high))
        factor = spread(scale, start.values.shape, start.axis, start.block)
        assert factor is not None
        qvalues = integer_qvalues(start.values, factor, None, start.low, start.high)
        error = _reduced(start, np.square(qvalues * factor - start.values), np.sum)
        best = np.where(error < least, scale, best)
        least = np.minimum(error, least)
    return _positive(best)


def _positive(scale: Array) -> Array:
    """f32; 1 where all weights are zero."""
    narrow = scale.astype(np.float32)
    return np.asarray(np.where(narrow > np.finfo(np.float32).tiny, narrow, np.float32(1)))


def _reduced(start: WeightStart, array: Array, function: object) -> Array:
    """A statistic per scale, in the shape of the scales."""
    assert callable(function)
    if start.axis is None:
        return np.asarray(function(array))
    at = start.axis % array.ndim
    if not start.block:
        others = tuple(i for i in range(array.ndim) if i != at)
        return np.asarray(function(array, axis=others))
    edges = range(0, array.shape[at], start.block)
    parts = (
        np.take(array, range(e, min(e + start.block, array.shape[at])), axis=at) for e in edges
    )
    return np.stack([function(part, axis=at) for part in parts], axis=at)


def fake_quantized(
    b: Builder, start: WeightStart, config: QatConfig, observers: Observers
) -> Value:
    """The weight as a parameter behind fake quantization."""
    w = parameter(b, start.name, start.values)
    scale = weight_scale(b, w, start, config.scale_mode, observers)
    if start.is_binary:
        return b.fake_binarize(w, scale, ste=config.ste, **start.granularity)  # type: ignore[no-any-return]
    return b.fake_quantize(  # type: ignore[no-any-return]
        w, scale, low=start.low, high=start.high, ste=config.ste, **start.granularity
    )


def parameter(b: Builder, name: str, array: Array) -> Value:
    """A trainable parameter that takes the name of the constant that it replaces."""
    type_ = TensorType(dtype(array.dtype), array.shape)
    attrs = {"value": array, "trainable": True}
    return b.append(Node("parameter", (), attrs, (type_,), (name,), b.loc)).outputs[0]


def weight_scale(
    b: Builder, w: Value, start: WeightStart, mode: str, observers: Observers
) -> Value:
    """The scale of a weight in a training graph."""
    if mode == "learned":
        return learned_scale(b, start.scale, w.name)
    if mode == "fixed" or start.block:
        return b.constant(start.scale, name=f"{w.name}.scale")
    current = _from_weights(b, w, start)
    if mode == "per_batch":
        return current
    return observers.averaged(b, f"{w.name}.scale", start.scale, current)


def learned_scale(b: Builder, start: Array, name: str) -> Value:
    """start * factor, with a trainable factor per scale."""
    factor = parameter(b, b.fresh_name(name + FACTOR), np.ones_like(start, np.float32))
    floor = b.constant(np.float32(SMALLEST_FACTOR))
    return b.mul(b.constant(start, name=f"{name}.scale_start"), b.maximum(factor, floor))  # type: ignore[no-any-return]


def _from_weights(b: Builder, w: Value, start: WeightStart) -> Value:
    """The scale of the current weights."""
    axes = tuple(i for i in range(w.rank) if start.axis is None or i != start.axis % w.rank)
    sizes = b.abs(w)
    tiny = b.constant(np.float32(1e-30))
    if start.high > 1:
        peak = b.reduce_max(sizes, axes=axes, keepdims=False)
        scale = b.div(peak, b.constant(np.float32(start.high)))
    else:
        factor = 1.0 if start.is_binary else MEAN_FACTORS[start.low]
        mean = b.reduce_mean(sizes, axes=axes, keepdims=False)
        scale = b.mul(mean, b.constant(np.float32(factor)))
    return b.maximum(scale, tiny)  # type: ignore[no-any-return]


def bits_of(start: WeightStart) -> Bits:
    """The width of a weight."""
    if start.is_binary:
        return "binary"
    return next((b for b, r in WEIGHT_RANGES.items() if r == (start.low, start.high)), 8)
