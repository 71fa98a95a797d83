"""Normalization layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.graph import Value


@maps("layer_norm.default")
def layer_norm(
    ctx: Context, x: Value, shape: Any, w: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Value:
    return ctx.b.layer_norm(x, w, bias, axis=-len(shape), eps=eps)


@maps("native_layer_norm.default")
def native_layer_norm(
    ctx: Context, x: Value, shape: list[Any], w: Value | None, bias: Value | None, eps: float
) -> list[Value | None]:
    y = layer_norm(ctx, x, shape, w, bias, eps)
    if not ctx.wanted - {0}:
        return [y, None, None]
    axes = list(range(x.rank - len(shape), x.rank))
    mean = ctx.b.reduce_mean(x, axes=axes)
    distance = ctx.b.sub(x, mean)
    variance = ctx.b.reduce_mean(ctx.b.mul(distance, distance), axes=axes)
    return [y, mean, ctx.b.rsqrt(ctx.b.add(variance, float(eps)))]


@maps("rms_norm.default")
def rms_norm(
    ctx: Context, x: Value, shape: list[Any], w: Value | None = None, eps: float | None = None
) -> Value:
    if eps is None:
        eps = float(np.finfo(x.dtype.numpy).eps) if x.dtype.bits >= 32 else 2.0**-23
    return ctx.b.rms_norm(x, None if w is None else ctx.operand(w), axis=-len(shape), eps=eps)


@maps("_fused_rms_norm.default")
def fused_rms_norm(
    ctx: Context, x: Value, shape: list[Any], w: Value | None, eps: float | None
) -> list[Value | None]:
    return [rms_norm(ctx, x, shape, w, eps), None]


@maps("group_norm.default")
def group_norm(
    ctx: Context, x: Value, groups: int, w: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Value:
    return ctx.b.group_norm(x, w, bias, groups=groups, eps=eps)


@maps("native_group_norm.default")
def native_group_norm(ctx: Context, x: Value, w: Any, bias: Any, *rest: Any) -> list[Value | None]:
    _batch, _channels, _area, groups, eps = rest
    return [group_norm(ctx, x, groups, w, bias, eps), None, None]


@maps("instance_norm.default")
def instance_norm(
    ctx: Context, x: Value, w: Any, bias: Any, mean: Any, var: Any, *options: Any
) -> Value:
    use_input_stats, _momentum, eps, _cudnn_enabled = options
    if not use_input_stats:
        return _batch_norm(ctx, x, w, bias, mean, var, eps)
    if mean is not None:
        raise ctx.refuse("it updates running statistics; call module.eval() first")
    return ctx.b.instance_norm(x, w, bias, eps=eps)


def _batch_norm(
    ctx: Context, x: Value, w: Value | None, bias: Value | None, mean: Any, var: Any, eps: float
) -> Value:
    channels = x.shape[1]
    w = ctx.full(1, (channels,), mean.dtype) if w is None else w
    bias = ctx.full(0, (channels,), mean.dtype) if bias is None else bias
    return ctx.b.batch_norm(x, w, bias, mean, var, eps=eps)


@maps("_native_batch_norm_legit_no_training.default")
def batch_norm_inference(
    ctx: Context, x: Value, w: Any, bias: Any, mean: Value, var: Value, momentum: float, eps: float
) -> list[Value | None]:
    return [_batch_norm(ctx, x, w, bias, mean, var, eps), None, None]


@maps("_native_batch_norm_legit_functional.default")
def batch_norm_training(
    ctx: Context, x: Value, w: Any, bias: Any, mean: Value, var: Value, *options: Any
) -> list[Value | None]:
    """Normalizes with the statistics of the batch; results 3 and 4 are the running ones."""
    training, momentum, eps = options
    if not training:
        return [_batch_norm(ctx, x, w, bias, mean, var, eps), None, None, mean, var]
    w = ctx.full(1, (x.shape[1],), mean.dtype) if w is None else w
    bias = ctx.full(0, (x.shape[1],), mean.dtype) if bias is None else bias
    # bitwright.train finds this op, and uses the running statistics in evaluation
    results: Any = ctx.b.batch_norm_train(x, w, bias, eps=eps)
    y, own_mean, own_var = results
    inverse = ctx.b.rsqrt(ctx.b.add(own_var, float(eps)))
    count = ctx.scalar(ctx.count(x, _outside_channels(x)), own_var.dtype)
    degrees = ctx.b.maximum(ctx.b.sub(count, 1.0), 1.0)  # a single element has the variance 0
    unbiased = ctx.b.mul(own_var, ctx.b.div(count, degrees))

    def updated(running: Value, new: Value) -> Value:
        kept = ctx.b.mul(running, 1.0 - momentum)
        return ctx.b.add(kept, ctx.b.mul(ctx.cast(new, running.dtype), float(momentum)))

    return [y, own_mean, inverse, updated(mean, own_mean), updated(var, unbiased)]


@maps("_native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    ctx: Context, x: Value, w: Any, bias: Any, training: bool, momentum: float, eps: float
) -> list[Value | None]:
    axes = _outside_channels(x)
    mean = ctx.b.reduce_mean(x, axes=axes, keepdims=False)
    distance = ctx.b.sub(x, ctx.b.reduce_mean(x, axes=axes))
    var = ctx.b.reduce_mean(ctx.b.mul(distance, distance), axes=axes, keepdims=False)
    inverse = ctx.b.rsqrt(ctx.b.add(var, float(eps)))
    return [_batch_norm(ctx, x, w, bias, mean, var, eps), mean, inverse]


def _outside_channels(x: Value) -> list[int]:
    return [axis for axis in range(x.rank) if axis != 1]
