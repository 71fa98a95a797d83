"""Convolutions, with channels innermost in memory.

A value of shape [N, C, H, W] is held in the order N, H, W, C: a filter's line then reads one run of
width · channels numbers, and a pixel's result channels are neighbours. Dense convolutions are
products (`kernels.conv.conv`) of rows that lie in the image, or take fewer products where that pays
(`kernels.conv.lower_winograd`); depthwise ones have a kernel of their own, grouped ones are a product per group.
Padding is laid around the image first where the kernel does not see to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bitwright.backends.cpu.codegen import emit
from bitwright.backends.cpu.kernels.conv.conv import Conv, emit_conv
from bitwright.backends.cpu.kernels.conv.depthwise import (
    Depthwise,
    DepthwiseForm,
    emit_depthwise,
    pixels_of_tile,
)
from bitwright.backends.cpu.kernels.conv.lower_winograd import Choice, call_winograd, choose
from bitwright.backends.cpu.kernels.matmul.filters import Filter, filter_of, has_filter
from bitwright.backends.cpu.kernels.matmul.lower_batched import lower_windows
from bitwright.backends.cpu.kernels.matmul.matmul import (
    Epilogue,
    best_tile,
    is_light,
    row_tiles_in_cache,
)
from bitwright.backends.cpu.kernels.matmul.upcast_product import tiles_in_room, whole_way
from bitwright.backends.cpu.kernels.movement.lower_movement import pad_view
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import PIXELS
from bitwright.backends.cpu.lowering.region import (
    Part,
    Reads,
    collapse_rows,
    operand_views,
    split,
)
from bitwright.ir.dim import Size, max_size, product
from bitwright.ir.dtype import DType, f32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous
from bitwright.target import Target

Array = np.ndarray[Any, Any]
CHANNELS_LAST = (0, 2, 3, 1)


@dataclass(frozen=True)
class Window:
    """The geometry of a 2-D convolution."""

    strides: tuple[int, int]
    dilations: tuple[int, int]
    begins: tuple[Size, Size]
    ends: tuple[Size, Size]

    @property
    def is_padded(self) -> bool:
        return any(pad != 0 for pad in (*self.begins, *self.ends))

    @property
    def transposed(self) -> Window:
        """The same for an image whose lines are columns."""
        pairs = (self.strides, self.dilations, self.begins, self.ends)
        return Window(*((b, a) for a, b in pairs))  # type: ignore[arg-type]


@lowers("conv")
def lower_conv(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, w = region.outer(present(anchor, 0)), region.outer(present(anchor, 1))
    weight = constant_value(w)
    after = split(region).after
    if weight is None or x.rank not in (3, 4) or not has_filter(x.dtype, w.dtype, after.dtype):
        lower_windows(ctx, node, region)
        return
    window, weight = window_of(anchor, weight)
    if len(anchor.inputs) > 2 and anchor.inputs[2] is not None:
        raise NoKernelError("its bias is not an addition of its own")
    image = image_of(ctx, x)
    y = result_of(ctx, node)
    extra = [four_axes(v) for v in operand_views(ctx, region, after.inputs, node.outputs[0].shape)]
    lanes = best_tile(ctx.target).lanes
    groups = anchor.attrs["groups"]
    if groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1:
        finish = Finish(after, extra, y, lanes)
        depthwise(ctx, node, image, weight, window, y, finish)
        return
    choice = choose(ctx.target, weight, window, y) if groups == 1 else Choice(0, "")
    filter = filter_of(ctx.target, x.dtype, rows=product((y.shape[0], *y.shape[2:])))
    if choice.results and filter.products_at_once > 1:
        choice = Choice(0, "an instruction multiplies pairs")
    if choice.results:
        finish = Finish(after, extra, y, lanes)
        call_winograd(ctx, node, image, weight, window, y, finish, choice)
        return
    source = padded(ctx, node, image, window)
    inner, outer = weight.shape[1], weight.shape[0] // groups
    for group in range(groups):
        first = group * outer
        part = y.slice(1, first, outer, 1)
        finish = Finish(after, [v.slice(1, first, outer, 1) for v in extra], part, lanes)
        window_in = source.slice(1, group * inner, inner, 1)
        filters = weight[first : first + outer]
        dense(ctx, node, window_in, filters, window, part, finish, filter, choice.why)


def present(anchor: Node, position: int) -> Value:
    value = anchor.inputs[position]
    assert value is not None
    return value


def window_of(anchor: Node, weight: Array) -> tuple[Window, Array]:
    """The geometry; a 1-D convolution is one line of a 2-D one."""
    rank = weight.ndim - 2
    attrs = anchor.attrs
    strides = attrs.get("strides") or (1,) * rank
    dilations = attrs.get("dilations") or (1,) * rank
    pads = attrs.get("pads") or (0,) * (2 * rank)
    if rank == 2:
        return Window(tuple(strides), tuple(dilations), tuple(pads[:2]), tuple(pads[2:])), weight
    return (
        Window((1, strides[0]), (1, dilations[0]), (0, pads[0]), (0, pads[1])),
        weight[:, :, None],
    )


def four_axes(view: View) -> View:
    """[N, C, W] as [N, C, 1, W]."""
    if len(view.shape) == 4:
        return view
    (n, c, w), (sn, sc, sw) = view.shape, view.strides
    return View(view.buffer, view.offset, (n, c, 1, w), (sn, sc, sw, sw))


def _order(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def image_of(ctx: Lowering, x: Value) -> View:
    """The input with channels innermost."""
    view = ctx.view(x)
    if view.strides[1] == 1 and view.shape[1] != 1:
        return four_axes(view)  # any strides outside the channels are fine
    return four_axes(ctx.ordered(x, _order(x.rank)))


def result_of(ctx: Lowering, node: Node) -> View:
    value = node.outputs[0]
    return four_axes(ctx.output(value, _order(value.rank)))


def padded(
    ctx: Lowering,
    node: Node,
    image: View,
    window: Window,
    fill: View | None = None,
    channels: int | None = None,
) -> View:
    """The image with zeros (or what `fill` holds) around it, channels innermost; `channels` asks
    for as many, behind those that it has."""
    n, c, h, w = image.shape
    if not window.is_padded and channels in (None, c):
        return image
    c = c if channels is None else channels
    top, left = window.begins
    shape = (n, h + top + window.ends[0], w + left + window.ends[1], c)
    room = ctx.buffer(f"{node.name}.padded", image.dtype, n * shape[1] * shape[2] * c)
    around = contiguous(room, shape)
    begins = (0, top, left, 0)
    pad_view(ctx, node, image.transpose(CHANNELS_LAST), around, begins, fills=fill)
    return around.transpose((0, 3, 1, 2))


class Enters(Protocol):
    """What happens to a sum before the nodes behind the convolution see it."""

    @property
    def key(self) -> object:
        """All that shapes the code."""

    @property
    def pointers(self) -> dict[str, View]: ...

    @property
    def sizes(self) -> dict[str, Size]: ...

    def emit(self, f: emit.Kernel, value: Any, row: Any, column: Any, mask: Any) -> Any: ...


class Finish:
    """The epilogue of a convolution: operands by pixel and channel."""

    def __init__(
        self,
        after: Part,
        views: list[View],
        y: View,
        lanes: int,
        enters: Enters | None = None,
    ) -> None:
        self.after, self.lanes, self.enters = after, lanes, enters
        rows = collapse_rows([v.transpose(CHANNELS_LAST) for v in (*views, y)])
        self.reads = Reads("e", rows[:-1])
        self.outer = rows[-1].shape[1:-1] if views else ()
        self.key = after.expression, self.reads.key, len(self.outer), enters and enters.key

    @property
    def pointers(self) -> dict[str, View]:
        return {**self.reads.pointers, **(self.enters.pointers if self.enters else {})}

    @property
    def sizes(self) -> dict[str, Size]:
        inner = {f"outer{axis}": size for axis, size in enumerate(self.outer)}
        return {**self.reads.sizes, **inner, **(self.enters.sizes if self.enters else {})}

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(
            self._emit,
            tuple(self.pointers),
            tuple(self.sizes),
            is_light(self.after.expression),
            self.after.dtype,
            min(d.bits for d in (self.after.dtype, *(v.dtype for v in self.reads.views))),
            self._emit_wide if self.after.expression.narrows else None,
        )

    def _emit(self, f: emit.Kernel, value: Any, row: Any, column: Any, mask: Any) -> Any:
        return self.after.evaluate(f, self._values(f, value, row, column, mask), self.lanes)

    def _emit_wide(self, f: emit.Kernel, value: Any, row: Any, column: Any, mask: Any) -> Any:
        return self.after.evaluate_wide(f, self._values(f, value, row, column, mask), self.lanes)

    def _values(self, f: emit.Kernel, value: Any, row: Any, column: Any, mask: Any) -> list[Any]:
        """The sum and the operands beside it."""
        if self.enters:
            value = self.enters.emit(f, value, row, column, mask)
        index = []
        for axis in reversed(range(len(self.outer))):
            size = f.args.size(f"outer{axis}")
            rest = f.udiv(row, size)
            index.append(row - rest * size)
            row = rest
        place = (row, *reversed(index))
        return [value, *self.reads.at(f, place, self.lanes).load(column, mask)]


def dense(
    ctx: Lowering,
    node: Node,
    source: View,
    weight: Array,
    window: Window,
    y: View,
    finish: Finish,
    filter: Filter,
    why_not_fewer: str = "",
) -> None:
    """One product: rows are the result's pixels, columns its channels."""
    columns, channels, height, width = weight.shape
    run = run_of(window, source, channels, width)
    numbers = filter.numbers(ctx.target, run)
    (n, _, oh, ow), (sn, _, sh, sw) = y.shape, source.strides
    dense_line = run == width * channels
    levels = levels_of(window, source, height, width, dense_line)
    tile = filter.tile(ctx.target, columns, numbers)
    pixel, line = window.strides[1] * sw, window.strides[0] * sh
    is_flat = (oh == 1 or line == ow * pixel) and (n == 1 or sn == oh * ow * pixel)
    y_stride = y.run_stride(PIXELS)
    is_apart = y_stride is None
    row_bytes = filter.item_bytes * weight[0].size
    block = row_tiles_in_cache(ctx.target, tile, row_bytes)
    if (
        is_flat
        and not levels
        and (way := whole_way(ctx.target, numbers, run, columns, n * oh * ow))
    ):
        numbers, tile = way
        block = tiles_in_room(tile, run)
    length = n * oh * ow if is_flat else ow
    steps = (height if dense_line else height * width) * -(-run // numbers.group)
    lined = None
    if isinstance(length, int) and isinstance(pixel, int):
        lined = filter.line_tile(ctx.target, columns, numbers, length, steps, tile, is_flat)
    tile, fixed = (lined, pixel) if lined else (tile, 0)
    conv = Conv(tile, len(levels), is_flat, is_apart, finish.epilogue, numbers, fixed)
    kernel = ctx.kernel(
        filter.family,
        (tile, len(levels), is_flat, is_apart, numbers, finish.key, fixed),
        lambda m, name: emit_conv(m, name, conv),
    )
    lines = height if dense_line else height * width
    runs = weight.transpose(2, 3, 1, 0).reshape(lines, run, columns)
    packed = ctx.constant(filter.pack(runs, tile, numbers), f"{node.name}.weight")
    row_bytes = numbers.element.bytes * runs.shape[0] * run
    sizes: dict[str, Size] = {
        "rows": n * oh * ow,
        "columns": columns,
        "run": run,
        "block": block,
        "y_stride": y.strides[3] if y_stride is None else y_stride,
        "pixel": pixel,
        **finish.sizes,
    }
    if not is_flat:
        sizes |= {"ow": ow, "oh": oh, "line": line, "image": sn}
    if is_apart:
        sizes |= {"ow": ow, "oh": oh, "y_line": y.strides[2], "y_image": y.strides[0]}
    for number, (count, step) in enumerate(levels, 1):
        sizes |= {f"count{number}": count, f"step{number}": step}
    more = {**filter.pointers(ctx, node.name, tile), **finish.pointers}
    pointers = {"a": source, "w": packed, "y": y, **more}
    why = "channels innermost, as a product"
    ctx.call(kernel, node, pointers, sizes, why=f"{why}; {why_not_fewer}" if why_not_fewer else why)


def run_of(window: Window, source: View, channels: int, width: int) -> int:
    """Neighbouring numbers of a window: a line of the filter, or the channels of a pixel."""
    dense_line = window.dilations[1] == 1 and source.strides[3] == channels
    return width * channels if dense_line else channels


def levels_of(
    window: Window, source: View, height: int, width: int, dense_line: bool
) -> list[tuple[int, Size]]:
    """Windows around the inner run: the filter's lines, and its columns where they lie apart."""
    found: list[tuple[int, Size]] = []
    if height > 1:
        found.append((height, window.dilations[0] * source.strides[2]))
    if width > 1 and not dense_line:
        found.append((width, window.dilations[1] * source.strides[3]))
    return found


def depthwise(
    ctx: Lowering,
    node: Node,
    image: View,
    weight: Array,
    window: Window,
    y: View,
    finish: Finish,
    qvalues: DType | None = None,
    more: Mapping[str, View] | None = None,
) -> None:
    """Channels in lanes; `codes` is the type of an image of codes, and `more` the slots that
    reading it takes."""
    qvalues = None if image.dtype == f32 else qvalues or image.dtype
    channels, _, height, width = weight.shape
    (_, _, ih, iw), (n, _, oh, ow) = image.shape, y.shape
    pixels = pixels_of_tile(ctx.target, ow)
    form = DepthwiseForm(
        height,
        width,
        stride=window.strides[1],
        dilations=window.dilations,
        pixels=pixels,
        is_even=isinstance(ow, int) and ow % pixels == 0,
        is_ragged=channels % finish.lanes != 0,
    )
    conv = Depthwise(form, finish.epilogue, qvalues, bool(more))
    kernel = ctx.kernel(
        f"depthwise_{image.dtype}" if image.dtype.is_float else "depthwise_codes",
        (form, finish.key, qvalues, bool(more)),
        lambda m, name: emit_depthwise(m, name, conv),
    )
    taps = np.ascontiguousarray(weight.reshape(channels, -1).T, np.float32)
    sizes: dict[str, Size] = {
        "images": n,
        "ih": ih,
        "iw": iw,
        "oh": oh,
        "ow": ow,
        "channels": channels,
        "sy": window.strides[0],
        "top": window.begins[0],
        "left": window.begins[1],
        "band": _lines_in_cache(ctx.target, window.strides[0] * iw * channels),
        **{f"x_{k}": image.strides[a] for k, a in (("image", 0), ("line", 2), ("pixel", 3))},
        **{f"y_{k}": y.strides[a] for k, a in (("image", 0), ("line", 2), ("pixel", 3))},
        **finish.sizes,
    }
    pointers = {
        "x": image,
        "w": ctx.constant(taps, f"{node.name}.weight"),
        "y": y,
        **(more or {}),
        **finish.pointers,
    }
    ctx.call(kernel, node, pointers, sizes, why="depthwise, channels in lanes")


def _lines_in_cache(target: Target, line: Size) -> Size:
    """Lines of a result such that what they read stays in half of the second-level cache."""
    fitting = target.l2_bytes // 2 // 4
    return max_size(fitting // max_size(line, 1), 1)
