"""New tensors: constants and ranges; conversions between tensors and numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.frontend.torch.context import Context, Shape, maps, maps_table
from bitwright.frontend.torch.scalars import compute
from bitwright.ir.dim import Dim, product
from bitwright.ir.dtype import DType, i64
from bitwright.ir.graph import Value


@maps("full_like.default", "fill.Scalar", "fill.Tensor")
def full_like(ctx: Context, x: Value, value: Any, dtype: DType | None = None) -> Value:
    return ctx.full(value, x.shape, ctx.element)


@maps("new_full.default")
def new_full(ctx: Context, x: Value, shape: Shape, value: Any, dtype: DType | None = None) -> Value:
    return ctx.full(value, shape, ctx.element)


def _filled(value: int) -> Any:
    def of_shape(ctx: Context, shape: Shape, *_: Any, **__: Any) -> Value:
        return ctx.full(value, shape, ctx.element)

    def like(ctx: Context, x: Value, *_: Any, **__: Any) -> Value:
        return ctx.full(value, x.shape, ctx.element)

    def new(ctx: Context, x: Value, shape: Shape, *_: Any, **__: Any) -> Value:
        return ctx.full(value, shape, ctx.element)

    return of_shape, like, new


_zeros, _zeros_like, _new_zeros = _filled(0)
_ones, _ones_like, _new_ones = _filled(1)
# An empty tensor may have any elements, so zeros.
maps("zeros.default", "empty.memory_format", "empty_strided.default", "empty_permuted.default")(
    _zeros
)
maps("zeros_like.default", "empty_like.default", "zero.default")(_zeros_like)
maps("new_zeros.default", "new_empty.default", "new_empty_strided.default")(_new_zeros)
maps("ones.default")(_ones)
maps("ones_like.default")(_ones_like)
maps("new_ones.default")(_new_ones)


@maps("arange.start_step")
def arange_step(
    ctx: Context, start: Any, stop: Any, step: Any = 1, dtype: DType | None = None
) -> Value:
    numbers = (start, stop, step)
    element = ctx.element
    if all(isinstance(n, (int, float)) for n in numbers):
        return ctx.const(np.arange(*numbers), element)
    if not isinstance(step, int) or any(not isinstance(n, (int, Dim)) for n in (start, stop)):
        return ctx.b.range(*(ctx.scalar(n, element) for n in numbers))
    span = stop - start if step > 0 else start - stop
    counted = ctx.iota((span + abs(step) - 1) // abs(step), element)
    if step != 1:
        counted = ctx.b.mul(counted, ctx.const(step, element))
    return ctx.b.add(counted, ctx.scalar(start, element)) if start != 0 else counted


@maps("linspace.default")
def linspace(ctx: Context, start: Any, stop: Any, steps: Any, dtype: DType | None = None) -> Value:
    if all(isinstance(n, (int, float)) for n in (start, stop, steps)):
        return ctx.const(np.linspace(start, stop, steps), ctx.element)
    counted = ctx.iota(steps, ctx.element)
    width = ctx.b.sub(ctx.scalar(stop, ctx.element), ctx.scalar(start, ctx.element))
    last = compute(ctx, "sym_max", (compute(ctx, "sub", (steps, 1)), 1))
    step = ctx.b.div(width, ctx.scalar(last, ctx.element))
    return ctx.b.add(ctx.b.mul(counted, step), ctx.scalar(start, ctx.element))


@maps("eye.default")
def eye(ctx: Context, rows: Any, dtype: DType | None = None) -> Value:
    return eye_rectangular(ctx, rows, rows)


@maps("eye.m")
def eye_rectangular(ctx: Context, rows: Any, columns: Any, dtype: DType | None = None) -> Value:
    down, right = ctx.unsqueeze(ctx.iota(rows), 1), ctx.iota(columns)
    return ctx.cast(ctx.b.eq(down, right), ctx.element)


def _triangle_indices(name: str) -> Any:
    def mapping(ctx: Context, rows: Any, columns: Any, offset: int = 0, **_: Any) -> Value:
        rows, columns = ctx.static([rows, columns], "the shape of a triangle")
        return ctx.const(np.stack(getattr(np, name)(rows, offset, columns)), ctx.element)

    return mapping


maps("tril_indices.default")(_triangle_indices("tril_indices"))
maps("triu_indices.default")(_triangle_indices("triu_indices"))


@maps("iota.default", namespace="prims")
def iota(ctx: Context, length: Any, start: Any, step: Any, dtype: DType, **_: Any) -> Value:
    counted = ctx.b.mul(ctx.iota(length, ctx.element), ctx.scalar(step, ctx.element))
    return ctx.b.add(counted, ctx.scalar(start, ctx.element))


# between tensors and numbers


@maps("sym_stride.int")
def sym_stride(ctx: Context, x: Value, dim: int) -> Any:
    return product(x.shape[dim + 1 :] if dim >= 0 else x.shape[dim + x.rank + 1 :])


@maps("_local_scalar_dense.default", "item.default")
def item(ctx: Context, x: Value) -> Value:
    x = ctx.reshape(x, ())
    return ctx.cast(x, i64) if x.dtype.is_integer else x


maps_table(
    {
        "full.default": lambda ctx, shape, value, dtype=None: ctx.full(value, shape, ctx.element),
        "scalar_tensor.default": lambda ctx, value, dtype=None: ctx.scalar(value, ctx.element),
        "arange.default": lambda ctx, stop, dtype=None: arange_step(ctx, 0, stop, 1),
        "arange.start": lambda ctx, start, stop, dtype=None: arange_step(ctx, start, stop, 1),
        "sym_size.int": lambda ctx, x, dim: x.shape[dim],
        "sym_numel.default": lambda ctx, x: product(x.shape),
        "sym_storage_offset.default": lambda ctx, x: 0,
    }
)
