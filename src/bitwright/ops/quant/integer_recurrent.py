"""Recurrent layers with int8 recurrent weights; quantized `rnn`, `gru` and `lstm` lower to them.

    h' = rne(h * (127 / peak)) with peak = max |h| of the row         -127 .. 127, in every step
    h R'  ->  (h' r') * (peak / 127 * scale)                          exact sums in i32

The cells are those of `ops.nn.recurrent`. The input product of all steps, p = x W', is an operand,
so it is lowered like any other matmul. A GRU with linear_before_reset=False quantizes r * h in the
same way for its candidate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i8
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import ROUNDS, Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.nn.recurrence import (
    ATTRS,
    Cell,
    check_activations,
    infer_recurrent,
    run_directions,
)
from bitwright.ops.nn.recurrent import (
    GATES,
    StateProduct,
    gate_activations,
    gru_cell,
    lstm_cell,
    rnn_cell,
)

Type = TensorType | None
PREFIX = "integer_"
_STATES = {"rnn": ("h0",), "gru": ("h0",), "lstm": ("h0", "c0")}
_ACTIVATIONS = {"rnn": 1, "gru": 2, "lstm": 3}


def _infer(
    op: str,
    p: TensorType,
    r: TensorType,
    scale: TensorType,
    bias: Type,
    lengths: Type,
    h0: Type,
    c0: Type,
    peephole: Type,
    hidden: int | None,
    direction: str,
    activations: Any,
) -> tuple[TensorType, ...]:
    check_activations(activations, _ACTIVATIONS[op], direction)
    expect.element("r", r, i8)
    expect.element("p", p, f32)
    for name, type_, rank in (("p", p, 3), ("r", r, 3), ("scale", scale, 2)):
        expect.rank(name, type_, rank)
    directions, rows, size = r.shape
    units = size if isinstance(size, int) else None
    expect.shape("p", p, (*p.shape[:2], directions * rows))
    expect.shape("scale", scale, (directions, rows))
    # check with the float op's rules, for an input without features
    empty = TensorType(f32, (*p.shape[:2], 0))
    w = TensorType(f32, (directions, rows, 0))
    states = dict(zip(_STATES[op], (h0, c0), strict=False))
    y, last = infer_recurrent(
        empty, w, r.with_dtype(f32), bias, lengths, states, GATES[op], hidden or units, direction
    )
    if peephole is not None:
        expect.shape("peephole", peephole, (last.shape[0], 3 * last.shape[2]))
    return (y, last, last) if op == "lstm" else (y, last)


def quantize_states(h: Array) -> tuple[Array, Array]:
    """States quantized to -127 .. 127 with one scale for each row, and these scales."""
    peak = np.abs(h).max(axis=-1, keepdims=True, initial=0)
    safe = np.where(peak > 0, peak, 1)
    return np.rint(h * (127 / safe)), peak / 127


def _recall(qvalues: Array, scale: Array) -> StateProduct:
    """The int8 product h R' as a function of h and a slice of gate rows."""

    def product(h: Array, part: slice) -> Array:
        states, state_scale = quantize_states(h)
        sums = states.astype(np.int64) @ qvalues[part].T.astype(np.int64)
        return np.asarray(sums * (state_scale * scale[part]))

    return product


def _reference(
    op: str,
    p: Array,
    r: Array,
    scale: Array,
    bias: Array | None,
    lengths: Array | None,
    h0: Array | None,
    c0: Array | None,
    peephole: Array | None,
    hidden: int | None,
    direction: str,
    activations: Any,
    linear_before_reset: bool = False,
    input_forget: bool = False,
    **limits: Any,
) -> tuple[Array, ...]:
    size, rows = r.shape[2], r.shape[1]
    cells: list[Cell] = []
    for i, functions in enumerate(gate_activations(op, direction, activations, **limits)):
        both = np.zeros(2 * rows) if bias is None else wide(bias[i])
        recall = _recall(r[i], wide(scale[i]))
        part = slice(i * rows, (i + 1) * rows)
        given = _share_of(part)
        halves = both[:rows], both[rows:]
        if op == "rnn":
            cells.append(rnn_cell(given, recall, *halves, *functions))
        elif op == "gru":
            cells.append(gru_cell(given, recall, *halves, size, linear_before_reset, *functions))
        else:
            peeps = np.zeros(3 * size) if peephole is None else wide(peephole[i])
            cells.append(lstm_cell(given, recall, *halves, peeps, input_forget, *functions))
    initial = [h0, c0] if op == "lstm" else [h0]
    return run_directions(p, lengths, direction, initial, size, cells)


def _share_of(part: slice) -> Any:
    return lambda p: p[..., part]


def _operands(op: str, directions: int, hidden: int) -> list[Array]:
    """p, r, scale and bias for 4 steps and a batch of 3."""
    rows = GATES[op] * hidden
    return [
        draw(4, 3, directions * rows),
        draw(directions, rows, hidden, dtype="i8", seed=2, low=-127, high=127),
        np.abs(draw(directions, rows, seed=5)) * np.float32(0.01),
        draw(directions, 2 * rows, seed=3),
    ]


def _samples(op: str, **special: Any) -> list[Sample]:
    """Samples whose tolerance allows a state near a rounding boundary to differ by one step."""
    one, two = _operands(op, 1, 5), _operands(op, 2, 9)
    lengths = np.array([4, 0, 2], np.int32)
    states = [draw(2, 3, 9, seed=4)] + [draw(2, 3, 9, seed=5)] * (op == "lstm")
    near = {"tolerance": 1e-4}
    return [
        sample(*one[:3], hidden=5, **near),
        sample(*one, hidden=5, direction="reverse", clip=0.7, **near),
        sample(*two, None, *states, direction="bidirectional", **special, **near),
        sample(*two, lengths, *states, direction="bidirectional", **near),
        sample(draw(0, 3, one[0].shape[2]), *one[1:], hidden=5),
    ]


def _lstm_samples() -> list[Sample]:
    peephole = draw(1, 15, seed=6)
    return [
        *_samples("lstm", input_forget=True),
        sample(*_operands("lstm", 1, 5), None, None, None, peephole, tolerance=1e-4),
    ]


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    steps, batch = xs[0].shape[:2]
    return 2 * steps * batch * xs[1].count


def _define(op: str, operands: str, samples: Any, **attrs: Attr) -> OpDef:
    names = [name.strip(" ?") for name in operands.split(",")]
    absent = {name: None for name in ("c0", "peephole") if name not in names}

    def infer(*types: Type, hidden: Any, direction: str, activations: Any, **_: Any) -> Any:
        given: dict[str, Any] = {**dict(zip(names, types, strict=True)), **absent}
        return _infer(op, **given, hidden=hidden, direction=direction, activations=activations)

    def reference(*arrays: Array | None, **attributes: Any) -> Any:
        given: dict[str, Any] = {**dict(zip(names, arrays, strict=True)), **absent}
        return _reference(op, **given, **attributes)

    return OpDef(
        PREFIX + op,
        Kind.COMPUTE,
        operands,
        infer=infer,
        reference=reference,
        grad=ROUNDS,
        flops=_flops,
        samples=samples,
        attrs={**ATTRS, **attrs},
        doc=f"`{op}` over p = x W' with int8 weights r; states are quantized in every step.",
    )


_FIRST = "p, r, scale, bias?, lengths?, h0?"
OPDEFS = [
    _define("rnn", _FIRST, lambda: _samples("rnn")),
    _define(
        "gru",
        _FIRST,
        lambda: _samples("gru", linear_before_reset=True),
        linear_before_reset=Attr("bool", False),
    ),
    _define("lstm", f"{_FIRST}, c0?, peephole?", _lstm_samples, input_forget=Attr("bool", False)),
]
