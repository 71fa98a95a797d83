"""8-bit filters that are known at run time, as in training through quantization.

A kernel packs them into the panels of constant filters (`kernels.matmul.pack_rhs`), together with
the initial sums of the columns, so that the same product kernel runs. The filter is first copied to
[out, height, width, in], the order of the windows; runs that are not whole groups of the dot
product are padded with zeros. Depthwise filters become f32, for the kernel that sums exactly in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Module, Signature, f32, i8
from bitwright.backends.cpu.kernels.matmul.dot import int8_dot
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import DotProduct
from bitwright.backends.cpu.kernels.matmul.lower_dynamic_rhs import pack_matrices, per_column
from bitwright.backends.cpu.kernels.matmul.lower_int8 import Int8Filter
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.kernels.movement.lower_movement import pad_view
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, contiguous
from bitwright.target import Target

CHANNELS_LAST = (0, 2, 3, 1)
CHANNELS_FIRST = (0, 3, 1, 2)


@dataclass(frozen=True)
class RuntimeInt8Filter(Int8Filter):
    """Signed weights in memory; `offset` is written when they are packed."""

    x_zero: View | None = None
    bias: View | None = None

    def dot(self, target: Target, run: int) -> int8_dot.Int8Dot:
        return int8_dot.choose_int8_dot(target, self.signed, run, offset=self.offset is not None)

    def pack_view(
        self, ctx: Lowering, node: Node, weight: View, tile: Tile, dot: DotProduct, run: int
    ) -> View:
        """The panels of weight[out, in, height, width], which is stored channels last."""
        assert isinstance(dot, int8_dot.Int8Dot) and self.offset is not None
        columns, channels, height, width = _known_sizes(weight)
        depth = height * width * channels
        rows = ctx.packed(weight.transpose(CHANNELS_LAST), f"{node.name}.filter")
        if run % dot.group:
            lines, whole = depth // run, -(-run // dot.group) * dot.group
            runs = View(rows.buffer, rows.offset, (columns, lines, run), (depth, run, 1))
            depth = lines * whole
            buffer = ctx.buffer(f"{node.name}.filter", rows.dtype, columns * depth)
            rows = contiguous(buffer, (columns, lines, whole))
            pad_view(ctx, node, runs, rows, (0, 0, 0))
        matrix = View(rows.buffer, rows.offset, (depth, columns), (1, depth))
        given = {"x_zero": self.x_zero, "bias": self.bias}
        inputs = {
            name: per_column(view, (columns,), name)
            for name, view in given.items()
            if view is not None
        }
        results = {"offset": self.offset}
        return pack_matrices(ctx, node, matrix, tile, dot, inputs, results).panels


def channels_last(ctx: Lowering, node: Node, weight: View, channels: int) -> View:
    """The filter [out, in, height, width] in the order of windows, padded to `channels`."""
    columns, given, height, width = _known_sizes(weight)
    shape = (columns, height, width, channels)
    if channels != given:
        buffer = ctx.buffer(f"{node.name}.filter", weight.dtype, math.prod(shape))
        found = contiguous(buffer, shape)
        pad_view(ctx, node, weight.transpose(CHANNELS_LAST), found, (0, 0, 0, 0))
    else:
        found = ctx.packed(weight.transpose(CHANNELS_LAST), f"{node.name}.filter")
    return found.transpose(CHANNELS_FIRST)


def _known_sizes(weight: View) -> tuple[int, ...]:
    if not all(isinstance(size, int) for size in weight.shape):
        raise NoKernelError("the shape of its filter is not known at compile time")
    return tuple(size for size in weight.shape if isinstance(size, int))


def float_taps(ctx: Lowering, node: Node, weight: View) -> View:
    """A depthwise filter in f32, stored as [height, width, channels]."""
    channels, one, height, width = _known_sizes(weight)
    rows = ctx.packed(weight, f"{node.name}.filter")
    kernel = ctx.kernel("filter_taps_i8", (), _emit_taps)
    taps = height * width
    place = ctx.scratch(f"{node.name}.taps", "f32", taps * channels)
    ctx.call(
        kernel, f"{node.name}.taps", {"w": rows, "y": place}, {"channels": channels, "taps": taps}
    )
    found = contiguous(place.buffer, (height, width, channels, one))
    return found.transpose((2, 3, 0, 1))


def _emit_taps(module: Module, name: str) -> Signature:
    signature = Signature(("w", "y"), ("channels", "taps"))
    with module.kernel(name, signature) as f:
        channels, taps = f.args.size("channels"), f.args.size("taps")
        begin, end = f.share(taps)
        with f.loop(begin, end) as row, f.loop(0, channels) as loop:
            q = f.load(i8, f.args.pointer("w"), loop.index * taps + row.index)
            at = row.index * channels + loop.index
            f.store(f.convert(q, f32), f.args.pointer("y"), at)
    return signature
