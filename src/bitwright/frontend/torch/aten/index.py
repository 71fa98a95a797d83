"""Gather, advanced indexing, unique values and search.

Several index tensors are broadcast and stacked to coordinates. The axes that they index are moved
to the front, and adjacent ones are moved back in the result, as in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.frontend.torch.scalars import compute, kind_of
from bitwright.ir.dtype import bool_, i64
from bitwright.ir.graph import Value
from bitwright.ir.types import broadcast_shapes, normalize_axis


def as_index(ctx: Context, indices: Value) -> Value:
    return indices if indices.dtype == i64 else ctx.cast(indices, i64)


@maps("index_select.default")
def index_select(ctx: Context, x: Value, dim: int, indices: Value) -> Value:
    if not x.rank:
        return x
    return ctx.b.gather(x, ctx.reshape(indices, (-1,)), axis=normalize_axis(dim, x.rank))


@maps("gather.default")
def gather(ctx: Context, x: Value, dim: int, indices: Value, sparse_grad: bool = False) -> Value:
    if not x.rank:
        return ctx.expand(x, indices.shape)
    if not indices.rank:
        return ctx.b.gather(x, indices, axis=0)
    return ctx.b.gather_elements(x, as_index(ctx, indices), axis=normalize_axis(dim, x.rank))


@maps("nonzero.default")
def nonzero(ctx: Context, x: Value) -> Value:
    return ctx.b.transpose(ctx.b.nonzero(x), perm=(1, 0))


@maps("masked_select.default")
def masked_select(ctx: Context, x: Value, mask: Value) -> Value:
    x, mask = ctx.broadcast(x, mask)
    return ctx.b.compress(ctx.reshape(x, (-1,)), ctx.reshape(mask, (-1,)))


# indexing by several tensors


class AdvancedIndex:
    """The coordinates of an expression such as `x[:, i, mask]`."""

    def __init__(self, ctx: Context, x: Value, indices: Sequence[Value | None]) -> None:
        self.axes: list[int] = []
        tensors: list[Value] = []
        axis = 0
        for index in indices:
            if index is None:
                axis += 1
                continue
            for part in _as_numbers(ctx, index):
                self.axes.append(axis)
                tensors.append(part)
                axis += 1
        rest = [axis for axis in range(x.rank) if axis not in self.axes]
        self.order = [*self.axes, *rest]
        self.shape = broadcast_shapes(*(t.shape for t in tensors))
        self.tensors = [ctx.expand(t, self.shape) for t in tensors]
        self.rest = tuple(x.shape[axis] for axis in rest)
        first, last = self.axes[0], self.axes[-1]
        adjacent = last - first + 1 == len(self.axes)
        self.front = first if adjacent else 0

    def coordinates(self, ctx: Context) -> Value:
        parts = [ctx.unsqueeze(tensor, len(self.shape)) for tensor in self.tensors]
        return parts[0] if len(parts) == 1 else ctx.b.concat(*parts, axis=len(self.shape))

    @property
    def result_order(self) -> list[int]:
        """The permutation from [indexed..., rest...] to the axes of the result."""
        count = len(self.shape)
        rest = list(range(count, count + len(self.rest)))
        return [*rest[: self.front], *range(count), *rest[self.front :]]


def _as_numbers(ctx: Context, index: Value) -> list[Value]:
    """An index tensor, or the coordinates of the true elements of a mask."""
    if index.dtype == bool_ or index.dtype.name == "u8":
        found = ctx.b.nonzero(index)
        return [ctx.take(found, 0, axis) for axis in range(index.rank)]
    return [as_index(ctx, index)]


@maps("index.Tensor", "_unsafe_index.Tensor")
def index(ctx: Context, x: Value, indices: list[Value | None]) -> Value:
    given = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if not given:
        return x
    if len(given) == 1 and given[0][1].dtype.is_integer and given[0][1].dtype.is_signed:
        axis, only = given[0]
        return ctx.b.gather(x, only, axis=axis)
    at = AdvancedIndex(ctx, x, indices)
    moved = ctx.transpose(x, at.order)
    return ctx.transpose(ctx.b.gather_nd(moved, at.coordinates(ctx)), at.result_order)


@maps("index_put.default", "_unsafe_index_put.default")
def index_put(
    ctx: Context, x: Value, indices: list[Value | None], values: Value, accumulate: bool = False
) -> Value:
    given = [i for i in indices if i is not None]
    if not given:
        return ctx.expand(values, x.shape) if not accumulate else ctx.b.add(x, values)
    values = ctx.cast(values, x.dtype)
    first = indices[0]
    if len(indices) == 1 and first is not None and first.dtype == bool_ and values.rank == 0:
        mask = ctx.unsqueeze(first, *range(first.rank, x.rank)) if first.rank < x.rank else first
        return ctx.b.where(mask, ctx.b.add(x, values) if accumulate else values, x)
    at = AdvancedIndex(ctx, x, indices)
    whole = [*at.rest[: at.front], *at.shape, *at.rest[at.front :]]
    updates = ctx.expand(values, whole)
    updates = ctx.transpose(updates, inverse(at.result_order))
    written = ctx.b.scatter_nd(
        ctx.transpose(x, at.order),
        at.coordinates(ctx),
        updates,
        reduction="add" if accumulate else "none",
    )
    return ctx.transpose(written, inverse(at.order))


def inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda i: order[i])


# values


@maps("_unique2.default")
def unique(
    ctx: Context, x: Value, ordered: bool = True, inverse: bool = False, counts: bool = False
) -> list[Value]:
    y, _, places, numbers = ctx.b.unique(x)
    return [y, ctx.reshape(places, x.shape), numbers]


@maps("unique_dim.default")
def unique_dim(
    ctx: Context,
    x: Value,
    dim: int,
    ordered: bool = True,
    inverse: bool = False,
    counts: bool = False,
) -> list[Value]:
    y, _, places, numbers = ctx.b.unique(x, axis=normalize_axis(dim, x.rank))
    return [y, places, numbers]


@maps("one_hot.default")
def one_hot(ctx: Context, indices: Value, classes: Any = -1) -> Value:
    if isinstance(classes, int) and classes < 0:
        top = ctx.b.reduce_max(ctx.reshape(indices, (-1,)), axes=[0], keepdims=False)
        classes = compute(ctx, "add", (top, 1))
    values = ctx.const([0, 1])
    if ctx.usable([classes], indices):
        return ctx.b.one_hot(indices, values, depth=classes)
    return ctx.b.one_hot(indices, values, ctx.scalar(classes))


# search


def _search(ctx: Context, edges: Value, x: Value, right: bool) -> Value:
    """The number of sorted edges (the last axis) before each x."""
    passed = (ctx.b.le if right else ctx.b.lt)(ctx.unsqueeze(edges, -2), ctx.unsqueeze(x, -1))
    return ctx.operand(ctx.b.reduce_sum(ctx.cast(passed, i64), axes=[-1], keepdims=False))


def _comparable(ctx: Context, edges: Value, x: Any) -> tuple[Value, Value]:
    """Both in one element type that represents the values of both."""
    kind = kind_of(x)
    wide = kind if kind.is_float and not edges.dtype.is_float else edges.dtype
    if isinstance(x, Value) and x.dtype.bits > wide.bits:
        wide = x.dtype
    return ctx.cast(edges, wide), ctx.operand(x, wide)


@maps("bucketize.Tensor", "bucketize.Scalar")
def bucketize(
    ctx: Context, x: Any, edges: Value, out_int32: bool = False, right: bool = False
) -> Value:
    edges, x = _comparable(ctx, edges, x)
    return ctx.reshape(_search(ctx, edges, ctx.reshape(x, (-1,)), right), x.shape)


@maps("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    ctx: Context,
    edges: Value,
    x: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Value | None = None,
) -> Value:
    if sorter is not None:
        edges = ctx.b.gather_elements(edges, sorter, axis=edges.rank - 1)
    right = right or side == "right"
    if edges.rank == 1:
        return bucketize(ctx, x, edges, out_int32, right)
    return _search(ctx, *_comparable(ctx, edges, x), right)
