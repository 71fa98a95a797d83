"""Reductions over axes, cumulative sums, argmax, top k and sort."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.dtype import DType, bool_, u8
from bitwright.ir.graph import Value
from bitwright.ir.types import normalize_axis


def reduce(ctx: Context, op: str, x: Value, dims: Any, keepdim: bool) -> Value:
    if not x.rank:  # torch treats a scalar as one axis of size 1
        return ctx.b.op(op, ctx.reshape(x, (1,)), axes=[0], keepdims=False)
    return ctx.b.op(op, x, axes=ctx.axes(x, dims), keepdims=keepdim)


def _reduction(op: str) -> Any:
    def mapping(
        ctx: Context, x: Value, dim: Any = None, keepdim: bool = False, dtype: DType | None = None
    ) -> Value:
        return reduce(ctx, op, ctx.operand(x), dim, keepdim)

    return mapping


maps("sum.default", "sum.dim_IntList")(_reduction("reduce_sum"))
maps("mean.default", "mean.dim")(_reduction("reduce_mean"))
maps("prod.default", "prod.dim_int")(_reduction("reduce_prod"))
maps("amax.default", "max.default")(_reduction("reduce_max"))
maps("amin.default", "min.default")(_reduction("reduce_min"))
maps("logsumexp.default")(_reduction("reduce_log_sum_exp"))


def _quantifier(op: str) -> Any:
    def mapping(ctx: Context, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        return ctx.operand(reduce(ctx, op, ctx.truth(x), dim, keepdim))

    return mapping


maps("any.default", "any.dim", "any.dims")(_quantifier("reduce_max"))
maps("all.default", "all.dim", "all.dims")(_quantifier("reduce_min"))


def _arg(op: str) -> Any:
    def mapping(ctx: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if x.dtype == bool_:
            x = ctx.cast(x, u8)
        if dim is None:
            place = ctx.b.op(op, ctx.reshape(x, (-1,)), axis=0, keepdims=False)
            return ctx.reshape(place, [1] * x.rank if keepdim else ())
        if not x.rank:
            return ctx.const(0)
        return ctx.b.op(op, x, axis=normalize_axis(dim, x.rank), keepdims=keepdim)

    return mapping


maps("argmax.default")(_arg("argmax"))
maps("argmin.default")(_arg("argmin"))


def _extreme(reduction: str, arg: str) -> Any:
    def mapping(ctx: Context, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
        value = reduce(ctx, reduction, x, dim, keepdim)
        return [value, _arg(arg)(ctx, x, dim, keepdim)]

    return mapping


maps("max.dim")(_extreme("reduce_max", "argmax"))
maps("min.dim")(_extreme("reduce_min", "argmin"))


@maps("aminmax.default")
def aminmax(ctx: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> list[Value]:
    return [reduce(ctx, op, x, dim, keepdim) for op in ("reduce_min", "reduce_max")]


# moments


def _variance(
    ctx: Context, x: Value, dims: Any, correction: Any, keepdim: bool
) -> tuple[Value, Value]:
    """sum((x - mean)**2) / (n - correction), and the mean."""
    if not x.rank:
        x, dims, keepdim = ctx.reshape(x, (1,)), None, False
    axes = ctx.axes(x, dims)
    mean = ctx.b.reduce_mean(x, axes=axes)
    distance = ctx.b.sub(x, mean)
    square = ctx.b.mul(distance, distance)
    correction = 1 if correction is None else correction
    if correction == 0:
        variance = reduce(ctx, "reduce_mean", square, axes, keepdim)
    else:
        count = ctx.count(x, axes)
        divisor = ctx.operand(count - correction, x.dtype)
        if isinstance(count, int) and count <= correction:
            divisor = ctx.const(0, x.dtype)  # torch returns NaN without degrees of freedom
        variance = ctx.b.div(reduce(ctx, "reduce_sum", square, axes, keepdim), divisor)
    kept = [s for i, s in enumerate(mean.shape) if keepdim or i not in axes]
    return variance, ctx.reshape(mean, kept)


def _moment(result: Callable[[Context, Value, Value], Any]) -> Any:
    def mapping(
        ctx: Context, x: Value, dim: Any = None, correction: Any = None, keepdim: bool = False
    ) -> Any:
        return result(ctx, *_variance(ctx, x, dim, correction, keepdim))

    return mapping


maps("var.correction")(_moment(lambda ctx, variance, mean: variance))
maps("std.correction")(_moment(lambda ctx, variance, mean: ctx.b.sqrt(variance)))
maps("var_mean.correction")(_moment(lambda ctx, variance, mean: [variance, mean]))


@maps("var.default", "var.dim")
def var_unbiased(
    ctx: Context, x: Value, dim: Any = None, unbiased: bool = True, keepdim: bool = False
) -> Value:
    if isinstance(dim, bool):  # var.default has no axes
        dim, unbiased = None, dim
    return _variance(ctx, x, dim, int(unbiased), keepdim)[0]


@maps("linalg_vector_norm.default")
def vector_norm(
    ctx: Context, x: Value, order: float = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> Value:
    x = ctx.operand(x)
    if order == 2:
        return reduce(ctx, "reduce_l2", x, dim, keepdim)
    size = ctx.b.abs(x)
    if order == 1:
        return reduce(ctx, "reduce_sum", size, dim, keepdim)
    if math.isinf(order):
        return reduce(ctx, "reduce_max" if order > 0 else "reduce_min", size, dim, keepdim)
    if order == 0:
        return reduce(ctx, "reduce_sum", ctx.operand(ctx.b.ne(x, 0.0)), dim, keepdim)
    power = reduce(ctx, "reduce_sum", ctx.b.pow(size, float(order)), dim, keepdim)
    return ctx.b.pow(power, 1.0 / order)


@maps("_cdist_forward.default")
def cdist(ctx: Context, x: Value, y: Value, order: float, mode: Any = None) -> Value:
    """The distance between each row of x and each row of y."""
    distance = ctx.b.sub(ctx.unsqueeze(x, -2), ctx.unsqueeze(y, -3))
    return vector_norm(ctx, distance, order, -1)


# along an axis


def _running(op: str) -> Any:
    def mapping(ctx: Context, x: Value, dim: int, dtype: DType | None = None) -> Value:
        x = ctx.operand(x)
        return ctx.b.op(op, x, axis=normalize_axis(dim, x.rank)) if x.rank else x

    return mapping


maps("cumsum.default")(_running("cumsum"))
maps("cumprod.default")(_running("cumprod"))


@maps("logcumsumexp.default")
def logcumsumexp(ctx: Context, x: Value, dim: int) -> Value:
    top = ctx.b.reduce_max(x, axes=[normalize_axis(dim, x.rank)])
    total = ctx.b.cumsum(ctx.b.exp(ctx.b.sub(x, top)), axis=normalize_axis(dim, x.rank))
    return ctx.b.add(ctx.b.log(total), top)


@maps("topk.default")
def topk(
    ctx: Context, x: Value, k: Any, dim: int = -1, largest: bool = True, ordered: bool = True
) -> list[Value]:
    if not x.rank:
        return [x, ctx.const(0)]
    attrs = {"axis": normalize_axis(dim, x.rank), "largest": largest, "sorted": ordered}
    if ctx.usable([k], x):
        return list(ctx.b.top_k(x, k=k, **attrs))
    return list(ctx.b.top_k(x, ctx.vector([k]), **attrs))


@maps("sort.default")
def sort(ctx: Context, x: Value, dim: int = -1, descending: bool = False) -> list[Value]:
    size = x.shape[normalize_axis(dim, x.rank)] if x.rank else 1
    narrow = ctx.cast(x, u8) if x.dtype == bool_ else x
    values, places = topk(ctx, narrow, size, dim, descending)
    return [ctx.cast(values, x.dtype), places]


@maps("sort.stable")
def sort_stable(
    ctx: Context, x: Value, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> list[Value]:
    return sort(ctx, x, dim, descending)


@maps("kthvalue.default")
def kthvalue(ctx: Context, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> list[Value]:
    return _ranked(ctx, x, k - 1, dim, keepdim)


@maps("median.dim")
def median(ctx: Context, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    return _ranked(ctx, x, (x.shape[normalize_axis(dim, x.rank)] - 1) // 2, dim, keepdim)


@maps("median.default")
def median_of_all(ctx: Context, x: Value) -> Value:
    flat = ctx.reshape(x, (-1,))
    return _ranked(ctx, flat, (flat.shape[0] - 1) // 2, 0, False)[0]


def _ranked(ctx: Context, x: Value, rank: Any, dim: int, keepdim: bool) -> list[Value]:
    """The element of this rank in ascending order, and its index."""
    found = []
    for ordered in sort(ctx, x, dim):
        item = ctx.slice(ordered, dim, rank, rank + 1)
        found.append(item if keepdim else ctx.squeeze(item, dim))
    return found
