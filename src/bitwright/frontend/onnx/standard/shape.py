"""Constants, shapes, and ops that rearrange elements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.fork import squeeze_all
from bitwright.frontend.onnx.runtime_axes import with_runtime_axes
from bitwright.frontend.onnx.tensor import element_type
from bitwright.ir import Size, Value, broadcast_shapes
from bitwright.ir.dim import product
from bitwright.ir.dtype import i64
from bitwright.ir.types import normalize_axis
from bitwright.ops.shape.movement import resolve_reshape
from bitwright.ops.shape.slicing import normalize_slice

_CONSTANT_FORMS = {
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_string": object,
    "value_strings": object,
}


@imports("Constant")
def constant(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    for name in ("value", "sparse_value"):
        if node.get(name) is not None:
            return ctx.b.constant(node.get(name))
    for name, element in _CONSTANT_FORMS.items():
        if node.get(name) is not None:
            return ctx.b.constant(np.array(node.get(name), element))
    raise ImportModelError("has no value", where=node.where)


@imports("ConstantOfShape")
def constant_of_shape(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    fill = ctx.b.constant(node.get("value", np.zeros(1, np.float32)).reshape(()))
    return expand_to(ctx, fill, inputs[0])


@imports("Shape")
def shape(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    start, stop, _ = slice(node.integer("start", 0), node.integer("end")).indices(x.rank)
    whole = ctx.shape_of(x)
    if (start, stop) == (0, x.rank):
        return whole
    part = x.shape[start:stop]
    return ctx.need_vector(part, x) if part else ctx.const(np.zeros(0, np.int64))


@imports("Size")
def size(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    count = product(x.shape)
    if isinstance(count, int):
        return ctx.const(count)
    if ctx.usable([count]):
        return ctx.b.sizes(values=(count,), shape=())
    return ctx.b.reduce_prod(ctx.b.shape_of(x), axes=[0], keepdims=False)


@imports("Reshape")
def reshape(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, target = inputs[0], inputs[1]
    allowzero = node.flag("allowzero")
    if target is None:
        return ctx.reshape(x, resolve_reshape(x.shape, node.require("shape"), allowzero))
    sizes = ctx.all_sizes(target)
    if sizes is None:
        ctx.length(target)
        return ctx.b.reshape(x, target, allowzero=allowzero)
    final = resolve_reshape(x.shape, sizes, allowzero)
    if ctx.usable(final, x):
        return ctx.b.reshape(x, shape=final)
    return ctx.refine(ctx.b.reshape(x, target, allowzero=allowzero), final)


@imports("Flatten")
def flatten(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    axis = node.integer("axis", 1)
    if not -x.rank <= axis <= x.rank:
        raise ImportModelError(f"axis {axis} is outside rank {x.rank}", where=node.where)
    axis = axis + x.rank if axis < 0 else axis
    return ctx.reshape(x, [product(x.shape[:axis]), product(x.shape[axis:])])


@imports("Squeeze")
def squeeze(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, axes = inputs[0], node.items("axes")
    if inputs[1] is not None:
        ones = [axis for axis, size in enumerate(x.shape) if size == 1 or not isinstance(size, int)]
        return with_runtime_axes(ctx, x, inputs[1], x.rank, Context.squeeze, among=ones)
    return squeeze_all(ctx, node) if axes is None else ctx.squeeze(x, axes)


@imports("Unsqueeze")
def unsqueeze(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, axes = inputs[0], inputs[1]
    if axes is None:
        return ctx.unsqueeze(x, node.require("axes"))
    rank = x.rank + (ctx.length(axes) if axes.rank else 1)
    return with_runtime_axes(ctx, x, axes, rank, Context.unsqueeze)


@imports("Transpose")
def transpose(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    return ctx.b.transpose(x, perm=node.items("perm", list(range(x.rank))[::-1]))


@imports("Concat")
def concat(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    axis = node.integer("axis", 1 if node.version < 4 else None)
    if axis is None:
        axis = node.require("axis")
    return ctx.b.concat(*inputs, axis=axis)


@imports("Split")
def split(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, given = inputs[0], inputs[1]
    axis = normalize_axis(node.integer("axis", 0), x.rank)
    length, parts = x.shape[axis], len(node.proto.output)
    sizes: Sequence[Size] | None = node.items("split")
    if given is not None:
        sizes = ctx.sizes(given, x)
        if sizes is None:
            return split_by(ctx, x, given, axis, parts)
    elif sizes is None and node.integer("num_outputs") is not None:
        if node.integer("num_outputs") != parts:
            raise ImportModelError(
                "num_outputs does not fit", expected=parts, found=node.integer("num_outputs")
            )
        chunk = (length + parts - 1) // parts
        sizes = [chunk] * (parts - 1) + [length - chunk * (parts - 1)]
    elif sizes is None:
        if isinstance(length, int) and length % parts:
            raise ImportModelError(
                f"{length} elements cannot be split into {parts} equal parts", where=node.where
            )
        sizes = [length // parts] * parts
    return ctx.b.node("split", [x], {"axis": axis, "sizes": tuple(sizes)}, []).outputs


def split_by(ctx: Context, x: Value, given: Value, axis: int, parts: int) -> list[Value]:
    """The parts of x, whose sizes are data; the run checks that they add up."""
    if given.rank != 1 or ctx.length(given) != parts:
        raise ImportModelError(
            "the sizes do not fit the parts", expected=f"{parts} sizes", found=given.type
        )
    b, sizes = ctx.b, ctx.cast(given, i64)
    length = ctx.slice(ctx.shape_of(x), 0, axis, axis + 1)
    # each size is compared with the length too, so that their sum cannot overflow
    inside = b.op("and", b.ge(sizes, ctx.const([0])), b.le(sizes, length))
    total = b.reduce_sum(sizes, axes=[0], keepdims=True)
    fits = b.op("and", b.eq(total, length), inside)
    holds = b.eq(b.reduce_sum(ctx.cast(fits, i64), axes=[0], keepdims=True), ctx.const([parts]))
    message = f"the sizes of its parts do not add up to axis {axis}, or one is negative"
    sizes = b.require(holds, sizes, message=message)
    stops = b.cumsum(sizes, axis=0)
    starts = b.sub(stops, sizes)
    around = [None if at == axis else size for at, size in enumerate(x.shape)]
    found = []
    for part in range(parts):
        start, stop = (ctx.slice(places, 0, part, part + 1) for places in (starts, stops))
        found.append(ctx.refine(b.slice(x, start, stop, ctx.const([axis])), around))
    return found


@imports("Slice")
def slice_(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    if node.version < 10:
        starts, stops = node.require("starts"), node.require("ends")
        axes = node.items("axes", list(range(len(starts))))
        return slice_by(ctx, x, starts, stops, axes, [1] * len(starts))
    starts_in, stops_in, axes_in, steps_in = (inputs[i] for i in range(1, 5))
    starts, stops = ctx.all_sizes(starts_in), ctx.all_sizes(stops_in)
    count = ctx.length(starts_in)
    axes = list(range(count)) if axes_in is None else _ints(ctx, axes_in)
    steps = [1] * count if steps_in is None else _ints(ctx, steps_in)
    if starts is not None and stops is not None and axes is not None and steps is not None:
        windows = _windows(x, starts, stops, axes, steps)
        if ctx.usable([size for row in windows for size in row], x):
            return _slice(ctx, x, windows, axes, steps)
    result = ctx.b.slice(x, starts_in, stops_in, axes_in, steps_in)
    if axes is None:
        return result
    touched = {normalize_axis(axis, x.rank) for axis in axes}
    return ctx.refine(result, [None if i in touched else s for i, s in enumerate(x.shape)])


def _ints(ctx: Context, value: Value) -> list[int] | None:
    array = ctx.array(value)
    return None if array is None else [int(number) for number in array.reshape(-1)]


def _windows(
    x: Value,
    starts: Sequence[Size],
    stops: Sequence[Size],
    axes: Sequence[int],
    steps: Sequence[int],
) -> list[tuple[Size, Size]]:
    lengths = [len(numbers) for numbers in (starts, stops, axes, steps)]
    if len(set(lengths)) > 1:
        raise ImportModelError(
            "starts, ends, axes and steps have different lengths", found=str(lengths)
        )
    places = [normalize_axis(axis, x.rank) for axis in axes]
    rows = zip(places, starts, stops, steps, strict=True)
    return [normalize_slice(x.shape[axis], start, stop, step) for axis, start, stop, step in rows]


def _slice(
    ctx: Context,
    x: Value,
    windows: Sequence[tuple[Size, Size]],
    axes: Sequence[int],
    steps: Sequence[int],
) -> Value:
    starts, stops = [w[0] for w in windows], [w[1] for w in windows]
    return ctx.b.slice(x, starts=starts, stops=stops, steps=steps, axes=axes)


def slice_by(
    ctx: Context,
    x: Value,
    starts: Sequence[Size],
    stops: Sequence[Size],
    axes: Sequence[int],
    steps: Sequence[int],
) -> Value:
    """Python slices with symbolic bounds."""
    return _slice(ctx, x, _windows(x, starts, stops, axes, steps), axes, steps)


@imports("Expand")
def expand(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return expand_to(ctx, *inputs)


def expand_to(ctx: Context, x: Value, target: Value) -> Value:
    """`x` broadcast with the shape in a tensor."""
    sizes = ctx.all_sizes(target)
    if sizes is None:
        ctx.length(target)
        return ctx.b.expand(x, target)
    final = broadcast_shapes(x.shape, sizes)
    if final == x.shape:
        return x
    if ctx.usable(final, x):
        return ctx.b.expand(x, shape=final)
    return ctx.refine(ctx.b.expand(x, target), final)


@imports("Tile")
def tile(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, repeats = inputs[0], inputs[1]
    if node.version < 6:
        raise UnmappedError("Tile below opset 6 takes one axis")
    sizes = ctx.sizes(repeats, x)
    if sizes is not None:
        return ctx.b.tile(x, repeats=sizes)
    ctx.length(repeats)
    return ctx.b.tile(x, repeats)


@imports("Pad")
def pad(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, given, value, axes_in = inputs[0], inputs[1], inputs[2], inputs[3]
    mode = node.text("mode", "constant")
    if node.version < 11:
        pads = node.get("pads") or node.require("paddings")
        value = ctx.like(x, node.number("value", 0.0))
    else:
        axes = None if axes_in is None else ctx.need_ints(axes_in, "the operand 'axes'")
        sizes = ctx.sizes(given, x)
        if sizes is None:
            ctx.length(given)
            if axes not in (None, list(range(x.rank))):
                given = _all_pads(ctx, x, given, axes)
            return ctx.b.pad(x, value, given, mode=mode)
        pads = _spread_pads(sizes, axes, x.rank)
    return ctx.b.pad(x, value if mode == "constant" else None, pads=tuple(pads), mode=mode)


def _spread_pads(pads: Sequence[Size], axes: Sequence[int] | None, rank: int) -> list[Size]:
    """Pads of some axes as pads of all of them."""
    if axes is None:
        return list(pads)
    spread: list[Size] = [0] * (2 * rank)
    for place, axis in enumerate(axes):
        axis = normalize_axis(axis, rank)
        spread[axis], spread[axis + rank] = pads[place], pads[place + len(axes)]
    return spread


def _all_pads(ctx: Context, x: Value, given: Value, axes: Sequence[int]) -> Value:
    rank, count = x.rank, len(axes)
    places = [2 * count] * (2 * rank)
    for place, axis in enumerate(axes):
        axis = normalize_axis(axis, rank)
        places[axis], places[axis + rank] = place, place + count
    with_zero = ctx.b.concat(given, ctx.const(np.zeros(1, np.int64)), axis=0)
    return ctx.b.gather(with_zero, ctx.const(places), axis=0)


@imports("DepthToSpace")
def depth_to_space(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, block = inputs[0], node.require("blocksize")
    batch, channels, *sizes = x.shape
    depth = channels // (block ** len(sizes))
    count = len(sizes)
    if node.text("mode", "DCR") == "DCR":
        split_shape = [batch, *[block] * count, depth, *sizes]
        blocks, channel, spatial = range(1, count + 1), count + 1, range(count + 2, 2 * count + 2)
    else:
        split_shape = [batch, depth, *[block] * count, *sizes]
        channel, blocks, spatial = 1, range(2, count + 2), range(count + 2, 2 * count + 2)
    pairs = [axis for pair in zip(spatial, blocks, strict=True) for axis in pair]
    moved = ctx.b.transpose(ctx.reshape(x, split_shape), perm=[0, channel, *pairs])
    return ctx.reshape(moved, [batch, depth, *(size * block for size in sizes)])


@imports("SpaceToDepth")
def space_to_depth(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, block = inputs[0], node.require("blocksize")
    batch, channels, *sizes = x.shape
    count = len(sizes)
    pairs = [part for size in sizes for part in (size // block, block)]
    spatial, blocks = range(2, 2 * count + 2, 2), range(3, 2 * count + 3, 2)
    order = (
        [0, *blocks, 1, *spatial]
        if node.text("mode", "DCR") == "DCR"
        else [0, 1, *blocks, *spatial]
    )
    moved = ctx.b.transpose(ctx.reshape(x, [batch, channels, *pairs]), perm=order)
    outer = [size // block for size in sizes]
    return ctx.reshape(moved, [batch, channels * block**count, *outer])


@imports("Trilu")
def trilu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, k = inputs[0], inputs[1]
    upper = node.flag("upper", 1)
    known = ctx.array(k)
    if k is None or known is not None:
        return ctx.b.trilu(x, upper=upper, k=0 if known is None else int(known.reshape(())))
    return ctx.b.trilu(x, k, upper=upper)


@imports("EyeLike")
def eye_like(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, k = inputs[0], node.integer("k", 0)
    number = node.integer("dtype")
    element = x.dtype if number is None else element_type(number, node.where)
    ones = ctx.full_like(x, 1, element)
    upper = ctx.b.trilu(ones, upper=True, k=k)
    return ctx.b.trilu(upper, upper=False, k=k)


@imports("CenterCropPad")
def center_crop_pad(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, target = inputs
    sizes = ctx.sizes(target, x)
    axes = node.items("axes", list(range(x.rank)))
    if sizes is None or not x.tensor.is_static or not all(isinstance(s, int) for s in sizes):
        raise UnmappedError("whether sizes grow or shrink is not known")
    pads: list[int] = [0] * (2 * x.rank)
    for axis, wanted in zip(axes, sizes, strict=True):
        axis = normalize_axis(axis, x.rank)
        have = x.shape[axis]
        if wanted < have:
            start = (have - wanted) // 2
            x = ctx.slice(x, axis, start, start + wanted)
        else:
            pads[axis] = (wanted - have) // 2
            pads[axis + x.rank] = wanted - have - pads[axis]
    return ctx.b.pad(x, pads=tuple(pads)) if any(pads) else x
