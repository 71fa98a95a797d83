"""Transposed convolutions as plain ones, one for every phase of the result.

    y[o] = Σ_(i, u: i·s + u − p = o) x[i] w[u]

With o + p = s·q + r only the taps u = r + s·t contribute to o, and they read x[q − t]. Results with
the same remainder r of o + p are a convolution of x with stride 1 and the flipped taps r, r + s, ….
Each phase writes every s-th pixel of every s-th line, and no product with a zero is computed,
unless the stride exceeds the filter. With stride 1 there is one phase, a plain convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.backends.cpu.kernels.conv import lower_conv
from bitwright.backends.cpu.kernels.conv.weights import (
    Weight,
    exchanged,
    flipped,
    part,
    sizes_of,
    weight_of,
)
from bitwright.backends.cpu.kernels.matmul.filters import filter_of, has_filter
from bitwright.backends.cpu.kernels.matmul.lower_batched import lower_transposed_im2col
from bitwright.backends.cpu.kernels.matmul.register_tile import best_tile
from bitwright.backends.cpu.kernels.movement.lower_movement import pad_view
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import Part, operand_views, split
from bitwright.ir.dim import Size, max_size
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, contiguous

MOST_CALLS = 4096
"""The most kernel calls, each of which is a step of the schedule."""


@dataclass(frozen=True)
class _Phase:
    """The results along one axis that the same taps contribute to."""

    rest: int
    stride: int
    taps: int
    first: int
    """The first result."""
    count: Size
    begin: int
    """The start of the first window in x; negative in the padding."""

    @property
    def end(self) -> Size:
        """The end of the last window in x."""
        return self.begin + self.count + (self.taps - 1)

    def results(self, view: View, axis: int) -> View:
        return view.slice(axis, self.first, self.count, self.stride)

    def windows(self, source: View, axis: int, before: Size) -> View:
        return source.slice(axis, self.begin + before, self.count + (self.taps - 1), 1)


def _phases(stride: int, pad: int, taps: int, results: Size) -> Iterator[_Phase]:
    for rest in range(stride):
        first = (rest - pad) % stride
        if isinstance(results, int) and first >= results:
            continue
        own = len(range(rest, taps, stride))
        at = (first + pad - rest) // stride
        count = (results - first + (stride - 1)) // stride
        yield _Phase(rest, stride, own, first, count, at - (own - 1))


@lowers("conv_transpose", "conv_backward_input")
def lower_conv_transpose(ctx: Lowering, node: Node, region: RegionView) -> None:
    """Lowers a transposed convolution, or the same thing, an input gradient of a convolution."""
    anchor = region.anchor
    assert anchor is not None
    x, w = (
        region.outer(lower_conv.required_input(anchor, 0)),
        region.outer(lower_conv.required_input(anchor, 1)),
    )
    after = split(region).after
    has_kernel = x.rank in (3, 4) and has_filter(x.dtype, w.dtype, after.dtype)
    weight = weight_of(ctx, w) if has_kernel else None
    if weight is None:
        lower_transposed_im2col(ctx, node, region)
        return
    window, weight = lower_conv.window_of(anchor, weight)
    groups = anchor.attrs["groups"]
    shape = node.outputs[0].shape
    plain = _as_plain(window, weight, x.shape[2:], shape[2:], groups)
    if plain is None and (not _has_phases(window) or _calls(window, weight, groups) > MOST_CALLS):
        lower_transposed_im2col(ctx, node, region)
        return
    if len(anchor.inputs) > 2 and anchor.inputs[2] is not None:
        raise NoKernelError("its bias is not a separate addition")
    extra = [lower_conv.as_4d(v) for v in operand_views(ctx, region, after.inputs, shape)]
    image, y = lower_conv.image_of(ctx, x), lower_conv.result_of(ctx, node)
    if plain is not None:
        turned = flipped(weight if groups > 1 else exchanged(weight))
        lower_conv.convolve(ctx, node, image, turned, plain, y, after, extra, groups)
        return
    weight = _covering(ctx, node, weight, window)
    _, _, height, width = sizes_of(weight)
    top, left = window.begins
    assert isinstance(top, int) and isinstance(left, int)
    phases = [
        list(_phases(window.strides[i], pad, taps, y.shape[2 + i]))
        for i, (pad, taps) in enumerate(((top, height), (left, width)))
    ]
    begins = [max(0, *(-phase.begin for phase in axis)) for axis in phases]
    ends = [_beyond(axis, image.shape[2 + i]) for i, axis in enumerate(phases)]
    around = lower_conv.Window((1, 1), (1, 1), (begins[0], begins[1]), (ends[0], ends[1]))
    source = lower_conv.padded(ctx, node, image, around)
    for down in phases[0]:
        for right in phases[1]:
            taps = part(weight, 2, down.rest, down.taps, down.stride)
            taps = flipped(part(taps, 3, right.rest, right.taps, right.stride))
            parts = [right.results(down.results(v, 2), 3) for v in (y, *extra)]
            windows = right.windows(down.windows(source, 2, begins[0]), 3, begins[1])
            _phase(ctx, node, windows, taps, parts, after, groups)


def _as_plain(
    window: lower_conv.Window,
    weight: Weight,
    sizes: Sequence[Size],
    results: Sequence[Size],
    groups: int,
) -> lower_conv.Window | None:
    """The geometry of the one plain convolution that computes it, if there is one: the stride is 1,
    the padding does not exceed the filter, and channels are not in groups of several."""
    if window.strides != (1, 1) or (groups > 1 and not _is_depthwise(weight, groups)):
        return None
    sizes, results = ((1,) * (2 - len(s)) + tuple(s) for s in (sizes, results))
    begins: list[Size] = []
    ends: list[Size] = []
    for axis in range(2):
        reach = (sizes_of(weight)[2 + axis] - 1) * window.dilations[axis]
        begins.append(reach - window.begins[axis])
        ends.append(results[axis] + reach - sizes[axis] - begins[-1])
    if not all(isinstance(pad, int) and pad >= 0 for pad in (*begins, *ends)):
        return None
    return lower_conv.Window((1, 1), window.dilations, (begins[0], begins[1]), (ends[0], ends[1]))


def _has_phases(window: lower_conv.Window) -> bool:
    """Whether the filter is not dilated, and the padding is constant."""
    return window.dilations == (1, 1) and all(isinstance(pad, int) for pad in window.begins)


def _covering(ctx: Lowering, node: Node, weight: Weight, window: lower_conv.Window) -> Weight:
    """The filter, extended by zeros where a stride exceeds it, so that each result has a tap."""
    sizes = sizes_of(weight)
    wanted = (*sizes[:2], *(max(n, s) for n, s in zip(sizes[2:], window.strides, strict=True)))
    if wanted == sizes:
        return weight
    if not isinstance(weight, View):
        return np.pad(weight, [(0, w - n) for w, n in zip(wanted, sizes, strict=True)])
    buffer = ctx.buffer(f"{node.name}.covering", weight.dtype, math.prod(wanted))
    around = contiguous(buffer, wanted)
    pad_view(ctx, node, ctx.packed(weight, f"{node.name}.weight"), around, (0, 0, 0, 0))
    return around


def _is_depthwise(weight: Weight, groups: int) -> bool:
    return groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1


def _calls(window: lower_conv.Window, weight: Weight, groups: int) -> int:
    """The number of plain convolutions: one for each phase, and for each group if not depthwise."""
    return math.prod(window.strides) * (1 if _is_depthwise(weight, groups) else groups)


def _beyond(phases: list[_Phase], size: Size) -> Size:
    """How far the windows of the phases extend beyond the end of x."""
    found: Size = 0
    for phase in phases:
        found = max_size(found, phase.end - size)
    return found


def _phase(
    ctx: Lowering,
    node: Node,
    source: View,
    weight: Weight,
    parts: list[View],
    after: Part,
    groups: int,
) -> None:
    """Lowers the plain convolution of one phase: weight[C, M / groups, …], parts = the result and
    the operands of its epilogue."""
    lanes = best_tile(ctx.target).lanes
    plain = lower_conv.Window((1, 1), (1, 1), (0, 0), (0, 0))
    channels, outer, _, _ = sizes_of(weight)
    inner = channels // groups
    if _is_depthwise(weight, groups):
        finish = lower_conv.ConvEpilogue(after, parts[1:], parts[0], lanes)
        lower_conv.depthwise(ctx, node, source, weight, plain, parts[0], finish)
        return
    for group in range(groups):
        y, *extra = (view.slice(1, group * outer, outer, 1) for view in parts)
        filters = exchanged(part(weight, 0, group * inner, inner))
        images = source.slice(1, group * inner, inner, 1)
        finish = lower_conv.ConvEpilogue(after, extra, y, lanes)
        filter = filter_of(ctx.target, source.dtype)
        lower_conv.dense(ctx, node, images, filters, plain, y, finish, filter)
