"""Channels-last convolutions.

A value of shape [N, C, H, W] is stored in the order N, H, W, C: a filter line then reads one run of
width · channels elements, and the result channels of a pixel are contiguous. Dense convolutions are
implicit matrix products (`kernels.conv.conv`), or Winograd convolutions where those are faster
(`kernels.conv.lower_winograd`); depthwise ones have their own kernel, grouped ones are a product
per group. The image is padded first where the kernel does not handle padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bitwright.backends.cpu.codegen.emit import Kernel
from bitwright.backends.cpu.codegen.emit import Value as Emitted
from bitwright.backends.cpu.kernels.conv import depthwise as depthwise_kernel
from bitwright.backends.cpu.kernels.conv.conv import Conv, emit_conv
from bitwright.backends.cpu.kernels.conv.lower_winograd import (
    Choice,
    call_winograd,
    choose,
    image_sizes,
    pixel_strides,
)
from bitwright.backends.cpu.kernels.conv.weights import (
    Weight,
    packed_panels,
    packed_taps,
    part,
    sizes_of,
    weight_of,
)
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.kernels.matmul.epilogue import EmitEpilogue, Epilogue, fused_epilogue
from bitwright.backends.cpu.kernels.matmul.filters import Filter, filter_of, has_filter
from bitwright.backends.cpu.kernels.matmul.lower_batched import lower_im2col, strides_dilations_pads
from bitwright.backends.cpu.kernels.matmul.matmul import row_tiles_in_cache
from bitwright.backends.cpu.kernels.matmul.product_forms import choice_point
from bitwright.backends.cpu.kernels.matmul.register_tile import best_tile
from bitwright.backends.cpu.kernels.matmul.upcast_product import choose_upcast, tiles_in_buffer
from bitwright.backends.cpu.kernels.movement.lower_movement import pad_view
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.layout import PIXELS
from bitwright.backends.cpu.lowering.region import Part, Reads, collapse_rows, operand_views, split
from bitwright.ir.dim import Size, max_size, product
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View, contiguous
from bitwright.target import Target

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
        """The geometry with height and width exchanged."""
        return Window(self.strides[::-1], self.dilations[::-1], self.begins[::-1], self.ends[::-1])


@lowers("conv")
def lower_conv(ctx: Lowering, node: Node, region: RegionView) -> None:
    anchor = region.anchor
    assert anchor is not None
    x, w = region.outer(required_input(anchor, 0)), region.outer(required_input(anchor, 1))
    after = split(region).after
    has_kernel = x.rank in (3, 4) and has_filter(x.dtype, w.dtype, after.dtype)
    weight = weight_of(ctx, w) if has_kernel else None
    if weight is None:
        lower_im2col(ctx, node, region)
        return
    window, weight = window_of(anchor, weight)
    if len(anchor.inputs) > 2 and anchor.inputs[2] is not None:
        raise NoKernelError("its bias is not a separate addition")
    extra = [as_4d(v) for v in operand_views(ctx, region, after.inputs, node.outputs[0].shape)]
    y = result_of(ctx, node)
    convolve(ctx, node, image_of(ctx, x), weight, window, y, after, extra, anchor.attrs["groups"])


def convolve(
    ctx: Lowering,
    node: Node,
    image: View,
    weight: Weight,
    window: Window,
    y: View,
    after: Part,
    extra: Sequence[View],
    groups: int,
) -> None:
    """Calls the kernels of a convolution with weight[out, in / groups, …]; `extra` has the operands
    of its epilogue, in the shape of y."""
    lanes = best_tile(ctx.target).lanes
    if groups > 1 and groups == weight.shape[0] and weight.shape[1] == 1:
        finish = ConvEpilogue(after, list(extra), y, lanes)
        depthwise(ctx, node, image, weight, window, y, finish)
        return
    choice = choose(ctx.target, weight, window, y) if groups == 1 else Choice(0, "")
    filter = filter_of(ctx.target, image.dtype, rows=product((y.shape[0], *y.shape[2:])))
    if choice.results and filter.products_at_once > 1:
        choice = Choice(0, "the target has a dot product instruction")
    if choice.results:
        finish = ConvEpilogue(after, list(extra), y, lanes)
        call_winograd(ctx, node, image, weight, window, y, finish, choice)
        return
    source = padded(ctx, node, image, window)
    columns, inner, _, _ = sizes_of(weight)
    outer = columns // groups
    for group in range(groups):
        first = group * outer
        results = y.slice(1, first, outer, 1)
        finish = ConvEpilogue(after, [v.slice(1, first, outer, 1) for v in extra], results, lanes)
        window_in = source.slice(1, group * inner, inner, 1)
        filters = part(weight, 0, first, outer)
        dense(ctx, node, window_in, filters, window, results, finish, filter, choice.why)


def required_input(anchor: Node, position: int) -> Value:
    """The input at a position, which is never absent."""
    value = anchor.inputs[position]
    assert value is not None
    return value


def window_of(anchor: Node, weight: Weight) -> tuple[Window, Weight]:
    """The geometry and the filter; a 1-D convolution becomes one line of a 2-D one."""
    rank = len(weight.shape) - 2
    strides, dilations, pads = strides_dilations_pads(anchor, rank)
    if rank == 2:
        return Window(tuple(strides), tuple(dilations), tuple(pads[:2]), tuple(pads[2:])), weight
    window = Window((1, strides[0]), (1, dilations[0]), (0, pads[0]), (0, pads[1]))
    return window, as_4d(weight) if isinstance(weight, View) else weight[:, :, None]


def as_4d(view: View) -> View:
    """[N, C, W] as [N, C, 1, W]."""
    if len(view.shape) == 4:
        return view
    (n, c, w), (sn, sc, sw) = view.shape, view.strides
    return View(view.buffer, view.offset, (n, c, 1, w), (sn, sc, sw, sw))


def _order(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1)


def image_of(ctx: Lowering, x: Value) -> View:
    """The input as a channels-last image."""
    view = ctx.view(x)
    if view.strides[1] == 1 and view.shape[1] != 1:
        return as_4d(view)  # other strides are arbitrary
    return as_4d(ctx.ordered(x, _order(x.rank)))


def result_of(ctx: Lowering, node: Node) -> View:
    value = node.outputs[0]
    return as_4d(ctx.output(value, _order(value.rank)))


def padded(
    ctx: Lowering,
    node: Node,
    image: View,
    window: Window,
    fill: View | None = None,
    channels: int | None = None,
) -> View:
    """A channels-last image padded with zeros or `fill`, and padded to `channels` channels."""
    n, c, h, w = image.shape
    if not window.is_padded and channels in (None, c):
        return image
    c = c if channels is None else channels
    top, left = window.begins
    shape = (n, h + top + window.ends[0], w + left + window.ends[1], c)
    buffer = ctx.buffer(f"{node.name}.padded", image.dtype, n * shape[1] * shape[2] * c)
    around = contiguous(buffer, shape)
    begins = (0, top, left, 0)
    pad_view(ctx, node, image.transpose(CHANNELS_LAST), around, begins, fills=fill)
    return around.transpose((0, 3, 1, 2))


class SumTransform(Protocol):
    """A computation on a sum in front of the fused nodes of the epilogue."""

    key: Any
    """The compile-time parameters."""
    pointers: dict[str, View]
    sizes: dict[str, Size]

    @property
    def emit(self) -> EmitEpilogue: ...


class ConvEpilogue:
    """The epilogue of a convolution, with operands indexed by pixel and channel."""

    def __init__(
        self,
        after: Part,
        views: list[View],
        y: View,
        lanes: int,
        transform: SumTransform | None = None,
    ) -> None:
        self.after, self.lanes, self.transform = after, lanes, transform
        rows = collapse_rows([v.transpose(CHANNELS_LAST) for v in (*views, y)])
        self.reads = Reads("e", rows[:-1])
        self.outer = rows[-1].shape[1:-1] if views else ()
        self.key = after.expression, self.reads.key, len(self.outer), transform and transform.key

    @property
    def pointers(self) -> dict[str, View]:
        return {**self.reads.pointers, **(self.transform.pointers if self.transform else {})}

    @property
    def sizes(self) -> dict[str, Size]:
        inner = {f"outer{axis}": size for axis, size in enumerate(self.outer)}
        return {**self.reads.sizes, **inner, **(self.transform.sizes if self.transform else {})}

    @property
    def epilogue(self) -> Epilogue:
        types = [view.dtype for view in self.reads.views]
        slots = self.pointers, self.sizes, types
        return fused_epilogue(self.after, self._operands, self.lanes, *slots)

    def _operands(
        self, f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> list[Emitted]:
        """The sum and the operands of the epilogue."""
        if self.transform:
            value = self.transform.emit(f, value, row, column, mask)
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
    weight: Weight,
    window: Window,
    y: View,
    finish: ConvEpilogue,
    filter: Filter,
    why_not_fewer: str = "",
) -> None:
    """Calls one product: rows are the result's pixels, columns its channels."""
    columns, channels, height, width = sizes_of(weight)
    run = run_of(window, source, channels, width)
    dot = filter.dot(ctx.target, run)
    (n, _, oh, ow), (sn, _, sh, sw) = y.shape, source.strides
    dense_line = run == width * channels
    levels = levels_of(window, source, height, width, dense_line)
    tiles = filter.tiles(ctx.target, columns, dot)
    pixel, line = window.strides[1] * sw, window.strides[0] * sh
    is_flat = (oh == 1 or line == ow * pixel) and (n == 1 or sn == oh * ow * pixel)
    y_stride = y.run_stride(PIXELS)
    is_strided = y_stride is None
    row_bytes = filter.item_bytes * channels * height * width
    blocks = {tile: row_tiles_in_cache(ctx.target, tile, row_bytes) for tile in tiles}
    if (
        is_flat
        and not levels
        and (choice := choose_upcast(ctx.target, dot, run, columns, n * oh * ow))
    ):
        dot, tile = choice
        blocks = {tile: tiles_in_buffer(tile, run)}
    length = n * oh * ow if is_flat else ow
    steps = (height if dense_line else height * width) * -(-run // dot.group)
    static = next(iter(blocks))
    forms = {f"{t.rows}x{t.vectors}": (t, 0, block) for t, block in blocks.items()}
    if isinstance(length, int) and isinstance(pixel, int):
        lined = filter.line_tile(ctx.target, columns, dot, length, steps, static, is_flat)
        if lined is not None:
            of_line = {f"{lined.rows}x{lined.vectors} of a line": (lined, pixel, blocks[static])}
            forms = of_line | forms
    family = f"conv_{dot.name} {height}x{width}/{window.strides[0]}x{window.strides[1]}"
    point = choice_point(family, finish.after, n * oh * ow, columns, channels)
    tile, fixed, block = ctx.choices.pick(node, point, forms)
    conv = Conv(tile, len(levels), is_flat, is_strided, finish.epilogue, dot, fixed)
    kernel = ctx.kernel(
        f"conv_{dot.name}",
        (tile, len(levels), is_flat, is_strided, dot, finish.key, fixed),
        lambda m, name: emit_conv(m, name, conv),
    )
    packed = packed_panels(ctx, node, weight, filter, tile, dot, run)
    sizes = {"rows": n * oh * ow, "columns": columns, "run": run, "block": block, "pixel": pixel}
    sizes |= {"y_stride": y.strides[3] if y_stride is None else y_stride} | finish.sizes
    if not is_flat:
        sizes |= {"ow": ow, "oh": oh, "line": line, "image": sn}
    if is_strided:
        sizes |= {"ow": ow, "oh": oh, "y_line": y.strides[2], "y_image": y.strides[0]}
    for number, (count, step) in enumerate(levels, 1):
        sizes |= {f"count{number}": count, f"step{number}": step}
    more = {**filter.pointers(ctx, node.name, tile), **finish.pointers}
    pointers = {"a": source, "w": packed, "y": y, **more}
    why = "channels last, implicit matmul"
    ctx.call(kernel, node, pointers, sizes, why=f"{why}; {why_not_fewer}" if why_not_fewer else why)


def run_of(window: Window, source: View, channels: int, width: int) -> int:
    """Contiguous elements of a window: a line of the filter, or the channels of a pixel."""
    dense_line = window.dilations[1] == 1 and source.strides[3] == channels
    return width * channels if dense_line else channels


def levels_of(
    window: Window, source: View, height: int, width: int, dense_line: bool
) -> list[tuple[int, Size]]:
    """Window loops around the inner run: the filter's lines, and its columns where they have a
    stride."""
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
    weight: Weight,
    window: Window,
    y: View,
    finish: ConvEpilogue,
    zero_point: Mapping[str, View] | None = None,
) -> None:
    """Calls the depthwise kernel; `zero_point` has the slot of an integer image's zero point."""
    element = None if image.dtype == f32 else image.dtype
    channels, _, height, width = sizes_of(weight)
    ow = y.shape[3]
    forms = {str(count): count for count in depthwise_kernel.tile_pixels(ctx.target, ow)}
    family = f"depthwise_{image.dtype} {height}x{width}/{window.strides[0]}x{window.strides[1]}"
    point = choice_point(family, finish.after, y.shape[0] * y.shape[2] * ow, channels, 1)
    pixels = ctx.choices.pick(node, point, forms)
    is_even, is_ragged = isinstance(ow, int) and ow % pixels == 0, channels % finish.lanes != 0
    form = depthwise_kernel.DepthwiseForm(
        height, width, window.strides[1], window.dilations, pixels, is_even, is_ragged
    )
    types = (image.dtype,) if image.dtype.is_float else (image.dtype, f32, f32)
    conv = depthwise_kernel.Depthwise(form, finish.epilogue, element, bool(zero_point))
    kernel = ctx.kernel(
        f"depthwise_{type_names(*types)}",
        (form, finish.key, element, bool(zero_point)),
        lambda m, name: depthwise_kernel.emit_depthwise(m, name, conv),
    )
    sizes = image_sizes(image, y, window) | pixel_strides(x=image, y=y) | finish.sizes
    sizes |= {"channels": channels, "sy": window.strides[0]}
    sizes["band"] = _lines_in_cache(ctx.target, window.strides[0] * image.shape[3] * channels)
    packed = packed_taps(ctx, node, weight)
    pointers = {"x": image, "w": packed, "y": y, **(zero_point or {}), **finish.pointers}
    ctx.call(kernel, node, pointers, sizes, why="depthwise, lanes are channels")


def _lines_in_cache(target: Target, line: Size) -> Size:
    """Lines of a result whose input fits in half of the L2 cache."""
    fitting = target.l2_bytes // 2 // 4
    return max_size(fitting // max_size(line, 1), 1)
