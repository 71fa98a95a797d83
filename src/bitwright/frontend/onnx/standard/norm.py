"""Normalizations, as one op where there is one, else as arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, imports
from bitwright.frontend.onnx.table import imports_table
from bitwright.ir import Value
from bitwright.ir.types import normalize_axis

EPS = 1e-5

imports_table(
    {
        "InstanceNormalization": ("instance_norm", {"epsilon": EPS}),
        "LpNormalization": ("lp_norm", {"axis": -1, "p": 2}),
    }
)


@imports("BatchNormalization")
def batch_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale, bias, mean, var = inputs
    eps = node.number("epsilon", EPS)
    if node.version < 9 and not node.flag("spatial", 1):
        return _per_element(ctx, inputs, eps)
    scale, bias = ctx.cast(scale, x.dtype), ctx.cast(bias, x.dtype)
    if not node.flag("training_mode"):
        mean, var = ctx.cast(mean, x.dtype), ctx.cast(var, x.dtype)
        return [ctx.b.batch_norm(x, scale, bias, mean, var, eps=eps)]
    axes = [0, *range(2, x.rank)]
    wide = ctx.cast(x, "f32") if x.dtype.bits < 32 else x
    own_mean = ctx.b.reduce_mean(wide, axes=axes, keepdims=True)
    own_var = _mean_square(ctx, ctx.b.sub(wide, own_mean), axes)
    flat = [own_mean.shape[1]]
    own_mean = ctx.cast(ctx.reshape(own_mean, flat), x.dtype)
    own_var = ctx.cast(ctx.reshape(own_var, flat), x.dtype)
    y = ctx.b.batch_norm(x, scale, bias, own_mean, own_var, eps=eps)
    momentum = node.number("momentum", 0.9)
    return [y, _blend(ctx, mean, own_mean, momentum), _blend(ctx, var, own_var, momentum)]


def _blend(ctx: Context, old: Value, new: Value, momentum: float) -> Value:
    new = ctx.cast(new, old.dtype)
    kept = ctx.b.mul(old, ctx.like(old, momentum))
    return ctx.b.add(kept, ctx.b.mul(new, ctx.like(old, 1 - momentum)))


def _per_element(ctx: Context, inputs: Inputs, eps: float) -> Value:
    """Batch norm with statistics for every element, not for every channel."""
    x, scale, bias, mean, var = inputs
    deviation = ctx.b.sqrt(ctx.b.add(var, ctx.like(var, eps)))
    normal = ctx.b.div(ctx.b.sub(x, mean), deviation)
    return ctx.b.add(ctx.b.mul(normal, scale), bias)


def _mean_square(ctx: Context, x: Value, axes: Sequence[int]) -> Value:
    return ctx.b.reduce_mean(ctx.b.mul(x, x), axes=list(axes), keepdims=True)


@imports("LayerNormalization")
def layer_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale, bias = inputs[0], inputs[1], inputs[2]
    axis, eps = normalize_axis(node.integer("axis", -1), x.rank), node.number("epsilon", EPS)
    y = ctx.b.layer_norm(x, scale, bias, axis=axis, eps=eps)
    if not node.has_output(1) and not node.has_output(2):
        return [y]
    axes = list(range(axis, x.rank))
    wide = ctx.cast(x, "f32") if node.integer("stash_type", 1) == 1 else x
    mean = ctx.b.reduce_mean(wide, axes=axes, keepdims=True)
    variance = _mean_square(ctx, ctx.b.sub(wide, mean), axes)
    inverse = ctx.b.rsqrt(ctx.b.add(variance, ctx.like(variance, eps)))
    return [y, mean, inverse]


@imports("RMSNormalization")
def rms_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale = inputs
    axis, eps = normalize_axis(node.integer("axis", -1), x.rank), node.number("epsilon", EPS)
    return ctx.b.rms_norm(x, scale, axis=axis, eps=eps)


@imports("GroupNormalization")
def group_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale, bias = inputs
    groups, eps = node.require("num_groups"), node.number("epsilon", EPS)
    if node.version < 21:  # one scale for each group
        scale, bias = (_repeated(ctx, v, x.shape[1] // groups) for v in (scale, bias))
    return ctx.b.group_norm(x, scale, bias, groups=groups, eps=eps)


def _repeated(ctx: Context, x: Value, times: int) -> Value:
    wide = ctx.b.expand(ctx.unsqueeze(x, [1]), shape=(x.shape[0], times))
    return ctx.reshape(wide, [x.shape[0] * times])


@imports("MeanVarianceNormalization")
def mean_variance_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """(x - mean) / (deviation + 1e-9)"""
    x, axes = inputs[0], node.items("axes", [0, 2, 3])
    centred = ctx.b.sub(x, ctx.b.reduce_mean(x, axes=axes, keepdims=True))
    deviation = ctx.b.sqrt(_mean_square(ctx, centred, axes))
    return ctx.b.div(centred, ctx.b.add(deviation, ctx.like(x, 1e-9)))


@imports("LRN")
def lrn(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    size = node.integer("size", 0)
    if size < 1:
        raise ImportModelError("'size' is missing or below 1", where=node.where, found=size)
    return ctx.b.lrn(
        inputs[0],
        size=size,
        alpha=node.number("alpha", 0.0001),
        beta=node.number("beta", 0.75),
        bias=node.number("bias", 1.0),
    )
