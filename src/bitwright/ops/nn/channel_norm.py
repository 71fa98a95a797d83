"""Normalizations per channel; channels are axis 1.

group_norm     (x - mean) / sqrt(var + eps) * scale + bias, over each group of channels and
               all spatial axes
instance_norm  group_norm with one channel a group
batch_norm     the same formula with mean and var given per channel
lrn            x / (bias + alpha / size * sum of x ** 2 over `size` channels around) ** beta
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.nn.channels import add_channel_bias, per_channel, require_groups
from bitwright.ops.nn.norm import EPS, standardize


def _require_channels(x: TensorType, least: int) -> Size:
    expect.floating("x", x)
    if x.rank < least:
        raise InferenceError("x has the wrong rank", expected=f"rank {least} or more", found=x)
    return x.shape[1] if x.rank > 1 else 1


def _require_per_channel(what: str, type_: TensorType | None, channels: Size) -> None:
    if type_ is not None:
        expect.floating(what, type_)
        expect.rank(what, type_, 1)
        expect.size(what, type_.shape[0], channels)


def _infer_group_norm(
    x: TensorType, scale: TensorType | None, bias: TensorType | None, groups: int, eps: float
) -> TensorType:
    channels = _require_channels(x, 2)
    require_groups("x", channels, groups)
    expect.same_dtype(x, scale, bias)
    _require_per_channel("scale", scale, channels)
    _require_per_channel("bias", bias, channels)
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
    _require_channels(x, 3)
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
    channels = _require_channels(x, 1)
    for what, type_ in (("scale", scale), ("bias", bias), ("mean", mean), ("var", var)):
        _require_per_channel(what, type_, channels)
    return x


def _batch_norm(x: Array, scale: Array, bias: Array, mean: Array, var: Array, eps: float) -> Array:
    centred = wide(x) - per_channel("mean", mean, x)
    y = centred / np.sqrt(per_channel("var", var, x) + eps)
    return _affine_channels(y, scale, bias)


def _infer_lrn(x: TensorType, size: int, alpha: float, beta: float, bias: float) -> TensorType:
    _require_channels(x, 3)
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
        samples=_batch_samples,
        attrs={"eps": EPS},
        doc="(x - mean) / sqrt(var + eps) * scale + bias, each given per channel.",
    ),
    _op(
        "lrn",
        "x",
        infer=_infer_lrn,
        reference=_lrn,
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
