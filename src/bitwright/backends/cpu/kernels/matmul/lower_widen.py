"""Calls of the widen kernel: 8-bit values as 16 bits minus their zero point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.kernels.matmul.dot.int16_dot import emit_widen
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir.dim import Size, product
from bitwright.ir.dtype import i16
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, contiguous, dense

Pads = tuple[Size, ...]
CHANNELS_LAST = (0, 2, 3, 1)
_WHY = "8-bit values widened to 16 bits, minus their zero point"


@dataclass(frozen=True)
class ZeroPoint:
    """The zero point of x: a constant number, or a view with one for each row."""

    number: int
    view: View | None

    def as_view(self, ctx: Lowering, node: Node, x: View) -> View:
        """The zero point in memory, of the type of x."""
        if self.view is not None:
            return self.view
        return ctx.constant(np.array([self.number], x.dtype.numpy), f"{node.name}.zero")


def widen_rows(ctx: Lowering, node: Node, a: View, zero: ZeroPoint) -> View:
    """Contiguous rows, widened."""
    y = contiguous(ctx.buffer(f"{node.name}.wide", i16, product(a.shape)), a.shape)
    zero_line = 0 if zero.view is None else zero.view.strides[0]
    _call(ctx, node, a, y, zero, {**row_sizes(a), "zero_line": zero_line})
    return y


def widen_image(
    ctx: Lowering, node: Node, image: View, begins: Pads, ends: Pads, zero: ZeroPoint
) -> View:
    """A channels-last image, widened and padded with zeros."""
    if image.strides[1] != 1 or image.strides[3] != image.shape[1]:
        packed = ctx.packed(image.transpose(CHANNELS_LAST), node.name)
        image = packed.transpose((0, 3, 1, 2))
    shape, sizes = line_sizes(image, begins, ends)
    y = dense(ctx.buffer(f"{node.name}.wide", i16, product(shape)), shape, CHANNELS_LAST)
    _call(ctx, node, image, y, zero, {**sizes, "zero_line": 0})
    return y


def row_sizes(a: View) -> dict[str, Size]:
    """The sizes of a kernel that copies contiguous rows."""
    rows, depth = a.shape
    lines: dict[str, Size] = {"lines": rows, "oh": rows, "ih": rows, "top": 0, "left": 0}
    return lines | {"run": depth, "width": depth, "x_image": 0, "x_line": a.strides[0]}


def line_sizes(image: View, begins: Pads, ends: Pads) -> tuple[tuple[Size, ...], dict[str, Size]]:
    """The shape of a padded channels-last image, and the sizes of a kernel that copies its
    lines."""
    (n, c, h, w), (top, left), (bottom, right) = image.shape, begins, ends
    high, wide = h + top + bottom, w + left + right
    sizes = {"lines": n * high, "oh": high, "ih": h, "top": top, "left": left * c, "run": w * c}
    strides = {"width": wide * c, "x_image": image.strides[0], "x_line": image.strides[2]}
    return (n, c, high, wide), sizes | strides


def _call(
    ctx: Lowering, node: Node, x: View, y: View, zero: ZeroPoint, sizes: dict[str, Size]
) -> None:
    signed = x.dtype.is_signed
    kernel = ctx.kernel(
        f"widen_{type_names(x.dtype, i16)}", signed, lambda m, name: emit_widen(m, name, signed)
    )
    pointers = {"x": x, "y": y, "zero": zero.as_view(ctx, node, x)}
    ctx.call(kernel, node, pointers, sizes, why=_WHY)
