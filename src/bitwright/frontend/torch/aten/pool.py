"""Pooling: windowed, and adaptive to an output size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from bitwright.frontend.torch.context import Context, maps
from bitwright.frontend.torch.scalars import exact_quotient
from bitwright.ir.graph import Value

P = TypeVar("P", Value, list[Value])


def _batched(ctx: Context, x: Value, rank: int, pool: Callable[[Value], P]) -> P:
    """The pooled tensor, whose batch axis may be missing."""
    if x.rank == rank + 2:
        return pool(x)
    result = pool(ctx.unsqueeze(x, 0))
    if isinstance(result, list):
        return [ctx.reshape(y, y.shape[1:]) for y in result]
    return ctx.reshape(result, result.shape[1:])


def _attrs(
    ctx: Context, rank: int, kernel: Any, stride: Any, padding: Any, ceil: bool, dilation: Any = 1
) -> dict[str, Any]:
    def each(values: Any, what: str) -> list[int]:
        numbers = ctx.static(values, f"the {what} of a pool")
        return numbers * rank if len(numbers) == 1 else numbers

    return {
        "kernel": each(kernel, "window"),
        "strides": each(kernel if stride is None or stride == [] else stride, "stride"),
        "pads": each(padding, "padding") * 2,
        "dilations": each(dilation, "dilation"),
        "ceil": ceil,
    }


def _max_pool(rank: int) -> Callable[..., list[Value | None]]:
    """The maxima, and their indices where they are read."""

    def mapping(
        ctx: Context,
        x: Value,
        kernel: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil: bool = False,
    ) -> list[Value | None]:
        attrs = _attrs(ctx, rank, kernel, stride, padding, ceil, dilation)
        if 1 not in ctx.wanted:
            return [_batched(ctx, x, rank, lambda y: ctx.b.max_pool(y, **attrs)), None]
        plane = ctx.scalar(ctx.count(x, range(x.rank - rank, x.rank)))

        def pool(y: Value) -> list[Value]:
            values, places = ctx.b.max_pool_indices(y, **attrs)
            return [values, ctx.b.mod(places, plane)]  # ours are relative to the whole tensor

        return [*_batched(ctx, x, rank, pool)]

    return mapping


def _avg_pool(rank: int) -> Any:
    def mapping(
        ctx: Context,
        x: Value,
        kernel: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Value:
        attrs = _attrs(ctx, rank, kernel, stride, padding, ceil)
        attrs["count_include_pad"] = count_include_pad
        if divisor is None:
            return _batched(ctx, x, rank, lambda y: ctx.b.avg_pool(y, **attrs))
        if ceil:
            raise ctx.refuse("divisor_override with ceil_mode")
        attrs["count_include_pad"] = True
        mean = _batched(ctx, x, rank, lambda y: ctx.b.avg_pool(y, **attrs))
        return ctx.b.mul(mean, float(np.prod(attrs["kernel"])) / divisor)

    return mapping


for _rank in (1, 2, 3):
    _pool = _max_pool(_rank)
    maps(f"max_pool{_rank}d.default")(lambda *args, pool=_pool: pool(*args)[0])
    maps(f"max_pool{_rank}d_with_indices.default")(_pool)
    maps(f"avg_pool{_rank}d.default")(_avg_pool(_rank))


# adaptive


def _sizes(x: Value, output_size: Any, rank: int) -> list[Any]:
    sizes = [output_size] * rank if isinstance(output_size, int) else list(output_size)
    own = x.shape[x.rank - rank :]
    return [mine if size is None else size for size, mine in zip(sizes, own, strict=True)]


def _even_windows(ctx: Context, x: Value, sizes: list[Any]) -> list[int] | None:
    """The window of each axis, if the sizes divide those of x evenly."""
    own = x.shape[x.rank - len(sizes) :]
    exact = [exact_quotient(a, b) for a, b in zip(own, sizes, strict=True)]
    windows = [size for size in exact if isinstance(size, int) and size]
    return windows if len(windows) == len(sizes) else None


def _windows(ctx: Context, x: Value, axis: int, size: Any) -> tuple[int, list[tuple[int, int]]]:
    """The length of an axis, and the bounds of its windows, whose lengths differ."""
    length, size = ctx.static([x.shape[axis], size], "a size that adaptive pooling divides")
    return length, [(i * length // size, -(-(i + 1) * length // size)) for i in range(size)]


def _uneven_mean(ctx: Context, x: Value, axis: int, size: Any) -> Value:
    """Means over windows of unequal length along one axis, as a matrix product."""
    if size == x.shape[axis]:
        return x
    if size == 1:
        return ctx.b.reduce_mean(x, axes=[axis])
    length, windows = _windows(ctx, x, axis, size)
    weights = np.zeros((length, len(windows)))
    for i, (start, stop) in enumerate(windows):
        weights[start:stop, i] = 1 / (stop - start)
    last = ctx.move_axis(x, axis, -1)
    return ctx.move_axis(ctx.b.matmul(last, ctx.const(weights, x.dtype)), -1, axis)


def _adaptive_avg(rank: int) -> Any:
    def mapping(ctx: Context, x: Value, output_size: Any) -> Value:
        sizes = _sizes(x, output_size, rank)
        spatial = list(range(x.rank - rank, x.rank))
        if all(isinstance(size, int) and size == 1 for size in sizes):
            return ctx.b.reduce_mean(x, axes=spatial)
        if windows := _even_windows(ctx, x, sizes):
            attrs = {"kernel": windows, "strides": windows}
            return _batched(ctx, x, rank, lambda y: ctx.b.avg_pool(y, **attrs))
        for axis, size in zip(spatial, sizes, strict=True):
            x = _uneven_mean(ctx, x, axis, size)
        return x

    return mapping


def _adaptive_max(rank: int) -> Any:
    def mapping(ctx: Context, x: Value, output_size: Any) -> list[Value | None]:
        sizes = _sizes(x, output_size, rank)
        if windows := _even_windows(ctx, x, sizes):
            return _max_pool(rank)(ctx, x, windows)
        if 1 in ctx.wanted:
            raise ctx.refuse("the indices of maxima in windows of unequal size")
        for axis, size in zip(range(x.rank - rank, x.rank), sizes, strict=True):
            x = _uneven_max(ctx, x, axis, size)
        return [x, None]

    return mapping


def _uneven_max(ctx: Context, x: Value, axis: int, size: Any) -> Value:
    """Maxima over windows of unequal length; shorter windows repeat their last element."""
    if size == x.shape[axis]:
        return x
    if size == 1:
        return ctx.b.reduce_max(x, axes=[axis])
    _, windows = _windows(ctx, x, axis, size)
    widest = max(stop - start for start, stop in windows)
    places = [[min(start + j, stop - 1) for j in range(widest)] for start, stop in windows]
    elements = ctx.b.gather(x, ctx.const(places), axis=axis)
    return ctx.b.reduce_max(elements, axes=[axis + 1], keepdims=False)


for _rank in (1, 2, 3):
    maps(f"adaptive_avg_pool{_rank}d.default", f"_adaptive_avg_pool{_rank}d.default")(
        _adaptive_avg(_rank)
    )
    maps(f"adaptive_max_pool{_rank}d.default")(_adaptive_max(_rank))
