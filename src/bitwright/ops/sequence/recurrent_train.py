"""Recurrent layers that keep what their gradients read (`ops.sequence.recurrent_rules`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.types import TensorType
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.sequence.recurrence import infer_recurrent, sigmoid
from bitwright.ops.sequence.recurrent_backward import DIRECTION, TimeOrder, over_directions
from bitwright.ops.sequence.recurrent_rules import train_gradient

Type = TensorType | None
_GATES = {"gru": 3, "lstm": 4}
Cell = Callable[[Array, tuple[Array, ...]], tuple[tuple[Array, ...], Array, Array]]
"""p of a step and the states to the new states, the gates, and what is kept beside them."""


def _infer(
    op: str,
    x: TensorType,
    w: TensorType,
    r: TensorType,
    bias: Type,
    lengths: Type,
    h0: Type,
    c0: Type = None,
    *,
    hidden: int | None,
    direction: str,
    **_: Any,
) -> tuple[TensorType, ...]:
    states, gates = {"h0": h0, "c0": c0}, _GATES[op]
    y, last = infer_recurrent(x, w, r, bias, lengths, states, gates, hidden, direction)
    steps, directions, batch, size = y.shape
    kept = y.with_shape((steps, batch, directions, gates * size))
    return (y, last, *(last,) * (op == "lstm"), kept, y)


def _lstm_cell(weights: Array, bias: Array, linear: bool) -> Cell:
    def cell(p: Array, states: tuple[Array, ...]) -> Any:
        h, c = states
        given = np.split(p + h @ weights + bias, 4, axis=-1)
        i, o, f = (sigmoid(part) for part in given[:3])
        g = np.tanh(given[3])
        c = f * c + i * g
        return (o * np.tanh(c), c), np.concatenate([i, o, f, g], axis=-1), c

    return cell


def _gru_cell(weights: Array, bias: Array, linear: bool) -> Cell:
    size = weights.shape[0]
    both, new = weights[:, : 2 * size], weights[:, 2 * size :]

    def cell(p: Array, states: tuple[Array, ...]) -> Any:
        (h,) = states
        z, r = np.split(sigmoid(p[:, : 2 * size] + h @ both + bias[: 2 * size]), 2, axis=-1)
        kept = h @ new + bias[2 * size :] if linear else r * h
        recalled = r * kept if linear else kept @ new + bias[2 * size :]
        n = np.tanh(p[:, 2 * size :] + recalled)
        return ((1 - z) * n + z * h,), np.concatenate([z, r, n], axis=-1), kept

    return cell


def _reference(
    op: str,
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None,
    lengths: Array | None,
    *initial: Array | None,
    hidden: int | None,
    direction: str,
    linear_before_reset: bool = False,
) -> tuple[Array, ...]:
    steps, batch = x.shape[:2]
    if lengths is not None and lengths.size and not 0 <= lengths.min() <= lengths.max() <= steps:
        raise RunError("a sequence length is out of range", expected=f"0 to {steps}", found=lengths)
    size, rows = r.shape[2], r.shape[1]

    def run(d: TimeOrder) -> tuple[Array, ...]:
        both = np.zeros(2 * rows) if bias is None else wide(bias[d.at])
        make = _lstm_cell if op == "lstm" else _gru_cell
        cell = make(wide(r[d.at]).T, both[rows:], linear_before_reset)
        p = np.take_along_axis(wide(x), d.order, axis=0) @ wide(w[d.at]).T + both[:rows]
        zeros = np.zeros((batch, size))
        states = tuple(zeros if state is None else wide(state[d.at]) for state in initial)
        made: list[list[Array]] = []
        for t in range(steps):
            after, gates, kept = cell(p[t], states)
            made.append([np.where(d.going[t], part, 0.0) for part in (after[0], gates, kept)])
            pairs = zip(after, states, strict=True)
            states = tuple(np.where(d.going[t], new, old) for new, old in pairs)
        widths = (size, rows, size)
        sequences = [
            d.put([step[i] for step in made][::-1], (batch, width))
            for i, width in enumerate(widths)
        ]
        finals = [np.where(d.ran, state, 0.0) for state in states]
        return sequences[0], *finals, *sequences[1:]

    y, *finals, gates, kept = over_directions(direction, steps, batch, lengths, run)
    return y.swapaxes(1, 2), *finals, gates, kept.swapaxes(1, 2)


def _samples(op: str) -> list[Sample]:
    rows, found = _GATES[op] * 5, []
    lengths = np.array([4, 0, 2], np.int32)
    flags: list[dict[str, Any]] = [{}]
    if op == "gru":
        flags = [{"linear_before_reset": linear} for linear in (False, True)]
    for directions, name in ((1, "forward"), (1, "reverse"), (2, "bidirectional")):
        first = [
            draw(4, 3, 2),
            draw(directions, rows, 2, seed=1),
            draw(directions, rows, 5, seed=2),
            draw(directions, 2 * rows, seed=3),
        ]
        states = [draw(directions, 3, 5, seed=4 + i) for i in range(1 + (op == "lstm"))]
        for flag in flags:
            found += [
                sample(*first[:3], direction=name, **flag),
                sample(*first, lengths, *states, hidden=5, direction=name, **flag),
            ]
    return [*found, sample(draw(0, 3, 2), *first[1:3], direction="bidirectional")]


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    """Operations of both products of every step."""
    steps, batch = xs[0].shape[:2]
    return 2 * steps * batch * (xs[1].count + xs[2].count)


def _opdef(op: str, states: str, more: dict[str, Attr], doc: str) -> OpDef:
    return OpDef(
        f"{op}_train",
        Kind.COMPUTE,
        f"x, w, r, bias?, lengths?, {states}",
        infer=lambda *types, **attrs: _infer(op, *types, **attrs),
        reference=lambda *arrays, **attrs: _reference(op, *arrays, **attrs),
        samples=lambda: _samples(op),
        flops=_flops,
        grad=train_gradient,
        attrs={"hidden": Attr("int", None), "direction": DIRECTION, **more},
        doc=doc,
    )


OPDEFS = [
    _opdef(
        "lstm",
        "h0?, c0?",
        {},
        "lstm that also returns the activated gates[S, B, directions, 4H] and all cell states.",
    ),
    _opdef(
        "gru",
        "h0?",
        {"linear_before_reset": Attr("bool", False)},
        "gru that also returns the activated gates[S, B, directions, 3H] and, for every step, the "
        "term that the reset gate multiplies (linear_before_reset) or r*h.",
    ),
]
