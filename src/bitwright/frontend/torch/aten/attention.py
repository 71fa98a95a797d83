"""Scaled dot-product attention and embeddings."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir import Value, broadcast_shapes
from bitwright.ir.dim import product
from bitwright.ir.dtype import i64


@maps("scaled_dot_product_attention.default")
def attention(
    ctx: Context,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    if dropout:
        raise ctx.refuse("attention dropout is random; call module.eval() first")
    heads, outer = _head_axes(ctx, [q, k, v], enable_gqa)
    q4, k4, v4 = (_four_axes(ctx, x, outer, heads) for x in (q, k, v))
    if mask is not None and mask.rank > 4:
        mask = _four_axes(ctx, mask, outer, heads)
    y = ctx.b.attention(q4, k4, v4, mask, causal=causal, scale=scale)
    return ctx.reshape(y, (*outer, *([q.shape[-3]] if heads else []), *y.shape[2:]))


def _head_axes(ctx: Context, xs: list[Value], enable_gqa: bool) -> tuple[bool, tuple[Any, ...]]:
    """Whether axis -3 is heads, and the common shape of the batch axes."""
    heads = all(x.rank >= 3 for x in xs) and (enable_gqa or xs[0].rank > 3)
    ends = 3 if heads else 2
    return heads, broadcast_shapes(*(x.shape[: x.rank - ends] for x in xs))


def _four_axes(ctx: Context, x: Value, outer: tuple[Any, ...], heads: bool) -> Value:
    """[batch, heads, sequence, width]"""
    inner = x.shape[-3:] if heads else (1, *x.shape[-2:])
    if x.shape[: x.rank - (3 if heads else 2)] != outer:
        kept = x.shape[-3:] if heads else x.shape[-2:]
        x = ctx.expand(x, (*outer, *kept))
    return ctx.reshape(x, (product(outer), *inner))


@maps("embedding.default")
def embedding(ctx: Context, w: Value, indices: Value, *_: Any) -> Value:
    return ctx.b.gather(w, indices, axis=0)


@maps("embedding_bag.padding_idx", "embedding_bag.default")
def embedding_bag(
    ctx: Context,
    w: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> list[Any]:
    """Rows of w, reduced over the bags of indices that begin at `offsets`."""
    if include_last_offset:
        offsets = ctx.slice(offsets, 0, 0, -1)
    rows = ctx.b.gather(w, indices, axis=0)
    if sample_weights is not None:
        rows = ctx.b.mul(rows, ctx.unsqueeze(sample_weights, 1))
    places = ctx.unsqueeze(ctx.iota(indices.shape[0], offsets.dtype), 1)
    begun = ctx.cast(ctx.b.le(ctx.unsqueeze(offsets, 0), places), i64)
    bag = ctx.b.sub(ctx.b.reduce_sum(begun, axes=[1], keepdims=False), 1)
    bags = ctx.unsqueeze(ctx.iota(offsets.shape[0]), 1)
    inside = ctx.b.eq(bags, ctx.unsqueeze(bag, 0))  # [bags, indices]
    if padding_idx is not None:
        width = w.shape[0]
        counted = ctx.b.ne(indices, padding_idx + width if padding_idx < 0 else padding_idx)
        inside = ctx.b.and_(inside, counted)
    if mode == 2:
        hidden = ctx.b.where(ctx.unsqueeze(inside, 2), rows, float("-inf"))
        top = ctx.b.reduce_max(hidden, axes=[1], keepdims=False)
        empty = ctx.b.not_(ctx.b.reduce_max(inside, axes=[1]))
        return [ctx.b.where(empty, 0.0, top), None, None, None]
    chosen = ctx.cast(inside, w.dtype)
    total = ctx.b.matmul(chosen, rows)
    if mode == 1:
        total = ctx.b.div(total, ctx.b.maximum(ctx.b.reduce_sum(chosen, axes=[1]), 1.0))
    return [total, None, None, None]
