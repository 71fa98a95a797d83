"""Recurrent layers with int8 recurrent weights; quantized `rnn`, `gru` and `lstm` lower to them.

    h' = rne(h * (127 / peak)) with peak = max |h| of the row         -127 .. 127, in every step
    h R'  ->  (h' r') * (peak / 127 * scale)                          exact sums in i32

The cells are those of `ops.sequence.recurrent`. The input product of all steps, p = x W', is an
operand, so it is lowered like any other matmul. A GRU with linear_before_reset=False quantizes
r * h in the same way for its candidate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i8
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import ROUNDS, Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.sequence.recurrent import (
    GATES,
    LAYER_ATTRS,
    OPERANDS,
    InputProduct,
    StateProduct,
    infer_layer,
    run_layer,
)

PREFIX = "integer_"


def _infer(
    op: str, p: TensorType, r: TensorType, scale: TensorType, *operands: Any, **attrs: Any
) -> tuple[TensorType, ...]:
    expect.element("r", r, i8)
    expect.element("p", p, f32)
    for name, type_, rank in (("p", p, 3), ("r", r, 3), ("scale", scale, 2)):
        expect.rank(name, type_, rank)
    directions, rows, size = r.shape
    expect.shape("p", p, (*p.shape[:2], directions * rows))
    expect.shape("scale", scale, (directions, rows))
    attrs["hidden"] = attrs["hidden"] or (size if isinstance(size, int) else None)
    # check with the float op's rules, for an input without features
    empty = TensorType(f32, (*p.shape[:2], 0))
    w = TensorType(f32, (directions, rows, 0))
    return infer_layer(op, empty, w, r.with_dtype(f32), *operands, **attrs)


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
    op: str, p: Array, r: Array, scale: Array, *operands: Array | None, **attrs: Any
) -> tuple[Array, ...]:
    rows = r.shape[1]

    def products(i: int) -> tuple[InputProduct, StateProduct]:
        part = slice(i * rows, (i + 1) * rows)
        return lambda p: p[..., part], _recall(r[i], wide(scale[i]))

    return run_layer(op, p, r, products, *operands, **attrs)


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


_SAMPLES = {
    "rnn": lambda: _samples("rnn"),
    "gru": lambda: _samples("gru", linear_before_reset=True),
    "lstm": _lstm_samples,
}
OPDEFS = [
    OpDef(
        PREFIX + op,
        Kind.COMPUTE,
        f"p, r, scale, {OPERANDS[op]}",
        infer=partial(_infer, op),
        reference=partial(_reference, op),
        grad=ROUNDS,
        flops=_flops,
        samples=_SAMPLES[op],
        attrs=LAYER_ATTRS[op],
        doc=f"`{op}` over p = x W' with int8 weights r; states are quantized in every step.",
    )
    for op in GATES
]
