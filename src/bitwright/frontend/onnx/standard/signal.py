"""Fourier transforms and windows."""

from __future__ import annotations

import math

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.standard.index import counting
from bitwright.frontend.onnx.tensor import element_type
from bitwright.ir import Size

WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@imports("DFT")
def dft(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, length, axis_in = inputs[0], inputs[1], inputs[2]
    axis = node.integer("axis", 1) if node.version < 20 else -2
    if axis_in is not None:
        (axis,) = ctx.need_ints(axis_in, "the axis")
    ctx.length(x, -1)
    size: Size | None = None
    if length is not None:
        sizes = ctx.sizes(length, x)
        if sizes is None:
            raise UnmappedError(f"the length {length} is computed from data")
        size = sizes[0]
    inverse, onesided = node.flag("inverse"), node.flag("onesided")
    return ctx.b.dft(x, axis=axis, length=size, inverse=inverse, onesided=onesided)


@imports("STFT")
def stft(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """The Fourier transform of each frame of the signal, weighted by the window."""
    signal, step_in, window, length_in = (inputs[i] for i in range(4))
    (step,) = ctx.need_ints(step_in, "the frame step")
    if length_in is not None:
        (length,) = ctx.need_ints(length_in, "the frame length")
    elif window is not None:
        length = ctx.length(window)
    else:
        raise ImportModelError("has neither a window nor a frame length", where=node.where)
    if step < 1 or length < 1:
        raise ImportModelError("the frame step or length is below 1", where=node.where)
    if signal.rank == 2:
        signal = ctx.unsqueeze(signal, [-1])
    total, parts = signal.shape[1], ctx.length(signal, -1)
    frames = (total - length) // step + 1
    starts = ctx.b.mul(ctx.b.iota(length=frames, dtype="i64"), ctx.const(step))
    places = ctx.b.add(
        ctx.unsqueeze(starts, [1]), ctx.unsqueeze(ctx.b.iota(length=length, dtype="i64"), [0])
    )
    framed = ctx.b.gather(signal, places, axis=1)
    if window is not None:
        framed = ctx.b.mul(framed, ctx.reshape(window, [length, 1]))
    onesided = node.flag("onesided", 1) and parts == 1
    return ctx.b.dft(framed, axis=2, onesided=onesided)


@imports(*WINDOWS)
def cosine_window(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """a - b cos(2 pi n / N) + c cos(4 pi n / N)"""
    size = ctx.reshape(inputs[0], [])
    element = element_type(node.integer("output_datatype", 1), node.where)
    wide = "f64" if element.bits == 64 else "f32"
    period = ctx.cast(size, wide)
    if not node.flag("periodic", 1):
        period = ctx.b.sub(period, 1.0)
    step = ctx.cast(counting(ctx, size), wide)
    angle = ctx.b.div(ctx.b.mul(step, ctx.const(2 * math.pi, wide)), period)
    first, second, third = WINDOWS[node.op_type]
    y = ctx.b.sub(ctx.const(first, wide), ctx.b.mul(ctx.b.cos(angle), ctx.const(second, wide)))
    if third:
        double = ctx.b.cos(ctx.b.mul(angle, ctx.const(2.0, wide)))
        y = ctx.b.add(y, ctx.b.mul(double, ctx.const(third, wide)))
    return ctx.cast(y, element)
