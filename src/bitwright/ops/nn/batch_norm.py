"""Batch normalization in training, and its gradient; channels are axis 1.

    batch_norm_train     y = (x - mean) / sqrt(var + eps) * scale + bias, with the mean and the mean
                         squared deviation of each channel, which are further results
    batch_norm_backward  with r = 1 / sqrt(var + eps), n elements of a channel, z = (x - mean) * r:
                         dbias = sum(dy), dscale = sum(dy * z),
                         dx = scale * r * (dy - dbias / n - z * dscale / n)

Statistics have the element type of scale, which may be wider than that of x.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.nn.channel_moments import channel_moments
from bitwright.ops.nn.channels import (
    add_channel_bias,
    as_channels,
    outside_channels,
    per_channel,
    require_channels,
    require_per_channel,
)
from bitwright.ops.nn.norm import EPS

Types = tuple[TensorType, TensorType, TensorType]


def _infer_train(x: TensorType, scale: TensorType, bias: TensorType, eps: float) -> Types:
    channels = require_channels(x, 2)
    require_per_channel("scale", scale, channels)
    require_per_channel("bias", bias, channels)
    statistics = scale.with_shape((channels,))
    return x, statistics, statistics


def _train(x: Array, scale: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    mean, var = channel_moments(x)
    centred = wide(x) - per_channel("mean", mean, x)
    y = centred / np.sqrt(per_channel("var", var, x) + eps) * per_channel("scale", scale, x)
    return add_channel_bias(y, bias), mean, var


def _infer_backward(
    dy: TensorType,
    x: TensorType,
    scale: TensorType,
    mean: TensorType,
    var: TensorType,
    eps: float,
) -> Types:
    channels = require_channels(x, 2)
    expect.same_dtype(x, dy)
    expect.shape("dy", dy, x.shape)
    for what, type_ in (("scale", scale), ("mean", mean), ("var", var)):
        require_per_channel(what, type_, channels)
    sums = scale.with_shape((channels,))
    return x, sums, sums


def _backward(
    dy: Array, x: Array, scale: Array, mean: Array, var: Array, eps: float
) -> tuple[Array, Array, Array]:
    axes = outside_channels(x.ndim)
    rate = 1 / np.sqrt(wide(var) + eps)
    z = (wide(x) - per_channel("mean", mean, x)) * per_channel("var", rate, x)
    gradient = wide(dy)
    dscale, dbias = np.sum(gradient * z, axis=axes), np.sum(gradient, axis=axes)
    count = max(x.size // max(dbias.size, 1), 1)
    inner = gradient - per_channel("dbias", dbias / count, x)
    inner = inner - z * per_channel("dscale", dscale / count, x)
    return per_channel("scale", wide(scale) * rate, x) * inner, dscale, dbias


def channel_count(x: Value) -> Size:
    """The number of elements of a channel."""
    return product([x.shape[axis] for axis in outside_channels(x.rank)])


def divided(b: Builder, value: Value, count: Size) -> Value:
    """A value divided by a size, which may be symbolic."""
    size = b.sizes(values=(count,), shape=())
    return cast(Value, b.div(value, b.cast(size, to=value.dtype)))


def _grad_train(b: Builder, node: Node, dys: list[Any]) -> list[Any]:
    x, scale, _ = node.operands
    _, mean, var = node.outputs
    dy, dmean, dvar = dys
    answer: list[Any] = [None, None, None]
    if dy is not None:
        answer = list(b.batch_norm_backward(dy, x, scale, mean, var, eps=node.attrs["eps"]))
    # mean(x) and mean((x - mean) ** 2), where the latter does not change with the mean
    parts = []
    if dmean is not None:
        parts.append(
            b.expand(as_channels(b, divided(b, dmean, channel_count(x)), x), shape=x.shape)
        )
    if dvar is not None:
        rate = as_channels(b, divided(b, b.mul(dvar, 2.0), channel_count(x)), x)
        centred = b.sub(b.cast(x, to=mean.dtype), as_channels(b, mean, x))
        parts.append(b.mul(centred, rate))
    for part in parts:
        part = b.cast(part, to=x.dtype)
        answer[0] = part if answer[0] is None else b.add(answer[0], part)
    return answer


def _compose_backward(
    b: Builder, dy: Value, x: Value, scale: Value, mean: Value, var: Value, eps: float
) -> tuple[Value, Value, Value]:
    element, axes = scale.dtype, outside_channels(x.rank)
    dy, x_wide = b.cast(dy, to=element), b.cast(x, to=element)
    mean, var = b.cast(mean, to=element), b.cast(var, to=element)
    rate = b.rsqrt(b.add(var, eps))
    z = b.mul(b.sub(x_wide, as_channels(b, mean, x)), as_channels(b, rate, x))
    dbias = b.reduce_sum(dy, axes=axes, keepdims=False)
    dscale = b.reduce_sum(b.mul(dy, z), axes=axes, keepdims=False)
    count = channel_count(x)
    inner = b.sub(dy, as_channels(b, divided(b, dbias, count), x))
    inner = b.sub(inner, b.mul(z, as_channels(b, divided(b, dscale, count), x)))
    dx = b.mul(as_channels(b, b.mul(scale, rate), x), inner)
    return b.cast(dx, to=x.dtype), dscale, dbias


def _train_samples() -> list[Sample]:
    scale, bias = draw(3, seed=1), draw(3, seed=2)
    return [
        sample(draw(2, 3, 4, 5), scale, bias),
        sample(draw(7, 3), scale, bias, eps=0.1),
        sample(draw(2, 3, 2, 3, 2), scale, bias),
        sample(draw(2, 1, 3), scale[:1], bias[:1]),
        sample(draw(2, 3, 4, dtype="f16"), scale, bias, tolerance=2e-3),
        sample(draw(4, 3, 5, dtype="bf16"), scale, bias, tolerance=2e-2),
    ]


def _backward_samples() -> list[Sample]:
    scale, mean = draw(3, seed=1), draw(3, seed=3)
    var = draw(3, seed=4, low=0.5)
    found = []
    for shape, element, tolerance in (
        ((2, 3, 4, 5), "f32", 1e-5),
        ((7, 3), "f32", 1e-5),
        ((2, 3, 2, 3, 2), "f32", 1e-5),
        ((2, 3, 4), "f16", 2e-3),
    ):
        dy, x = draw(*shape, dtype=element), draw(*shape, dtype=element, seed=5)
        found.append(sample(dy, x, scale, mean, var, tolerance=tolerance))
    return found


OPDEFS = [
    OpDef(
        "batch_norm_train",
        Kind.REDUCTION,
        "x, scale, bias",
        infer=_infer_train,
        reference=_train,
        grad=_grad_train,
        samples=_train_samples,
        attrs={"eps": EPS},
        keeps=("scale", "bias"),
        doc="batch_norm with the mean and the mean squared deviation of x, which it also returns.",
    ),
    OpDef(
        "batch_norm_backward",
        Kind.REDUCTION,
        "dy, x, scale, mean, var",
        infer=_infer_backward,
        reference=_backward,
        grad=composed(_compose_backward),
        samples=_backward_samples,
        attrs={"eps": EPS},
        keeps=("scale", "mean", "var"),
        doc="The gradients of batch_norm_train with respect to x, scale and bias.",
    ),
]
