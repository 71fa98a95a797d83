"""Convolutions of 8-bit values with constant filters, or filters known at run time.

They use the layouts of `kernels.conv.lower_conv`: dense ones are implicit matrix products,
depthwise ones have their own kernels (`kernels.conv.lower_depthwise_int8`). Padding holds the zero
point of the image. Pixels of few channels (as in a first layer) are padded to whole groups of a dot
product with channels that change no sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.conv import lower_conv
from bitwright.backends.cpu.kernels.conv.depthwise import EXACT_TAPS
from bitwright.backends.cpu.kernels.conv.lower_depthwise_int8 import (
    Bias,
    Int8Conv,
    lower_exact_depthwise,
    lower_int8_depthwise,
)
from bitwright.backends.cpu.kernels.conv.lower_winograd import image_sizes
from bitwright.backends.cpu.kernels.conv.lower_winograd_int8 import lower_int8_winograd
from bitwright.backends.cpu.kernels.conv.pixels import WIDTH, Pixels, emit_pixels
from bitwright.backends.cpu.kernels.conv.runtime_int8 import (
    RuntimeInt8Filter,
    channels_last,
    float_taps,
)
from bitwright.backends.cpu.kernels.matmul import lower_int8 as int8_matmul
from bitwright.backends.cpu.kernels.matmul.dot.int16_dot import int16_dot
from bitwright.backends.cpu.kernels.matmul.lower_matmul import optional_inputs
from bitwright.backends.cpu.kernels.matmul.lower_reorder import (
    SplitPlan,
    permutation,
    plan_split,
    reorder_image,
)
from bitwright.backends.cpu.kernels.matmul.lower_widen import ZeroPoint, widen_image
from bitwright.backends.cpu.kernels.movement.lower_movement import pad_view
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import operand_views, require_elements, split
from bitwright.ir.dim import product
from bitwright.ir.dtype import i8
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous
from bitwright.lir.buffer import dense as dense_view
from bitwright.target import Target

Array = np.ndarray[Any, Any]
FEW_CHANNELS = 16


@lowers("integer_conv")
def lower_integer_conv(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    _, w, _, w_zero, bias = optional_inputs(anchor, 5)
    assert w is not None
    given = [None if v is None else constant_value(region.outer(v)) for v in (w, bias)]
    if given[0] is None or (bias is not None and given[1] is None):
        if w_zero is not None or w.dtype != i8:
            raise NoKernelError("its filters are known at run time and have zero points")
        shown = np.broadcast_to(np.int8(0), w.shape)
        held = None if bias is None else ctx.contiguous(region.outer(bias))
        _lower_runtime(ctx, node, _conv_of(ctx, node, region, shown), region.outer(w), held)
        return
    array = int8_matmul.constant_of(region, w, "weight")
    assert array is not None
    known_bias = int8_matmul.constant_of(region, bias, "bias")
    conv = _conv_of(ctx, node, region, array, known_bias)
    if conv.is_depthwise:
        lower_int8_depthwise(ctx, node, conv)
    elif int16_dot(ctx.target, 1) is None or not lower_int8_winograd(ctx, node, conv):
        _lower_dense(ctx, node, conv)


def _conv_of(
    ctx: Lowering, node: Node, region: RegionView, array: Array, known_bias: Array | None = None
) -> Int8Conv:
    anchor = region.anchor
    assert anchor is not None
    x, _, x_zero, w_zero, _ = optional_inputs(anchor, 5)
    assert x is not None
    if x.rank not in (3, 4):
        raise NoKernelError("it has more than two spatial axes")
    after = split(region).after
    require_elements(after.dtype)
    zeros = int8_matmul.constant_of(region, w_zero, "weight's zero point")
    window, filters = lower_conv.window_of(anchor, array)
    assert isinstance(filters, np.ndarray)
    zero = int8_matmul.zero_point_of(ctx, region, x_zero)
    if zero.view is not None:
        zero = ZeroPoint(
            0, replace(zero.view, shape=(1,), strides=(0,))
        )  # one zero point for all pixels
    fill = zero.view or ctx.constant(np.array([zero.number], x.dtype.numpy), f"{node.name}.zero")
    count = len(filters)
    extra = operand_views(ctx, region, after.inputs, node.outputs[0].shape)
    return Int8Conv(
        region.outer(lower_conv.required_input(anchor, 0)),
        filters,
        None if zeros is None else np.broadcast_to(zeros.reshape(-1), (count,)),
        np.zeros(count, np.int64) if known_bias is None else known_bias.astype(np.int64),
        zero,
        fill,
        window,
        anchor.attrs["groups"],
        after,
        [lower_conv.as_4d(view) for view in extra],
        lower_conv.result_of(ctx, node),
        ctx.target.lanes(32),
    )


def _lower_dense(ctx: Lowering, node: Node, conv: Int8Conv) -> None:
    """Calls a product for every group, or for the groups that fill a vector of columns."""
    conv = _merge_groups(conv)
    signed, zeros, groups = conv.x.dtype.is_signed, conv.filter_zeros, conv.groups
    filters = conv.filters
    if groups == 1 and filters.shape[1] < FEW_CHANNELS:
        filters = _pad_channels(filters, zeros, int8_matmul.Int8Filter(signed), ctx.target)
    plan = _split_plan(ctx, conv, filters) if groups == 1 else None
    wide = plan is None and int16_dot(ctx.target, 1) is not None
    if plan is not None and plan.order is not None:
        filters = filters[:, permutation(plan.order, filters.shape[1])]
    source = _source_of(ctx, node, conv, filters, plan, wide)
    inner, outer = filters.shape[1], len(filters) // groups
    for first in range(0, len(filters), outer):
        these = slice(first, first + outer)
        columns = filters[these].transpose(1, 2, 3, 0)
        weight = (int8_matmul.Weight.widened if wide else int8_matmul.Weight.of)(
            columns, None if zeros is None else zeros[these]
        )
        zero = ZeroPoint(0, None) if wide else conv.zero
        filter = int8_matmul.Int8Filter(signed, weight.zero, plan=plan)
        run = lower_conv.run_of(conv.window, source, inner, filters.shape[3])
        lines = filters[0].size // run
        if plan is None:
            filter = replace(filter, use_amx=filter.amx_is_faster(ctx.target, run, lines, outer))
        shift = filter.dot(ctx.target, run).shift
        offsets = int8_matmul.Offsets(ctx, node.name, weight, shift, zero, conv.bias[these])
        filter = replace(filter, offset=offsets.constant)
        views = [view.slice(1, first, outer, 1) for view in conv.extra]
        part = conv.y.slice(1, first, outer, 1)
        finish = lower_conv.ConvEpilogue(conv.after, views, part, conv.lanes, offsets)
        rows = source.slice(1, first // outer * inner, inner, 1)
        ready = weight.qvalues.transpose(3, 0, 1, 2)
        lower_conv.dense(ctx, node, rows, ready, conv.window, part, finish, filter)


def _lower_runtime(ctx: Lowering, node: Node, conv: Int8Conv, w: Value, bias: View | None) -> None:
    """Packs filters that are known at run time, then calls a product for every group.

    `conv.filters` only has their shape.
    """
    weight = lower_conv.as_4d(ctx.view(w))
    if conv.is_depthwise:
        if conv.filters[0].size > EXACT_TAPS:
            raise NoKernelError("its filter has too many taps for exact sums in f32")
        lower_exact_depthwise(ctx, node, conv, float_taps(ctx, node, weight), Bias(bias))
        return
    filter = RuntimeInt8Filter(conv.x.dtype.is_signed, x_zero=conv.fill)
    filters = conv.filters
    if conv.groups == 1 and filters.shape[1] < FEW_CHANNELS:
        filters = _pad_channels(filters, None, filter, ctx.target)
    source = _source(ctx, node, conv, filters)
    inner, outer = filters.shape[1], len(filters) // conv.groups
    weight = channels_last(ctx, node, weight, inner)
    for first in range(0, len(filters), outer):
        this = replace(
            filter,
            offset=ctx.scratch(f"{node.name}.offset", "i32", outer),
            bias=None if bias is None else bias.slice(0, first, outer, 1),
        )
        views = [view.slice(1, first, outer, 1) for view in conv.extra]
        part = conv.y.slice(1, first, outer, 1)
        finish = lower_conv.ConvEpilogue(conv.after, views, part, conv.lanes)
        rows = source.slice(1, first // outer * inner, inner, 1)
        own = weight.slice(0, first, outer, 1)
        lower_conv.dense(ctx, node, rows, own, conv.window, part, finish, this)


def _merge_groups(conv: Int8Conv) -> Int8Conv:
    """Merges groups of few columns. A column has weights of 0 for the channels of other groups,
    which takes no more products than an incomplete vector per group."""
    outer, inner = len(conv.filters) // conv.groups, conv.filters.shape[1]
    divisors = (m for m in range(2, conv.groups + 1) if conv.groups % m == 0)
    together = max((m for m in divisors if m * outer <= conv.lanes), default=1)
    if together == 1:
        return conv
    neutral = np.zeros(len(conv.filters), conv.filters.dtype)
    if conv.filter_zeros is not None:
        neutral = conv.filter_zeros.astype(conv.filters.dtype)
    filters = np.empty((len(neutral), together * inner, *conv.filters.shape[2:]), neutral.dtype)
    filters[:] = neutral.reshape(-1, 1, 1, 1)
    for number, array in enumerate(conv.filters):
        first = number // outer % together * inner
        filters[number, first : first + inner] = array
    return replace(conv, filters=filters, groups=conv.groups // together)


def _split_plan(ctx: Lowering, conv: Int8Conv, filters: Array) -> SplitPlan | None:
    """The split of the filters for 8-bit products; None where those are not used."""
    weight = int8_matmul.Weight.of(filters.transpose(2, 3, 1, 0), conv.filter_zeros)
    if weight.zero is not None:
        return None
    height, width, channels, columns = weight.qvalues.shape
    taps = weight.qvalues.reshape(-1, channels, columns)
    is_line = conv.window.dilations[1] == 1
    counts = (height, width)[: 1 if is_line else 2]
    run = channels * (width if is_line else 1)
    levels = tuple(n for n in counts if n > 1)
    return plan_split(ctx.target, taps, run, levels, conv.window.is_padded)


def _source_of(
    ctx: Lowering, node: Node, conv: Int8Conv, filters: Array, plan: SplitPlan | None, wide: bool
) -> View:
    """The image in the layout and type that its product reads."""
    if wide:
        return _wide_source(ctx, node, conv, filters)
    if plan is None:
        return _source(ctx, node, conv, filters)
    begins, ends, image = conv.window.begins, conv.window.ends, lower_conv.image_of(ctx, conv.x)
    channels, _, width = filters.shape[1:]
    is_new = conv.window.is_padded or channels != image.shape[1]
    has_runs = is_new or width == 1 or image.strides[3] == channels
    if plan.order is None and not conv.x.dtype.is_signed and has_runs:
        return _source(ctx, node, conv, filters)
    if channels != image.shape[1]:
        image, begins, ends = _source(ctx, node, conv, filters), (0, 0), (0, 0)
    return reorder_image(ctx, node, image, (begins, ends), conv.fill, plan.order)


def _wide_source(ctx: Lowering, node: Node, conv: Int8Conv, filters: Array) -> View:
    """The image widened to 16 bits and padded with zeros."""
    window, image = conv.window, lower_conv.image_of(ctx, conv.x)
    begins, ends = window.begins, window.ends
    if conv.groups * filters.shape[1] != image.shape[1]:
        image = _source(ctx, node, conv, filters)
        begins = ends = (0, 0)
    return widen_image(ctx, node, image, begins, ends, conv.zero)


def _source(ctx: Lowering, node: Node, conv: Int8Conv, filters: Array) -> View:
    """The channels-last image with padding, and as many channels as the filters."""
    channels = filters.shape[1]
    planes = lower_conv.as_4d(ctx.view(conv.x))
    if conv.groups == 1 and channels == WIDTH and (planes.shape[1] != WIDTH or _is_planar(planes)):
        found = _few_channels(ctx, node, planes, conv.window, conv.fill)
        if found is not None:
            return found
    if conv.groups == 1 and channels != planes.shape[1] and planes.strides[3] == 1:
        return _interleave(ctx, node, planes, channels, conv.window, conv.fill)
    image = lower_conv.image_of(ctx, conv.x)
    return lower_conv.padded(ctx, node, image, conv.window, conv.fill, conv.groups * channels)


def _is_planar(planes: View) -> bool:
    """Whether the lines of a channel are contiguous."""
    return planes.strides[3] == 1 and planes.shape[3] != 1


def _few_channels(
    ctx: Lowering, node: Node, planes: View, window: lower_conv.Window, fill: View
) -> View | None:
    """Pixels of four channels, missing ones filled like the padding; None for unsupported
    strides."""
    n, channels, h, w = planes.shape
    is_planar = _is_planar(planes)
    if not isinstance(channels, int):
        return None
    if not is_planar and planes.strides[1:] != (1, w * channels, channels):
        return None
    (top, left), (bottom, right) = window.begins, window.ends
    shape = (n, WIDTH, h + top + bottom, w + left + right)
    buffer = ctx.buffer(f"{node.name}.pixels", planes.dtype, product(shape))
    pixels = Pixels(channels, is_planar)
    kernel = ctx.kernel("pad_nhwc4", pixels, lambda m, name: emit_pixels(m, name, pixels))
    found = dense_view(buffer, shape, lower_conv.CHANNELS_LAST)
    sizes = image_sizes(planes, found, window)
    sizes |= {f"x_{k}": planes.strides[a] for k, a in (("image", 0), ("line", 2), ("channel", 1))}
    pointers = {"x": planes, "y": found, "fill": fill}
    ctx.call(kernel, node, pointers, sizes, why="channels last, padded to four channels")
    return found


def _pad_channels(
    array: Array, zero: Array | None, filter: int8_matmul.Int8Filter, target: Target
) -> Array:
    """Filters padded with channels that change no sum, so that a pixel is a multiple of the group.

    The image is padded with as many channels, which hold its zero point.
    """
    filters, channels, *taps = array.shape
    more = -channels % filter.dot(target, 1).group
    neutral = np.zeros(filters, array.dtype) if zero is None else zero.astype(array.dtype)
    shape = (filters, more, *taps)
    added = np.broadcast_to(neutral.reshape(-1, *(1,) * (array.ndim - 1)), shape)
    return np.concatenate([array, added], axis=1)


def _interleave(
    ctx: Lowering, node: Node, planes: View, channels: int, window: lower_conv.Window, fill: View
) -> View:
    """A planar image padded to `channels` channels, then transposed to channels last."""
    n, _, h, w = planes.shape
    top, left = window.begins
    shape = (n, channels, h + top + window.ends[0], w + left + window.ends[1])
    count = product(shape)
    planar = contiguous(ctx.buffer(f"{node.name}.padded", planes.dtype, count), shape)
    pad_view(ctx, node, planes, planar, (0, 0, top, left), fills=fill)
    interleaved = dense_view(
        ctx.buffer(f"{node.name}.pixels", planes.dtype, count), shape, lower_conv.CHANNELS_LAST
    )
    ctx.copy(planar, interleaved, node.name)
    return interleaved
