"""Transposed convolutions as plain ones, one for every phase of the result.

    y[o] = Σ_(i, u: i·s + u − p = o) x[i] w[u]

With o + p = s·q + r only the taps u = r + s·t contribute to o, and they read x[q − t]. Results with
the same remainder r of o + p are a convolution of x with stride 1 and the flipped taps r, r + s, ….
Each phase writes every s-th pixel of every s-th line, and no product with a zero is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.conv import lower_conv
from bitwright.backends.cpu.kernels.matmul.filters import filter_of, has_filter
from bitwright.backends.cpu.kernels.matmul.lower_batched import lower_transposed_im2col
from bitwright.backends.cpu.kernels.matmul.register_tile import best_tile
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import Part, operand_views, split
from bitwright.ir.dim import Size, max_size
from bitwright.ir.graph import Node, constant_value
from bitwright.lir.buffer import View

Array = np.ndarray[Any, Any]
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


@lowers("conv_transpose")
def lower_conv_transpose(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, w = (
        region.outer(lower_conv.required_input(anchor, 0)),
        region.outer(lower_conv.required_input(anchor, 1)),
    )
    weight = constant_value(w)
    after = split(region).after
    if weight is None or x.rank not in (3, 4) or not has_filter(x.dtype, w.dtype, after.dtype):
        lower_transposed_im2col(ctx, node, region)
        return
    window, weight = lower_conv.window_of(anchor, weight)
    if not _is_covered(window, weight) or _calls(window, weight, anchor) > MOST_CALLS:
        lower_transposed_im2col(ctx, node, region)
        return
    if len(anchor.inputs) > 2 and anchor.inputs[2] is not None:
        raise NoKernelError("its bias is not a separate addition")
    image, y = lower_conv.image_of(ctx, x), lower_conv.result_of(ctx, node)
    extra = [
        lower_conv.as_4d(v) for v in operand_views(ctx, region, after.inputs, node.outputs[0].shape)
    ]
    top, left = window.begins
    assert isinstance(top, int) and isinstance(left, int)
    phases = [
        list(_phases(window.strides[i], pad, weight.shape[2 + i], y.shape[2 + i]))
        for i, pad in enumerate((top, left))
    ]
    begins = [max(0, *(-phase.begin for phase in axis)) for axis in phases]
    ends = [_beyond(axis, image.shape[2 + i]) for i, axis in enumerate(phases)]
    around = lower_conv.Window((1, 1), (1, 1), (begins[0], begins[1]), (ends[0], ends[1]))
    source = lower_conv.padded(ctx, node, image, around)
    for down in phases[0]:
        for right in phases[1]:
            taps = weight[:, :, down.rest :: down.stride, right.rest :: right.stride]
            parts = [right.results(down.results(v, 2), 3) for v in (y, *extra)]
            windows = right.windows(down.windows(source, 2, begins[0]), 3, begins[1])
            flipped = taps[:, :, ::-1, ::-1]
            _phase(ctx, node, windows, flipped, parts, after, anchor.attrs["groups"])


def _is_covered(window: lower_conv.Window, weight: Array) -> bool:
    """Whether every result has a tap, the filter is not dilated, and the padding is constant."""
    known = all(isinstance(pad, int) for pad in window.begins)
    wide = all(k >= s for k, s in zip(weight.shape[2:], window.strides, strict=True))
    return known and wide and window.dilations == (1, 1)


def _calls(window: lower_conv.Window, weight: Array, anchor: Node) -> int:
    """The number of plain convolutions: one for each phase, and for each group if not depthwise."""
    groups = anchor.attrs["groups"]
    is_depthwise = groups == weight.shape[0] and weight.shape[1] == 1
    return math.prod(window.strides) * (1 if is_depthwise else groups)


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
    weight: Array,
    parts: list[View],
    after: Part,
    groups: int,
) -> None:
    """Lowers the plain convolution of one phase: weight[C, M / groups, …], parts = the result and
    the operands of its epilogue."""
    lanes = best_tile(ctx.target).lanes
    plain = lower_conv.Window((1, 1), (1, 1), (0, 0), (0, 0))
    inner, outer = weight.shape[0] // groups, weight.shape[1]
    if groups > 1 and inner == outer == 1:
        finish = lower_conv.ConvEpilogue(after, parts[1:], parts[0], lanes)
        lower_conv.depthwise(ctx, node, source, weight, plain, parts[0], finish)
        return
    for group in range(groups):
        y, *extra = (view.slice(1, group * outer, outer, 1) for view in parts)
        filters = weight[group * inner : (group + 1) * inner].transpose(1, 0, 2, 3)
        images = source.slice(1, group * inner, inner, 1)
        finish = lower_conv.ConvEpilogue(after, extra, y, lanes)
        filter = filter_of(ctx.target, source.dtype)
        lower_conv.dense(ctx, node, images, filters, plain, y, finish, filter)
