"""Depthwise convolutions of 8-bit values, by a dot product instruction or exactly in f32.

Both kernels are channels-last (`kernels.conv.depthwise_int8`, `kernels.conv.depthwise`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel
from bitwright.backends.cpu.codegen.emit import Value as Emitted
from bitwright.backends.cpu.kernels.conv import depthwise_int8
from bitwright.backends.cpu.kernels.conv.depthwise import EXACT_TAPS
from bitwright.backends.cpu.kernels.conv.lower_conv import ConvEpilogue, Window, depthwise, image_of
from bitwright.backends.cpu.kernels.conv.lower_winograd import image_sizes, pixel_strides
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot4
from bitwright.backends.cpu.kernels.matmul.lower_int8 import Int8Filter, Offsets, Weight
from bitwright.backends.cpu.kernels.matmul.lower_widen import ZeroPoint
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError
from bitwright.backends.cpu.lowering.region import Part
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import View

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Int8Conv:
    """The operands of an int8 convolution; arrays have one entry for each filter."""

    x: Value
    filters: Array
    filter_zeros: Array | None
    bias: Array
    zero: ZeroPoint
    fill: View
    """The zero point of x, in memory."""
    window: Window
    groups: int
    after: Part
    extra: list[View]
    y: View
    lanes: int

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.groups == len(self.filters) and self.filters.shape[1] == 1


def lower_int8_depthwise(ctx: Lowering, node: Node, conv: Int8Conv) -> None:
    if _lower_dot(ctx, node, conv):
        return
    if conv.filters[0].size > EXACT_TAPS:
        raise NoKernelError("its filter has too many taps for exact sums in f32")
    taps = conv.filters.astype(np.float32)
    if conv.filter_zeros is not None:
        taps -= conv.filter_zeros.astype(np.float32).reshape(-1, 1, 1, 1)
    lower_exact_depthwise(ctx, node, conv, taps, Bias.of(ctx, node.name, conv.bias))


def lower_exact_depthwise(
    ctx: Lowering, node: Node, conv: Int8Conv, taps: Array | View, bias: Bias
) -> None:
    """Calls the kernel that sums in f32, exactly; `taps` are constants or known at run time."""
    finish = ConvEpilogue(conv.after, conv.extra, conv.y, conv.lanes, bias)
    is_zero = conv.zero.view is None and conv.zero.number == 0
    zero_point = {} if is_zero else {"x_zero": conv.fill}
    image = image_of(ctx, conv.x)
    depthwise(ctx, node, image, taps, conv.window, conv.y, finish, zero_point)


def _lower_dot(ctx: Lowering, node: Node, conv: Int8Conv) -> bool:
    """Lowers to the dot product kernel; False where the target has none or x_zero is not
    constant."""
    channels, _, height, width = conv.filters.shape
    dot = Int8Filter(conv.x.dtype.is_signed).dot(ctx.target, 1)
    weight = Weight.of(conv.filters.transpose(1, 2, 3, 0), conv.filter_zeros)
    is_ragged = channels % conv.lanes != 0
    if not isinstance(dot, Int8Dot4) or weight.zero is not None or conv.zero.view is not None:
        return False
    if is_ragged and not ctx.target.has("avx512bw"):
        return False  # masked loads of bytes would be scalar
    image, y, window, extra = image_of(ctx, conv.x), conv.y, conv.window, conv.extra
    taps = weight.qvalues[0].transpose(2, 0, 1)
    if height < width:  # the kernel takes four lines at a time
        transposed = (0, 1, 3, 2)
        image, y = image.transpose(transposed), y.transpose(transposed)
        extra = [view.transpose(transposed) for view in extra]
        window, taps = window.transposed, taps.transpose(0, 2, 1)
    size, steps = (y.shape[2], y.shape[3]), (window.strides, window.dilations)
    form = depthwise_int8.best_form(ctx.target, taps.shape[1:], *steps, size, is_ragged)
    if form is None:
        return False
    offsets = Offsets(ctx, node.name, weight, dot.shift, conv.zero, conv.bias)
    dot = Int8Filter(conv.x.dtype.is_signed, None, offsets.constant).dot(
        ctx.target, depthwise_int8.GROUP
    )
    assert isinstance(dot, Int8Dot4)
    finish = ConvEpilogue(conv.after, extra, y, conv.lanes)
    kernel_form = depthwise_int8.Int8Depthwise(form, dot, finish.epilogue)
    kernel = ctx.kernel(
        f"depthwise_{dot.name}",
        (form, dot, finish.key),
        lambda m, name: depthwise_int8.emit_int8_depthwise(m, name, kernel_form),
    )
    pad = np.full(-(-channels // conv.lanes) * conv.lanes, conv.zero.number, conv.x.dtype.numpy)
    sizes = image_sizes(image, y, window) | pixel_strides(x=image, y=y)
    sizes |= {"channels": channels} | finish.sizes
    arrays = {"w": (form.pack(taps, conv.lanes), "weight"), "pad": (pad, "pad")}
    pointers = {k: ctx.constant(v, f"{node.name}.{name}") for k, (v, name) in arrays.items()}
    pointers |= {"x": image, "y": y, **finish.pointers}
    if offsets.constant is not None:
        pointers["offset"] = offsets.constant
    why = "depthwise, lanes are channels, four taps at a time"
    ctx.call(kernel, node, pointers, sizes, why=why)
    return True


class Bias:
    """A bias per channel, added to the sums."""

    sizes: dict[str, Size] = {}  # noqa: RUF012

    def __init__(self, bias: View | None) -> None:
        self.pointers = {} if bias is None else {"offset": bias}
        self.key = bool(self.pointers)

    @classmethod
    def of(cls, ctx: Lowering, name: str, bias: Array) -> Bias:
        held = bias.astype(np.int32)
        return cls(ctx.constant(held, f"{name}.bias") if held.any() else None)

    def emit(
        self, f: Kernel, value: Emitted, row: Emitted, column: Emitted, mask: Emitted | None
    ) -> Emitted:
        if not self.pointers:
            return value
        return value + f.load(value.type, f.args.pointer("offset"), column, mask=mask)
