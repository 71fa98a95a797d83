"""Calls of the widen kernel: 8-bit values as 16 bits minus their zero point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.kernels.matmul.dot.int16_dot import emit_widen
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir.dim import Size
from bitwright.ir.dtype import i16
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, contiguous, dense

_CHANNELS_LAST = (0, 2, 3, 1)
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
    rows, depth = a.shape
    y = contiguous(ctx.buffer(f"{node.name}.wide", i16, rows * depth), (rows, depth))
    sizes: dict[str, Size] = {
        **{"lines": rows, "oh": rows, "ih": rows, "top": 0, "left": 0},
        **{"run": depth, "width": depth, "x_image": 0, "x_line": a.strides[0]},
        "zero_line": 0 if zero.view is None else zero.view.strides[0],
    }
    _call(ctx, node, a, y, zero, sizes)
    return y


def widen_image(
    ctx: Lowering,
    node: Node,
    image: View,
    begins: tuple[Size, ...],
    ends: tuple[Size, ...],
    zero: ZeroPoint,
) -> View:
    """A channels-last image, widened and padded with zeros."""
    n, c, h, w = image.shape
    if image.strides[1] != 1 or image.strides[3] != c:
        packed = ctx.packed(image.transpose(_CHANNELS_LAST), node.name)
        image = packed.transpose((0, 3, 1, 2))
    (top, left), (bottom, right) = begins, ends
    shape = (n, c, h + top + bottom, w + left + right)
    buffer = ctx.buffer(f"{node.name}.wide", i16, n * shape[2] * shape[3] * c)
    y = dense(buffer, shape, _CHANNELS_LAST)
    sizes: dict[str, Size] = {
        **{"lines": n * shape[2], "oh": shape[2], "ih": h, "top": top, "left": left * c},
        **{"run": w * c, "width": shape[3] * c, "zero_line": 0},
        **{"x_image": image.strides[0], "x_line": image.strides[2]},
    }
    _call(ctx, node, image, y, zero, sizes)
    return y


def _call(
    ctx: Lowering, node: Node, x: View, y: View, zero: ZeroPoint, sizes: dict[str, Size]
) -> None:
    signed = x.dtype.is_signed
    kernel = ctx.kernel(
        f"widen_{type_names(x.dtype, i16)}", signed, lambda m, name: emit_widen(m, name, signed)
    )
    pointers = {"x": x, "y": y, "zero": zero.as_view(ctx, node, x)}
    ctx.call(kernel, node, pointers, sizes, why=_WHY)
