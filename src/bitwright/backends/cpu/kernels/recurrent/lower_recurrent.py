"""Lowering of recurrent layers: x·W of all steps and directions as one product, then the steps.

    p[S·B, directions · gates · H] = x[S·B, I] · W'       (the packed kernel for constant weights)
    steps                                                 (`kernels.recurrent.recurrent`)

Constant R is packed at compile time, otherwise by copies before the steps. The training ops have
the same kernel, which keeps what the gradient reads; gates are stored in the place of p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import storage_type
from bitwright.backends.cpu.kernels.matmul.lower_batched import Operands, call_product
from bitwright.backends.cpu.kernels.matmul.lower_blocked import call_blocked, is_blocked_product
from bitwright.backends.cpu.kernels.matmul.matmul import (
    emit_matmul,
    matmul_sizes,
    pack,
    row_tiles_in_cache,
)
from bitwright.backends.cpu.kernels.matmul.register_tile import best_tile
from bitwright.backends.cpu.kernels.recurrent import recurrent
from bitwright.backends.cpu.lowering.artifact import KernelCode
from bitwright.backends.cpu.lowering.context import Lowering, NoKernelError, RegionView, lowers
from bitwright.backends.cpu.lowering.region import split
from bitwright.ir.dtype import f32, f64
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.lir.buffer import View, contiguous
from bitwright.ops.core.registry import get
from bitwright.ops.quant.integer_recurrent import PREFIX
from bitwright.ops.sequence.recurrent import GATES, gate_activations

TRAIN = "_train"
_OPERANDS = ("x", "w", "r", "bias", "lengths", "h0", "c0", "peephole")


def layer_op(node: Node) -> str:
    """The name of a layer's op in floats, without training: rnn, gru or lstm."""
    return node.op.removeprefix(PREFIX).removesuffix(TRAIN)


@lowers("rnn", "gru", "lstm", "gru_train", "lstm_train")
def lower_recurrent(ctx: Lowering, node: Node, region: RegionView) -> None:
    x = node.inputs[0]
    assert x is not None
    if x.dtype not in (f32, f64):
        raise NoKernelError(f"{node.op} has no kernel for {x.dtype}")
    layer = RecurrentLayer.of(ctx, node, _OPERANDS)
    kernel, vectors = layer.kernel, layer.vectors
    code = ctx.kernel(
        f"{node.op}_recurrent_step_{x.dtype}",
        (kernel, vectors),
        lambda m, name: recurrent.emit_recurrence(m, name, kernel, vectors),
    )
    panels = [_packed(ctx, node, gates, width) for gates, width in layer.panels]
    columns = kernel.gates * len(kernel.activations) * layer.hidden
    shape = (x.shape[0] * x.shape[1], columns)
    if not kernel.is_training:
        p = contiguous(ctx.buffer(f"{node.name}.p", x.dtype, shape[0] * columns), shape)
        _project(ctx, node, region, p)
        layer.call(ctx, code, p, panels)
        return
    # the steps replace x·W by the activated gates
    gates, term = (ctx.output(value) for value in node.outputs[-2:])
    _project(ctx, node, region, gates.relabel(shape))
    layer.call(ctx, code, gates, panels, {"term": term}, ("p", "term"))


@dataclass(frozen=True)
class RecurrentLayer:
    """A layer and its kernel parameters, shared with `kernels.recurrent.lower_int8`."""

    node: Node
    given: dict[str, Value | None]
    kernel: recurrent.Recurrence
    vectors: tuple[int, ...]

    @classmethod
    def of(
        cls, ctx: Lowering, node: Node, operands: Sequence[str], more: Sequence[str] = ()
    ) -> RecurrentLayer:
        """`operands` names the node's operands, `more` additional pointers."""
        op = layer_op(node)
        is_training = node.op.endswith(TRAIN)
        given = dict(zip(operands, node.inputs, strict=False))
        element = node.outputs[0].dtype
        directions, hidden = node.outputs[1].shape[0], node.outputs[1].shape[2]
        if not isinstance(directions, int) or not isinstance(hidden, int):
            raise NoKernelError("the number of hidden units is not known")
        attrs = get(node.op).call_attrs(node.attrs)
        limits = {name: attrs.get(name) for name in ("alpha", "beta", "clip")}
        chosen = gate_activations(op, attrs["direction"], attrs.get("activations"), **limits)
        lengths = given.get("lengths")
        lanes = ctx.target.lanes(storage_type(element).bits)
        kernel = recurrent.Recurrence(
            op,
            element,
            tuple(map(tuple, chosen)),
            tuple(name for name in _OPERANDS[3:] if given.get(name) is not None),
            None if lengths is None else lengths.dtype,
            bool(attrs.get("linear_before_reset")),
            bool(attrs.get("input_forget")),
            lanes,
            tuple(more),
            is_training,
        )
        vectors = tuple(
            recurrent.vectors_of(ctx.target, lanes, gates, hidden, is_training)
            for gates in kernel.passes
        )
        return cls(node, given, kernel, vectors)

    @property
    def hidden(self) -> int:
        hidden = self.node.outputs[1].shape[2]
        assert isinstance(hidden, int)
        return hidden

    @property
    def panels(self) -> Iterator[tuple[slice, int]]:
        """The gates of each pass and the width of its panels."""
        first = 0
        for gates, count in zip(self.kernel.passes, self.vectors, strict=True):
            yield slice(first, first + gates), count * self.kernel.lanes
            first += gates

    def call(
        self,
        ctx: Lowering,
        code: KernelCode,
        p: View,
        panels: Sequence[View],
        more: Mapping[str, View] | None = None,
        scratch: Sequence[str] = (),
        why: str = "",
    ) -> None:
        """Append the call of the steps on p = x·W and packed R; `scratch` names written views."""
        node, kernel, given = self.node, self.kernel, self.given
        element = node.outputs[0].dtype
        steps, _, batch, hidden = node.outputs[0].shape
        directions = node.outputs[1].shape[0]
        state = directions * batch * hidden
        pointers = {
            "p": p,
            "h": ctx.scratch(f"{node.name}.h", element.name, 2 * state),
            "y": ctx.output(node.outputs[0]),
            "last": ctx.output(node.outputs[1]),
            **dict(zip(("r", "r_new"), panels, strict=False)),
            **(more or {}),
        }
        for name in kernel.operands:
            value = given[name]
            assert value is not None
            pointers[name] = ctx.contiguous(value)
        writes = ["h", "y", "last", *scratch]
        if len(kernel.passes) > 1:
            pointers["keep"] = ctx.scratch(f"{node.name}.keep", element.name, 2 * state)
            writes.append("keep")
        if kernel.op == "lstm":
            pointers["c"] = ctx.output(node.outputs[2])
            writes.append("c")
        names = ("steps", "batch", "directions", "hidden")
        sizes = dict(zip(names, (steps, batch, directions, hidden), strict=True))
        sizes["reverse_from"] = 0 if node.attrs.get("direction") == "reverse" else 1
        if kernel.lengths:
            pointers["fault"], sizes["node"] = ctx.fault(), ctx.number(node)
        ctx.call(code, node, pointers, sizes, writes=writes, why=why)


def _project(ctx: Lowering, node: Node, region: RegionView, p: View) -> None:
    """Compute p = x·W for every step, row, direction and gate."""
    x, w, *_ = node.inputs
    assert x is not None and w is not None
    features = x.shape[2]
    rows, columns = p.shape
    a = ctx.contiguous(x).relabel((rows, features))
    weight = constant_value(w)
    if weight is None or x.dtype != f32:
        flat = ctx.contiguous(w).relabel((columns, features)).transpose((1, 0))
        after, why = split(region).after, "input projection"
        if is_blocked_product(a, flat):
            call_blocked(ctx, node, a, flat, p, after, why)
            return
        transposed = ctx.packed(flat, f"{node.name}.w")
        transposed = replace(
            transposed, shape=(rows, *transposed.shape), strides=(0, *transposed.strides)
        )
        call_product(ctx, node, Operands(a, transposed, p, ()), after, x.dtype, why)
        return
    weight = weight.reshape(weight.shape[0] * weight.shape[1], weight.shape[2]).T
    tile = best_tile(ctx.target, weight.shape[1])
    code = ctx.kernel("matmul_f32", (tile,), lambda m, name: emit_matmul(m, name, tile))
    block = row_tiles_in_cache(ctx.target, tile, weight.shape[0])
    sizes = matmul_sizes(rows, columns, features, a.strides[0], block)
    held = ctx.constant(pack(weight, tile), f"{node.name}.w")
    ctx.call(code, node, {"a": a, "w": held, "y": p}, sizes, why="input projection of all steps")


def _packed(ctx: Lowering, node: Node, gates: slice, width: int) -> View:
    """R of some gates as panels [direction, unit / width, k, gate, width], padded with zeros."""
    r = node.inputs[2]
    assert r is not None
    directions, hidden = node.outputs[1].shape[0], node.outputs[1].shape[2]
    assert isinstance(directions, int) and isinstance(hidden, int)
    count, panels = gates.stop - gates.start, -(-hidden // width)
    array, total = constant_value(r), GATES[layer_op(node)]
    name = f"{node.name}.r{gates.start}"
    if array is not None:
        return ctx.constant(pack_recurrent(array, total, gates, width), name)
    shape = (directions, panels, hidden, count, width)
    held = contiguous(ctx.buffer(name, r.dtype, int(np.prod(shape))), shape)
    split_gates = (directions, total, hidden, hidden)
    source = ctx.contiguous(r).relabel(split_gates).slice(1, gates.start, count, 1)
    whole = hidden // width
    if hidden % width:
        zero = ctx.constant(np.zeros((), r.dtype.numpy), f"{name}.zero")
        ctx.copy(zero.expand(shape), held, name)
    for start, number, units in ((0, whole, width), (whole, 1, hidden - whole * width)):
        if number * units == 0:
            continue
        part = _in_panels(source.slice(2, start * width, number * units, 1), number)
        ctx.copy(part, held.slice(1, start, number, 1).slice(4, 0, units, 1), name)
    return held


def _in_panels(view: View, panels: int) -> View:
    """[direction, gate, unit, k] as [direction, panel, k, gate, unit]."""
    units = view.shape[2] // panels
    direction, gate, unit, k = view.strides
    return replace(
        view,
        shape=(view.shape[0], panels, view.shape[3], view.shape[1], units),
        strides=(direction, unit * units, k, gate, unit),
    )


def pack_recurrent(r: Any, total: int, gates: slice, width: int) -> np.ndarray[Any, Any]:
    """A constant R[directions, total · H, H] of some gates in panels."""
    directions, hidden = r.shape[0], r.shape[2]
    panels = -(-hidden // width)
    chosen = r.reshape(directions, total, hidden, hidden)[:, gates]
    padded = np.zeros((directions, chosen.shape[1], panels * width, hidden), r.dtype)
    padded[:, :, :hidden] = chosen
    split_units = padded.reshape(directions, chosen.shape[1], panels, width, hidden)
    return np.ascontiguousarray(split_units.transpose(0, 2, 4, 1, 3))
