"""Lowering of the gradients of recurrent layers (`kernels.recurrent.backward`).

R changes with every training step, so it is packed at run time: panels [direction, unit / width, k,
width] with rows of gates as k, by copies of whole rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bitwright.backends.cpu.codegen.emit import storage_type
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile, best_tile
from bitwright.backends.cpu.kernels.recurrent.backward import BackwardRecurrence, emit_backward
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.ir.dtype import f32, f64
from bitwright.ir.graph import Node, Value
from bitwright.lir.buffer import Storage, View, contiguous
from bitwright.ops.core.registry import get

_BACKWARD = "_backward"
_OPERANDS = {
    "rnn": ("r", "y", "dy", "dh", "lengths"),
    "gru": ("r", "gates", "y", "term", "dy", "dh", "lengths", "h0"),
    "lstm": ("r", "gates", "term", "dy", "dh", "dc", "lengths", "c0"),
}


@lowers("rnn_backward", "gru_backward", "lstm_backward")
def lower_recurrent_backward(ctx: Lowering, node: Node, region: RegionView) -> None:
    op, result = node.op.removesuffix(_BACKWARD), node.outputs[0]
    if result.dtype not in (f32, f64):
        raise NoKernelError(f"{node.op} has no kernel for {result.dtype}")
    named = zip(_OPERANDS[op], node.inputs, strict=False)
    given = {name: value for name, value in named if value is not None}
    r = given.pop("r")
    directions, _, hidden = r.shape
    if not isinstance(directions, int) or not isinstance(hidden, int):
        raise NoKernelError("the number of hidden units is not known")
    attrs = get(node.op).call_attrs(node.attrs)
    chosen = best_tile(ctx.target, hidden * storage_type(r.dtype).bits // 32)
    kernel = BackwardRecurrence(
        op,
        r.dtype,
        tuple(given),
        given["lengths"].dtype if "lengths" in given else None,
        bool(attrs.get("linear_before_reset")),
        attrs.get("activation") == "relu",
        Tile(chosen.rows, chosen.vectors, ctx.target.lanes(storage_type(r.dtype).bits)),
    )
    code = ctx.kernel(
        f"{node.op}_steps_{r.dtype}", kernel, lambda m, name: emit_backward(m, name, kernel)
    )
    pointers = {name: ctx.contiguous(value) for name, value in given.items()}
    first = hidden * (kernel.gates - kernel.is_two_pass)
    weights = ctx.contiguous(r)
    pointers["r"] = _packed(ctx, node, weights.slice(1, 0, first, 1), kernel.tile, "r")
    if kernel.is_two_pass:
        rest = weights.slice(1, first, hidden, 1)
        pointers["r_new"] = _packed(ctx, node, rest, kernel.tile, "r_new")
    results = dict(zip(kernel.results, node.outputs, strict=True))
    why = "steps in reverse"
    if "gates" in given and _is_last_reader(ctx, node, given["gates"]):
        # every vector of gates is read before its gradients are written
        ctx.alias(results.pop("dgates"), pointers["gates"])
        pointers["dgates"] = pointers["gates"]
        why += ", gradients in the place of gates"
    pointers |= {name: ctx.output(value) for name, value in results.items()}
    steps, batch = result.shape[:2]
    names = ("steps", "batch", "directions", "hidden")
    sizes = dict(zip(names, (steps, batch, directions, hidden), strict=True))
    sizes["reverse_from"] = 0 if attrs["direction"] == "reverse" else 1
    if kernel.lengths:
        pointers["fault"], sizes["node"] = ctx.fault(), ctx.number(node)
    ctx.call(code, node, pointers, sizes, writes=kernel.results, why=why)


def _is_last_reader(ctx: Lowering, node: Node, gates: Value) -> bool:
    """Whether the gates of a training layer are in the arena, and this node alone reads them."""
    readers = [other for other in ctx.graph.nodes if gates in other.operands]
    is_result = any(value is gates for _, value in ctx.graph.outputs)
    is_update = any(value is gates for _, value in ctx.graph.updates)
    is_alone = readers == [node] and not is_result and not is_update
    made_here = gates.node.op in ("gru_train", "lstm_train")
    return is_alone and made_here and ctx.view(gates).buffer.storage is Storage.ARENA


def _packed(ctx: Lowering, node: Node, rows: View, tile: Tile, slot: str) -> View:
    """Rows [direction, k, unit] as panels [direction, unit / width, k, width]."""
    directions, depth, hidden = rows.shape
    assert isinstance(directions, int) and isinstance(depth, int) and isinstance(hidden, int)
    width, name = tile.columns, f"{node.name}.{slot}"
    panels, whole = -(-hidden // width), hidden // width
    shape = (directions, panels, depth, width)
    held = contiguous(ctx.buffer(name, rows.dtype, int(np.prod(shape))), shape)
    if hidden % width:
        zero = ctx.constant(np.zeros((), rows.dtype.numpy), f"{name}.zero")
        ctx.copy(zero.expand(shape), held, name)
    direction, k, unit = rows.strides
    for start, number, units in ((0, whole, width), (whole, 1, hidden % width)):
        if number * units == 0:
            continue
        part = rows.slice(2, start * width, number * units, 1)
        part = replace(
            part,
            shape=(directions, number, depth, units),
            strides=(direction, unit * units, k, unit),
        )
        ctx.copy(part, held.slice(1, start, number, 1).slice(3, 0, units, 1), name)
    return held
