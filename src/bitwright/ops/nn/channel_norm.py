"""Normalizations per channel; channels are axis 1.

group_norm     (x - mean) / sqrt(var + eps) * scale + bias, over each group of channels and
               all spatial axes
instance_norm  group_norm with one channel a group
batch_norm     the same formula with mean and var given per channel
lrn            x / (bias + alpha / size * sum of x ** 2 over `size` channels around) ** beta
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import product
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.nn.channels import (
    add_channel_bias,
    as_channels,
    per_channel,
    require_channels,
    require_groups,
    require_per_channel,
)
from bitwright.ops.nn.norm import EPS, standardize


def _infer_group_norm(
    x: TensorType, scale: TensorType | None, bias: TensorType | None, groups: int, eps: float
) -> TensorType:
    channels = require_channels(x, 2)
    require_groups("x", channels, groups)
    expect.same_dtype(x, scale, bias)
    require_per_channel("scale", scale, channels)
    require_per_channel("bias", bias, channels)
    return x


def _group_norm(
    x: Array, scale: Array | None, bias: Array | None, groups: int, eps: float
) -> Array:
    require_groups("x", x.shape[1], groups)
    grouped = wide(x).reshape(len(x), groups, x.shape[1] // max(groups, 1), *x.shape[2:])
    y = standardize(grouped, tuple(range(2, grouped.ndim)), eps).reshape(x.shape)
    return _affine_channels(y, scale, bias)


def _affine_channels(y: Array, scale: Array | None, bias: Array | None) -> Array:
    if scale is not None:
        y = y * per_channel("scale", scale, y)
    return add_channel_bias(y, bias)


def _infer_instance_norm(
    x: TensorType, scale: TensorType | None, bias: TensorType | None, eps: float
) -> TensorType:
    require_channels(x, 3)
    return _infer_group_norm(x, scale, bias, 1, eps)


def _instance_norm(x: Array, scale: Array | None, bias: Array | None, eps: float) -> Array:
    y = standardize(wide(x), tuple(range(2, x.ndim)), eps)
    return _affine_channels(y, scale, bias)


def _infer_batch_norm(
    x: TensorType,
    scale: TensorType,
    bias: TensorType,
    mean: TensorType,
    var: TensorType,
    eps: float,
) -> TensorType:
    channels = require_channels(x, 1)
    for what, type_ in (("scale", scale), ("bias", bias), ("mean", mean), ("var", var)):
        require_per_channel(what, type_, channels)
    return x


def _batch_norm(x: Array, scale: Array, bias: Array, mean: Array, var: Array, eps: float) -> Array:
    centred = wide(x) - per_channel("mean", mean, x)
    y = centred / np.sqrt(per_channel("var", var, x) + eps)
    return _affine_channels(y, scale, bias)


def _infer_lrn(x: TensorType, size: int, alpha: float, beta: float, bias: float) -> TensorType:
    require_channels(x, 3)
    if size < 1:
        raise InferenceError("size is too small", expected="at least 1", found=size)
    return x


def _lrn(x: Array, size: int, alpha: float, beta: float, bias: float) -> Array:
    values = wide(x)
    squares = values**2
    total = np.zeros_like(values)
    channels = x.shape[1]
    for shift in range(-((size - 1) // 2), size // 2 + 1):
        low, high = max(0, -shift), min(channels, channels - shift)
        if low < high:
            total[:, low:high] += squares[:, low + shift : high + shift]
    return np.asarray(values / (bias + alpha / size * total) ** beta)


def _grad_group_norm(b: Builder, node: Node, dys: list[Any]) -> list[Value]:
    x, scale = (*node.inputs, None)[:2]
    assert x is not None
    # one channel a group: instance_norm
    groups = node.attrs.get("groups", 1 if x.shape[1] == 0 else x.shape[1])
    return list(b.group_norm_backward(dys[0], x, scale, groups=groups, eps=node.attrs["eps"]))[
        : len(node.inputs)
    ]


def _compose_batch_norm(
    b: Builder, x: Value, scale: Value, bias: Value, mean: Value, var: Value, eps: float
) -> Value:
    element = x.dtype
    scale, bias, mean, var = (b.cast(v, to=element) for v in (scale, bias, mean, var))
    rate = b.mul(scale, b.rsqrt(b.add(var, eps)))
    y = b.mul(b.sub(x, as_channels(b, mean, x)), as_channels(b, rate, x))
    return cast(Value, b.add(y, as_channels(b, bias, x)))


def _compose_lrn(b: Builder, x: Value, size: int, alpha: float, beta: float, bias: float) -> Value:
    """Sums over neighbouring channels are means of windows, where padding counts."""
    squares = b.reshape(b.mul(x, x), shape=(x.shape[0], 1, x.shape[1], product(x.shape[2:])))
    around = ((size - 1) // 2, 0, size // 2, 0)
    means = b.avg_pool(squares, kernel=(size, 1), pads=around, count_include_pad=True)
    base = b.add(b.mul(b.reshape(means, shape=x.shape), alpha), bias)
    return cast(Value, b.div(x, b.pow(base, beta)))


def _group_samples() -> list[Sample]:
    x, scale, bias = draw(2, 6, 3, 5), draw(6, seed=1), draw(6, seed=2)
    return [
        sample(x, groups=2),
        sample(x, scale, bias, groups=3, eps=0.1),
        sample(x, scale, groups=6),
        sample(x, None, bias, groups=1),
        sample(draw(3, 6), scale, groups=2),
        sample(draw(0, 6, 2), groups=2),
        sample(draw(1, 4, 3, dtype="f16"), groups=2, tolerance=2e-3),
    ]


def _instance_samples() -> list[Sample]:
    scale, bias = draw(3, seed=1), draw(3, seed=2)
    return [
        sample(draw(2, 3, 4, 5)),
        sample(draw(2, 3, 4, 5), scale, bias),
        sample(draw(2, 3, 7), scale, eps=0.1),
    ]


def _batch_samples() -> list[Sample]:
    scale, bias, mean = (draw(3, seed=seed) for seed in (1, 2, 3))
    var = draw(3, seed=4, low=0.1)
    return [
        sample(draw(2, 3, 4, 5), scale, bias, mean, var),
        sample(draw(2, 3), scale, bias, mean, var, eps=0.1),
        sample(draw(5), scale[:1], bias[:1], mean[:1], var[:1]),
        sample(draw(2, 3, 4, dtype="f16"), scale, bias, mean, var, tolerance=2e-3),
    ]


def _op(name: str, inputs: str, **rest: Any) -> OpDef:
    return OpDef(name, Kind.REDUCTION, inputs, **rest)


OPDEFS = [
    _op(
        "group_norm",
        "x, scale?, bias?",
        infer=_infer_group_norm,
        reference=_group_norm,
        grad=_grad_group_norm,
        takes_epilogue=True,
        samples=_group_samples,
        attrs={"groups": Attr("int"), "eps": EPS},
        doc="layer_norm over each group of channels and all spatial axes; scale per channel.",
    ),
    _op(
        "instance_norm",
        "x, scale?, bias?",
        infer=_infer_instance_norm,
        reference=_instance_norm,
        grad=_grad_group_norm,
        takes_epilogue=True,
        samples=_instance_samples,
        attrs={"eps": EPS},
        doc="layer_norm over the spatial axes of each channel; scale per channel.",
    ),
    _op(
        "batch_norm",
        "x, scale, bias, mean, var",
        infer=_infer_batch_norm,
        reference=_batch_norm,
        grad=composed(_compose_batch_norm),
        samples=_batch_samples,
        attrs={"eps": EPS},
        doc="(x - mean) / sqrt(var + eps) * scale + bias, each given per channel.",
    ),
    _op(
        "lrn",
        "x",
        infer=_infer_lrn,
        reference=_lrn,
        grad=composed(_compose_lrn),
        samples=lambda: [
            sample(draw(2, 5, 3, 4), size=3),
            sample(draw(2, 5, 3), size=4, alpha=0.5, beta=0.5, bias=2.0),
            sample(draw(1, 2, 3), size=9),
        ],
        attrs={
            "size": Attr("int"),
            "alpha": Attr("float", 1e-4),
            "beta": Attr("float", 0.75),
            "bias": Attr("float", 1.0),
        },
        doc="x / (bias + alpha / size * sum of squares of size channels around) ** beta.",
    ),
]
