"""Cross entropy; other losses are decomposed by torch."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.graph import Value

_REDUCTIONS = ("none", "mean", "sum")


def _by_label(ctx: Context, x: Value, labels: Value, weights: Value | None, **attrs: Any) -> Value:
    if x.rank > 1:
        return ctx.b.cross_entropy(x, labels, weights, **attrs)
    loss = ctx.b.cross_entropy(ctx.unsqueeze(x, 0), ctx.unsqueeze(labels, 0), weights, **attrs)
    return ctx.reshape(loss, ())


@maps("nll_loss_nd.default", "nll_loss.default", "nll_loss2d.default")
def nll_loss(
    ctx: Context,
    x: Value,
    labels: Value,
    weights: Value | None = None,
    reduction: Any = 1,
    ignore_index: int = -100,
) -> Value:
    attrs = {"ignore_index": ignore_index, "reduction": _REDUCTIONS[reduction]}
    return _by_label(ctx, x, labels, weights, from_log_probs=True, **attrs)


@maps("cross_entropy_loss.default")
def cross_entropy(
    ctx: Context,
    x: Value,
    target: Value,
    weights: Value | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    smoothing: float = 0.0,
) -> Value:
    if target.dtype.is_float:
        return _by_probability(ctx, x, target, weights, reduction, smoothing)
    attrs = {"ignore_index": ignore_index, "reduction": _REDUCTIONS[reduction]}
    loss = _by_label(ctx, x, target, weights, from_log_probs=False, **attrs)
    if not smoothing:
        return loss
    if weights is not None or x.rank != 2:
        raise ctx.refuse("label smoothing with class weights or spatial axes")
    uniform = ctx.b.neg(ctx.b.reduce_mean(ctx.b.log_softmax(x, axis=1), axes=[1], keepdims=False))
    kept = ctx.b.ne(target, ignore_index)
    uniform = ctx.b.where(kept, uniform, 0.0)
    if reduction:
        uniform = ctx.b.reduce_sum(uniform, axes=[0], keepdims=False)
    if reduction == 1:
        count = ctx.b.reduce_sum(ctx.cast(kept, x.dtype), axes=[0], keepdims=False)
        uniform = ctx.b.div(uniform, count)
    return ctx.b.add(ctx.b.mul(loss, 1.0 - smoothing), ctx.b.mul(uniform, float(smoothing)))


def _by_probability(
    ctx: Context, x: Value, target: Value, weights: Value | None, reduction: int, smoothing: float
) -> Value:
    axis = 1 if x.rank > 1 else 0
    classes = x.shape[axis]
    if smoothing:
        share = ctx.b.div(ctx.const(smoothing, x.dtype), ctx.scalar(classes, x.dtype))
        target = ctx.b.add(ctx.b.mul(target, 1.0 - smoothing), share)
    scores = ctx.b.log_softmax(x, axis=axis)
    if weights is not None:
        scores = ctx.b.mul(scores, ctx.reshape(weights, (-1, *[1] * (x.rank - axis - 1))))
    loss = ctx.b.neg(ctx.b.reduce_sum(ctx.b.mul(scores, target), axes=[axis], keepdims=False))
    if reduction == 0 or not loss.rank:
        return loss
    axes = list(range(loss.rank))
    total = ctx.b.reduce_sum(loss, axes=axes, keepdims=False)
    if reduction == 2:
        return total
    return ctx.b.div(total, ctx.scalar(ctx.count(loss, axes), x.dtype))
