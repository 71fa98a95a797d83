"""Sums over each channel, which batch normalization in training is made of; channels are axis 1.

    channel_moments  the mean of each channel, and its mean squared deviation
    channel_sums     sum(dy) and sum(dy * (x - mean)) of each channel

Results of half floats are f32.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.nn.channels import (
    as_channels,
    outside_channels,
    per_channel,
    require_channels,
    require_per_channel,
)


def _per_channel(x: TensorType) -> TensorType:
    channels = require_channels(x, 2)
    return TensorType(f32 if x.dtype.bits < 32 else x.dtype, (channels,))


def _infer_moments(x: TensorType) -> tuple[TensorType, TensorType]:
    return _per_channel(x), _per_channel(x)


def channel_moments(x: Array) -> tuple[Array, Array]:
    """The mean and the mean squared deviation of each channel; 0 of nothing."""
    axes, values = outside_channels(x.ndim), wide(x)
    mean = _mean(values, axes)
    return mean, _mean((values - per_channel("mean", mean, x)) ** 2, axes)


def _mean(values: Array, axes: tuple[int, ...]) -> Array:
    total: Array = np.sum(values, axis=axes)
    return np.asarray(total / max(values.size // max(total.size, 1), 1))


def _infer_sums(dy: TensorType, x: TensorType, mean: TensorType) -> tuple[TensorType, TensorType]:
    expect.same_dtype(x, dy)
    expect.shape("dy", dy, x.shape)
    require_per_channel("mean", mean, require_channels(x, 2))
    return _per_channel(x), _per_channel(x)


def channel_sums(dy: Array, x: Array, mean: Array) -> tuple[Array, Array]:
    axes, gradient = outside_channels(x.ndim), wide(dy)
    centred = wide(x) - per_channel("mean", mean, x)
    return np.sum(gradient, axis=axes), np.sum(gradient * centred, axis=axes)


def _compose_moments(b: Builder, x: Value) -> tuple[Value, Value]:
    axes: dict[str, Any] = {"axes": outside_channels(x.rank), "keepdims": False}
    values = _wide(b, x)
    mean = b.reduce_mean(values, **axes)
    centred = b.sub(values, as_channels(b, mean, x))
    return mean, b.reduce_mean(b.mul(centred, centred), **axes)


def _compose_sums(b: Builder, dy: Value, x: Value, mean: Value) -> tuple[Value, Value]:
    axes: dict[str, Any] = {"axes": outside_channels(x.rank), "keepdims": False}
    gradient, values = _wide(b, dy), _wide(b, x)
    centred = b.sub(values, as_channels(b, b.cast(mean, to=values.dtype), x))
    return b.reduce_sum(gradient, **axes), b.reduce_sum(b.mul(gradient, centred), **axes)


def _wide(b: Builder, x: Value) -> Value:
    return cast(Value, b.cast(x, to=f32)) if x.dtype.bits < 32 else x


def _samples() -> list[Sample]:
    return [
        sample(draw(2, 3, 4, 5)),
        sample(draw(7, 33)),
        sample(draw(1, 1, 1, 1)),
        sample(draw(3, 2, 2, 3, 2)),
        sample(draw(2, 3, 4, dtype="f16"), tolerance=2e-3),
        sample(draw(2, 17, 40, dtype="f64")),
    ]


def _sums_samples() -> list[Sample]:
    found = []
    for case in _samples():
        (x,) = case.inputs
        assert x is not None
        mean = draw(x.shape[1], seed=2)
        dy = draw(*x.shape, seed=1).astype(x.dtype)
        found.append(sample(dy, x, mean, tolerance=case.tolerance))
    return found


def _op(name: str, inputs: str, **rest: Any) -> OpDef:
    return OpDef(name, Kind.REDUCTION, inputs, **rest)


OPDEFS = [
    _op(
        "channel_moments",
        "x",
        infer=_infer_moments,
        reference=channel_moments,
        grad=composed(_compose_moments),
        samples=_samples,
        doc="The mean of each channel, and its mean squared deviation.",
    ),
    _op(
        "channel_sums",
        "dy, x, mean",
        infer=_infer_sums,
        reference=channel_sums,
        grad=composed(_compose_sums),
        samples=_sums_samples,
        keeps=("mean",),
        doc="The sums of dy and of dy * (x - mean) over each channel.",
    ),
]
