"""The gradient of group_norm (and of instance_norm, which has one channel a group).

With r = 1 / sqrt(var + eps), z = (x - mean) * r and means over a group:

    dx = r * (scale * dy - mean(scale * dy) - z * mean(scale * dy * z))
    dscale = sum(dy * z), dbias = sum(dy), over all but the channels
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from bitwright.ir.dim import product
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.nn.channels import (
    as_channels,
    outside_channels,
    per_channel,
    require_channels,
    require_groups,
    require_per_channel,
)
from bitwright.ops.nn.norm import EPS


def _infer(
    dy: TensorType, x: TensorType, scale: TensorType | None, groups: int, eps: float
) -> tuple[TensorType, TensorType, TensorType]:
    channels = require_channels(x, 2)
    require_groups("x", channels, groups)
    expect.same_dtype(dy, x, scale)
    expect.shape("dy", dy, x.shape)
    require_per_channel("scale", scale, channels)
    sums = x.with_shape((channels,))
    return x, sums, sums


def _reference(
    dy: Array, x: Array, scale: Array | None, groups: int, eps: float
) -> tuple[Array, Array, Array]:
    require_groups("x", x.shape[1], groups)
    grouped = (len(x), groups, x.shape[1] // groups, *x.shape[2:])
    axes = tuple(range(2, len(grouped)))
    values, gradient = wide(x).reshape(grouped), wide(dy)
    scaled = gradient if scale is None else gradient * per_channel("scale", scale, x)
    centred = values - np.mean(values, axis=axes, keepdims=True)
    rate = 1 / np.sqrt(np.mean(centred**2, axis=axes, keepdims=True) + eps)
    z, part = centred * rate, scaled.reshape(grouped)
    dx = part - np.mean(part, axis=axes, keepdims=True)
    dx = rate * (dx - z * np.mean(part * z, axis=axes, keepdims=True))
    outside = outside_channels(x.ndim)
    dscale = np.sum(gradient * z.reshape(x.shape), axis=outside)
    return dx.reshape(x.shape), dscale, np.sum(gradient, axis=outside)


def _compose(
    b: Builder, dy: Value, x: Value, scale: Value | None, groups: int, eps: float
) -> tuple[Value, Value, Value]:
    rows = (x.shape[0], groups, product([x.shape[1] // groups, *x.shape[2:]]))
    scaled = dy if scale is None else b.mul(dy, as_channels(b, scale, x))
    values, part = b.reshape(x, shape=rows), b.reshape(scaled, shape=rows)
    centred = b.sub(values, _mean(b, values))
    rate = b.rsqrt(b.add(_mean(b, b.mul(centred, centred)), eps))
    z = b.mul(centred, rate)
    dx = b.sub(part, _mean(b, part))
    dx = b.mul(rate, b.sub(dx, b.mul(z, _mean(b, b.mul(part, z)))))
    axes: dict[str, Any] = {"axes": outside_channels(x.rank), "keepdims": False}
    dscale = b.reduce_sum(b.mul(dy, b.reshape(z, shape=x.shape)), **axes)
    return b.reshape(dx, shape=x.shape), dscale, b.reduce_sum(dy, **axes)


def _mean(b: Builder, rows: Value) -> Value:
    return cast(Value, b.reduce_mean(rows, axes=(2,), keepdims=True))


def _samples() -> list[Sample]:
    dy, x, scale = draw(2, 6, 3, 5), draw(2, 6, 3, 5, seed=3), draw(6, seed=1)
    return [
        sample(dy, x, groups=2),
        sample(dy, x, scale, groups=3, eps=0.1),
        sample(dy, x, scale, groups=6),
        sample(draw(3, 6), draw(3, 6, seed=3), scale, groups=2),
        sample(draw(0, 6, 2), draw(0, 6, 2), groups=2),
        sample(
            draw(1, 4, 3, dtype="f16"), draw(1, 4, 3, dtype="f16", seed=3), groups=2, tolerance=4e-3
        ),
    ]


OPDEFS = [
    OpDef(
        "group_norm_backward",
        Kind.REDUCTION,
        "dy, x, scale?",
        infer=_infer,
        reference=_reference,
        grad=composed(_compose),
        samples=_samples,
        attrs={"groups": Attr("int"), "eps": EPS},
        doc="The gradients of group_norm with respect to x, scale and bias.",
    )
]
