"""Ops that rearrange elements: views, concatenation, slices and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.frontend.torch.context import Context, Shape, maps, maps_table
from bitwright.frontend.torch.scalars import compute
from bitwright.ir.graph import Value
from bitwright.ir.types import normalize_axis

_LAST = 2**63 - 1
_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


@maps("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default")
def view(ctx: Context, x: Value, shape: Shape) -> Value:
    return ctx.reshape(x, shape)


@maps("view.dtype")
def view_dtype(ctx: Context, x: Value, dtype: Any) -> Value:
    if dtype == x.dtype:
        return x
    raise ctx.refuse(f"it reads the bits of {x.dtype} as {dtype}")


@maps("expand.default")
def expand(ctx: Context, x: Value, shape: Shape, implicit: bool = False) -> Value:
    front = len(shape) - x.rank
    final = [
        x.shape[i - front] if isinstance(size, int) and size == -1 else size
        for i, size in enumerate(shape)
    ]
    return ctx.expand(x, final)


@maps("transpose.int")
def transpose(ctx: Context, x: Value, first: int, second: int) -> Value:
    if not x.rank:
        return x
    order = list(range(x.rank))
    order[first], order[second] = order[second], order[first]
    return ctx.transpose(x, order)


@maps("squeeze.dim", "squeeze.dims")
def squeeze_dims(ctx: Context, x: Value, dims: Any) -> Value:
    return ctx.squeeze(x, *([dims] if isinstance(dims, int) else dims))


@maps("cat.default")
def cat(ctx: Context, xs: list[Value], dim: int = 0) -> Value:
    parts = [ctx.operand(x) for x in xs if x.shape != (0,) or all(y.rank == 1 for y in xs)]
    axis = normalize_axis(dim, parts[0].rank)
    return parts[0] if len(parts) == 1 else ctx.b.concat(*parts, axis=axis)


@maps("stack.default")
def stack(ctx: Context, xs: list[Value], dim: int = 0) -> Value:
    axis = normalize_axis(dim, xs[0].rank + 1)
    return ctx.b.concat(*(ctx.unsqueeze(ctx.operand(x), axis) for x in xs), axis=axis)


# parts


@maps("slice.Tensor")
def slice_(
    ctx: Context, x: Value, dim: int = 0, start: Any = None, stop: Any = None, step: Any = 1
) -> Value:
    (step,) = ctx.static(step, "the step of a slice")
    return ctx.slice(x, dim, 0 if start is None else start, _LAST if stop is None else stop, step)


@maps("select.int")
def select(ctx: Context, x: Value, dim: int, index: Any) -> Value:
    axis = normalize_axis(dim, x.rank)
    return ctx.b.gather(x, ctx.scalar(index), axis=axis)


@maps("narrow.default")
def narrow(ctx: Context, x: Value, dim: int, start: Any, length: Any) -> Value:
    return ctx.slice(x, dim, start, compute(ctx, "add", (start, length)))


@maps("split_with_sizes.default", "split_with_sizes_copy.default")
def split_with_sizes(ctx: Context, x: Value, sizes: Shape, dim: int = 0) -> list[Value]:
    axis = normalize_axis(dim, x.rank)
    if ctx.usable(sizes, x):
        return list(ctx.b.node("split", [x], {"axis": axis, "sizes": tuple(sizes)}, []).outputs)
    parts, start = [], 0
    for size in sizes:
        stop = compute(ctx, "add", (start, size))
        parts.append(ctx.slice(x, axis, start, stop))
        start = stop
    return parts


@maps("split.Tensor")
def split(ctx: Context, x: Value, size: Any, dim: int = 0) -> list[Value]:
    count = len(ctx.results)
    total = x.shape[normalize_axis(dim, x.rank)]
    sizes = [size] * (count - 1)
    return split_with_sizes(ctx, x, [*sizes, total - sum(sizes)], dim)


@maps("unbind.int")
def unbind(ctx: Context, x: Value, dim: int = 0) -> list[Value]:
    (count,) = ctx.static(x.shape[normalize_axis(dim, x.rank)], "the number of parts")
    return [ctx.take(x, normalize_axis(dim, x.rank), i) for i in range(count)]


@maps("flip.default")
def flip(ctx: Context, x: Value, dims: list[int]) -> Value:
    for axis in ctx.axes(x, dims) if dims else ():
        x = ctx.slice(x, axis, -1, -_LAST, -1)
    return x


@maps("roll.default")
def roll(ctx: Context, x: Value, shifts: list[Any], dims: Sequence[int] = ()) -> Value:
    if not dims:
        return ctx.reshape(roll(ctx, ctx.reshape(x, (-1,)), shifts, [0]), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = normalize_axis(dim, x.rank)
        size = x.shape[axis]
        if size == 0:
            continue
        cut = size - compute(ctx, "mod", (shift, size))  # the part that moves to the front
        parts = (ctx.slice(x, axis, cut, size), ctx.slice(x, axis, 0, cut))
        x = ctx.b.concat(*parts, axis=axis)
    return x


@maps("unfold.default")
def unfold(ctx: Context, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows along one axis; their elements are a new last axis."""
    if not x.rank:
        return ctx.slice(ctx.reshape(x, (1,)), 0, 0, size)
    axis = normalize_axis(dim, x.rank)
    count = (x.shape[axis] - size) // step + 1
    starts = ctx.unsqueeze(ctx.b.mul(ctx.iota(count), step), 1)
    windows = ctx.b.gather(x, ctx.b.add(starts, ctx.iota(size)), axis=axis)
    return ctx.move_axis(windows, axis + 1, -1)


def diagonal_indices(
    ctx: Context, x: Value, offset: int, dim1: int, dim2: int
) -> tuple[Value, list[int], Value]:
    """x with its two matrix axes merged into the last axis, the order of axes before that, and the
    indices of the diagonal on the merged axis."""
    first, second = normalize_axis(dim1, x.rank), normalize_axis(dim2, x.rank)
    rest = [axis for axis in range(x.rank) if axis not in (first, second)]
    order = [*rest, first, second]
    x = ctx.transpose(x, order)
    *outer, rows, columns = x.shape
    down, right = max(-offset, 0), max(offset, 0)
    length = compute(ctx, "sym_min", (rows - down, columns - right))
    step = ctx.b.mul(ctx.iota(length), ctx.scalar(columns + 1))
    places = ctx.b.add(step, ctx.scalar(down * columns + right))
    return ctx.reshape(x, [*outer, rows * columns]), order, places


@maps("diagonal.default")
def diagonal(ctx: Context, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    flat, _, places = diagonal_indices(ctx, x, offset, dim1, dim2)
    return ctx.b.gather(flat, places, axis=flat.rank - 1)


# repetition and padding


@maps("repeat.default", "tile.default")
def repeat(ctx: Context, x: Value, repeats: Shape) -> Value:
    repeats = [*[1] * (x.rank - len(repeats)), *repeats]
    x = ctx.unsqueeze(x, *range(len(repeats) - x.rank))
    if ctx.usable(repeats, x):
        return ctx.b.tile(x, repeats=tuple(repeats))
    return ctx.b.tile(x, ctx.vector(repeats))


@maps("repeat_interleave.self_int")
def repeat_interleave(
    ctx: Context, x: Value, repeats: Any, dim: int | None = None, output_size: Any = None
) -> Value:
    if dim is None:
        x, dim = ctx.reshape(x, (-1,)), 0
    axis = normalize_axis(dim, x.rank)
    before, size, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    wide = ctx.expand(ctx.unsqueeze(x, axis + 1), [*before, size, repeats, *after])
    return ctx.reshape(wide, [*before, compute(ctx, "mul", (size, repeats)), *after])


def _pad(ctx: Context, x: Value, pads: Shape, mode: str, value: Any = None) -> Value:
    """Torch lists (before, after) from the last axis to the first."""
    befores, afters = list(pads[0::2])[::-1], list(pads[1::2])[::-1]
    free = [0] * (x.rank - len(befores))
    spread = [*free, *befores, *free, *afters]
    fill = None if mode != "constant" or not value else ctx.operand(value)
    if ctx.usable(spread, x):
        return ctx.b.pad(x, fill, pads=tuple(spread), mode=mode)
    return ctx.b.pad(x, fill, ctx.vector(spread), mode=mode)


@maps("constant_pad_nd.default")
def constant_pad(ctx: Context, x: Value, pads: Shape, value: Any = 0) -> Value:
    return _pad(ctx, x, pads, "constant", value)


@maps("pad.default")
def pad(
    ctx: Context, x: Value, pads: Shape, mode: str = "constant", value: float | None = None
) -> Value:
    return _pad(ctx, x, pads, _PAD_MODES[mode], value)


for _rank in (1, 2, 3):
    for _kind, _mode in (("reflection", "reflect"), ("replication", "edge")):
        maps(f"{_kind}_pad{_rank}d.default")(
            lambda ctx, x, pads, mode=_mode: _pad(ctx, x, pads, mode)
        )


maps_table(
    {
        "permute.default": lambda ctx, x, dims: ctx.transpose(x, dims),
        "t.default": lambda ctx, x: ctx.transpose(x, range(x.rank)[::-1]),
        "unsqueeze.default": lambda ctx, x, dim: ctx.unsqueeze(x, dim),
        "squeeze.default": lambda ctx, x: ctx.squeeze(x, *range(x.rank)),
        "tril.default": lambda ctx, x, diagonal=0: ctx.b.trilu(x, upper=False, k=diagonal),
        "triu.default": lambda ctx, x, diagonal=0: ctx.b.trilu(x, upper=True, k=diagonal),
    }
)
