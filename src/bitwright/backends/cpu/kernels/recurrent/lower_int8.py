"""Lowering of int8 recurrent layers; R must be a constant."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import choose_int8_dot
from bitwright.backends.cpu.kernels.recurrent.int8 import MIDDLE, SLOTS, emit_int8_recurrence
from bitwright.backends.cpu.kernels.recurrent.lower_recurrent import RecurrentLayer, pack_recurrent
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.graph import Node, constant_value
from bitwright.ops.sequence.recurrent import GATES

Array = np.ndarray[Any, Any]
_OPERANDS = ("p", "r", "scale", "bias", "lengths", "h0", "c0", "peephole")


@lowers("integer_rnn", "integer_gru", "integer_lstm")
def lower_integer_recurrent(ctx: Lowering, node: Node, region: RegionView) -> None:
    p, r, scale = node.inputs[:3]
    assert p is not None and r is not None and scale is not None
    array = constant_value(r)
    if array is None:
        raise NoKernelError("its weight is not a constant")
    layer = RecurrentLayer.of(ctx, node, _OPERANDS, SLOTS)
    kernel, vectors = layer.kernel, layer.vectors
    # rows of quantized states are padded to whole groups, so there is no remainder
    dot = choose_int8_dot(ctx.target, False, 0)
    code = ctx.kernel(
        f"{kernel.op}_recurrent_step_int8",
        (kernel, vectors, dot),
        lambda m, name: emit_int8_recurrence(m, name, kernel, vectors, dot),
    )
    panels = [
        ctx.constant(
            _pack(array, GATES[kernel.op], gates, width, dot.group), f"{node.name}.r{gates.start}"
        )
        for gates, width in layer.panels
    ]
    directions, batch, hidden = node.outputs[1].shape
    depth = -(-hidden // dot.group) * dot.group
    offset = (dot.shift - MIDDLE) * array.sum(axis=2, dtype=np.int32)
    more = {
        "h_q": ctx.scratch(f"{node.name}.h_q", "u8", directions * batch * depth),
        "h_scale": ctx.scratch(f"{node.name}.h_scale", "f32", directions * batch),
        "offset": ctx.constant(offset.astype(np.int32), f"{node.name}.offset"),
        "scale": ctx.contiguous(scale),
    }
    scratch = ("h_q", "h_scale")
    layer.call(ctx, code, ctx.contiguous(p), panels, more, scratch, "int8 products in every step")


def _pack(r: Array, total: int, gates: slice, width: int, group: int) -> Array:
    """Panels [direction, unit / width, k / group, gate, width, group], padded with zeros."""
    panels = pack_recurrent(r, total, gates, width)
    directions, count, hidden, each, _ = panels.shape
    groups = -(-hidden // group)
    padded = np.zeros((directions, count, groups * group, each, width), np.int8)
    padded[:, :, :hidden] = panels
    cut = padded.reshape(directions, count, groups, group, each, width)
    return np.ascontiguousarray(cut.transpose(0, 1, 2, 4, 5, 3))
