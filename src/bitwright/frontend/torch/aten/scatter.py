"""Scatter along one axis, at indices of a tensor or of a slice."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.torch.aten.index import as_index, inverse
from bitwright.frontend.torch.aten.movement import diagonal_indices
from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.dtype import i64
from bitwright.ir.graph import Value
from bitwright.ir.types import normalize_axis

_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "add": "add"}
_REDUCTIONS |= {"multiply": "mul", "mean": "add"}


def _scatter(
    ctx: Context, x: Value, dim: int, indices: Value, source: Value, reduction: str = "none"
) -> Value:
    if not x.rank:
        x1, i1, s1 = (ctx.reshape(v, (1,)) for v in (x, indices, source))
        return ctx.reshape(_scatter(ctx, x1, 0, i1, s1, reduction), ())
    for axis, size in enumerate(indices.shape):
        source = ctx.slice(source, axis, 0, size)
    return ctx.b.scatter_elements(
        x, as_index(ctx, indices), source, axis=normalize_axis(dim, x.rank), reduction=reduction
    )


@maps("scatter.src")
def scatter(ctx: Context, x: Value, dim: int, indices: Value, source: Value) -> Value:
    return _scatter(ctx, x, dim, indices, ctx.operand(source))


@maps("scatter.value")
def scatter_value(ctx: Context, x: Value, dim: int, indices: Value, value: Any) -> Value:
    return _scatter(ctx, x, dim, indices, ctx.full(value, indices.shape, x.dtype))


@maps("scatter.reduce")
def scatter_with(
    ctx: Context, x: Value, dim: int, indices: Value, source: Value, reduce: str
) -> Value:
    return _scatter(ctx, x, dim, indices, source, _REDUCTIONS[reduce])


@maps("scatter.value_reduce")
def scatter_value_with(
    ctx: Context, x: Value, dim: int, indices: Value, value: Any, reduce: str
) -> Value:
    source = ctx.full(value, indices.shape, x.dtype)
    return _scatter(ctx, x, dim, indices, source, _REDUCTIONS[reduce])


@maps("scatter_add.default")
def scatter_add(ctx: Context, x: Value, dim: int, indices: Value, source: Value) -> Value:
    return _scatter(ctx, x, dim, indices, source, "add")


@maps("scatter_reduce.two")
def scatter_reduce(
    ctx: Context,
    x: Value,
    dim: int,
    indices: Value,
    source: Value,
    reduce: str,
    include_self: bool = True,
) -> Value:
    start = x
    if not include_self:  # replace the old elements by the neutral element
        neutral = {"sum": 0, "mean": 0, "prod": 1, "amax": x.dtype.min, "amin": x.dtype.max}
        fill = ctx.full(neutral[reduce], indices.shape, x.dtype)
        start = _scatter(ctx, x, dim, indices, fill)
    total = _scatter(ctx, start, dim, indices, source, _REDUCTIONS[reduce])
    if reduce != "mean":
        return total
    ones = ctx.full(1, indices.shape, x.dtype)
    none = ctx.full(int(include_self), x.shape, x.dtype)
    count = _scatter(ctx, none, dim, indices, ones, "add")
    return ctx.b.div(total, ctx.b.maximum(count, ctx.const(1, x.dtype)))


@maps("index_add.default")
def index_add(
    ctx: Context, x: Value, dim: int, indices: Value, source: Value, alpha: Any = 1
) -> Value:
    if not isinstance(alpha, (int, float)) or alpha != 1:
        source = ctx.b.mul(source, ctx.operand(alpha))
    return _write_rows(ctx, x, dim, indices, source, "add")


@maps("index_copy.default")
def index_copy(ctx: Context, x: Value, dim: int, indices: Value, source: Value) -> Value:
    return _write_rows(ctx, x, dim, indices, source, "none")


def _write_rows(
    ctx: Context, x: Value, dim: int, indices: Value, source: Value, reduction: str
) -> Value:
    if not x.rank:
        one, new = (ctx.reshape(v, (-1,)) for v in (x, source))
        return ctx.reshape(_write_rows(ctx, one, 0, indices, new, reduction), ())
    axis = normalize_axis(dim, x.rank)
    if source.rank < x.rank:
        source = ctx.unsqueeze(source, axis)
    rows, new = ctx.move_axis(x, axis, 0), ctx.move_axis(source, axis, 0)
    places = ctx.reshape(as_index(ctx, indices), (-1, 1))
    written = ctx.b.scatter_nd(rows, places, new, reduction=reduction)
    return ctx.move_axis(written, 0, axis)


@maps("slice_scatter.default")
def slice_scatter(
    ctx: Context,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Any = None,
    stop: Any = None,
    step: int = 1,
) -> Value:
    axis = normalize_axis(dim, x.rank)
    start = 0 if start is None else start
    if step == 1 and not isinstance(start, Value):
        before = ctx.slice(x, axis, 0, start)
        done = before.shape[axis] + source.shape[axis]
        after = ctx.slice(x, axis, done, x.shape[axis])
        parts = [part for part in (before, source, after) if part.shape[axis] != 0]
        return parts[0] if len(parts) == 1 else ctx.b.concat(*parts, axis=axis)
    if isinstance(start, int) and start < 0:
        start = x.shape[axis] + start
    counted = ctx.b.mul(ctx.iota(source.shape[axis]), step)
    return _write_rows(ctx, x, axis, ctx.b.add(counted, ctx.scalar(start)), source, "none")


@maps("select_scatter.default")
def select_scatter(ctx: Context, x: Value, source: Value, dim: int, at: Any) -> Value:
    axis = normalize_axis(dim, x.rank)
    place = ctx.reshape(ctx.scalar(at), (1,))
    return _write_rows(ctx, x, axis, place, ctx.unsqueeze(source, axis), "none")


@maps("diagonal_scatter.default")
def diagonal_scatter(
    ctx: Context, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    flat, order, places = diagonal_indices(ctx, x, offset, dim1, dim2)
    written = _write_rows(ctx, flat, flat.rank - 1, places, source, "none")
    moved = ctx.reshape(written, [x.shape[axis] for axis in order])
    return ctx.transpose(moved, inverse(order))


@maps("masked_scatter.default")
def masked_scatter(ctx: Context, x: Value, mask: Value, source: Value) -> Value:
    """x with the masked elements replaced by those of the source, in order."""
    x, mask = ctx.broadcast(x, mask)
    flat = ctx.reshape(mask, (-1,))
    rank = ctx.b.sub(ctx.b.cumsum(ctx.cast(flat, i64), axis=0), 1)
    source = ctx.reshape(source, (-1,))
    chosen = ctx.b.gather(source, ctx.b.maximum(rank, 0), axis=0)
    return ctx.reshape(ctx.b.where(flat, chosen, ctx.reshape(x, (-1,))), x.shape)
