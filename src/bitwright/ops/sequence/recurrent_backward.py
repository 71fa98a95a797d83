"""Gradients through the steps of recurrent layers, from what the training forward keeps.

The steps run backwards. With dh and dc the gradients of the states after a step, and dy_t added to
dh, for gates as `ops.sequence.recurrent` names them (activated values):

    lstm   dc += dh*o*(1 - tanh(c)^2)
           dgates = (dc*g*i*(1-i), dh*tanh(c)*o*(1-o), dc*c'*f*(1-f), dc*i*(1-g^2))    c' before
           dh = dgates R      dc = dc*f
    gru    dn = dh*(1-z)*(1-n^2)    dz = dh*(h-n)*z*(1-z)
           linear_before_reset:  dk = dn*r     dr = dn*k*r*(1-r)     dh = dh*z + (dz, dr, dk) R
           otherwise:  m = dn R_n    dr = m*h*r*(1-r)    dh = dh*z + m*r + (dz, dr) R_zr
    rnn    dgates = dh*(1 - y^2), or dh*(y > 0)       dh = dgates R

Gradients of x and the weights are products of all steps at once, which
`ops.sequence.recurrent_rules` appends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.dtype import i32, i64
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.sequence.backward_form import compose_backward
from bitwright.ops.sequence.recurrence import DIRECTIONS, require_lengths

Type = TensorType | None
DIRECTION = Attr("str", "forward", choices=tuple(DIRECTIONS))


def check_lengths(lengths: Type, batch: Any) -> None:
    if lengths is not None:
        expect.dtype("lengths", lengths, lambda d: d in (i32, i64), "i32 or i64")
        expect.shape("lengths", lengths, (batch,))


def _infer(
    r: TensorType, gates: TensorType, given: dict[str, Type], lengths: Type, per: int
) -> tuple[TensorType, TensorType]:
    """The types of dgates and dh0; `given` are operands in the shape of y, or of a state."""
    expect.floating("r", r)
    expect.same_dtype(r, gates, *given.values())
    expect.rank("r", r, 3)
    directions, _, hidden = r.shape
    expect.size("axis 1 of r", r.shape[1], per * hidden)
    expect.rank("gates", gates, 4)
    steps, batch = gates.shape[:2]
    expect.shape("gates", gates, (steps, batch, directions, per * hidden))
    check_lengths(lengths, batch)
    state = (directions, batch, hidden)
    for name, type_ in given.items():
        if type_ is not None:
            is_state = name in ("dh", "dc", "h0", "c0")
            expect.shape(name, type_, state if is_state else (steps, *state))
    return gates, TensorType(r.dtype, state)


def _infer_lstm(
    r: TensorType,
    gates: TensorType,
    cells: TensorType,
    dy: Type,
    dh: Type,
    dc: Type,
    lengths: Type,
    c0: Type,
    direction: str,
) -> tuple[TensorType, ...]:
    given = {"cells": cells, "dy": dy, "dh": dh, "dc": dc, "c0": c0}
    dgates, state = _infer(r, gates, given, lengths, 4)
    return dgates, state, state


def _infer_gru(
    r: TensorType,
    gates: TensorType,
    y: TensorType,
    kept: TensorType,
    dy: Type,
    dh: Type,
    lengths: Type,
    h0: Type,
    **_: Any,
) -> tuple[TensorType, ...]:
    given = {"y": y, "kept": kept, "dy": dy, "dh": dh, "h0": h0}
    dgates, state = _infer(r, gates, given, lengths, 3)
    return dgates, gates.with_shape((*gates.shape[:3], r.shape[2])), state


def _infer_rnn(
    r: TensorType, y: TensorType, dy: Type, dh: Type, lengths: Type, **_: Any
) -> tuple[TensorType, ...]:
    expect.rank("y", y, 4)
    steps, directions, batch, hidden = y.shape
    gates = y.with_shape((steps, batch, directions, hidden))
    return _infer(r, gates, {"y": y, "dy": dy, "dh": dh}, lengths, 1)


class TimeOrder:
    """One direction with its arrays in the order of time, [S, B, …]."""

    def __init__(
        self, at: int, reverse: bool, steps: int, batch: int, lengths: Array | None
    ) -> None:
        self.at = at
        limits = np.full(batch, steps) if lengths is None else lengths
        step = np.arange(steps)[:, None]
        self.going = (step < limits)[..., None]
        self.ran = (limits > 0)[:, None]
        order = np.where(self.going[..., 0] & reverse, limits - 1 - step, step)
        self.order = order[..., None]

    def rows(self, x: Array | None, axis: int) -> Array:
        """A sequence whose direction is `axis`; zeros for an absent one."""
        if x is None:
            return np.zeros((*self.order.shape[:2], 1))
        return np.take_along_axis(np.take(wide(x), self.at, axis), self.order, axis=0)

    def before(self, x: Array, first: Array | None) -> Array:
        """The states before each step."""
        start = np.zeros_like(x[:1]) if first is None else wide(first)[None, self.at]
        return np.concatenate([start, x])[: len(x)]

    def last(self, x: Array | None, like: tuple[int, ...]) -> Array:
        """The gradient of a final state; an empty sequence has none."""
        return np.where(self.ran, 0.0 if x is None else wide(x)[self.at], np.zeros(like))

    def put(self, rows: list[Array], like: tuple[int, ...]) -> Array:
        """Rows made from the last step to the first, at their places."""
        stacked = np.stack(rows[::-1]) if rows else np.zeros((0, *like))
        return np.take_along_axis(stacked, self.order, axis=0)


def over_directions(
    direction: str, steps: int, batch: int, lengths: Array | None, run: Callable[[TimeOrder], Any]
) -> tuple[Array, ...]:
    """The results of each direction, stacked: sequences along axis 2, states along axis 0."""
    limits = None if lengths is None else lengths.astype(np.int64)
    if limits is not None:
        require_lengths(limits, steps)
    found = [
        run(TimeOrder(i, reverse, steps, batch, limits))
        for i, reverse in enumerate(DIRECTIONS[direction])
    ]
    return tuple(
        np.stack(parts, axis=2 if parts[0].ndim == 3 else 0) for parts in zip(*found, strict=True)
    )


def _lstm(
    r: Array,
    gates: Array,
    cells: Array,
    dy: Array | None,
    dh: Array | None,
    dc: Array | None,
    lengths: Array | None,
    c0: Array | None,
    direction: str,
) -> tuple[Array, ...]:
    hidden = r.shape[2]

    def run(d: TimeOrder) -> tuple[Array, ...]:
        values, c, above = d.rows(gates, 2), d.rows(cells, 1), d.rows(dy, 1)
        c_before, weights, shape = d.before(c, c0), wide(r)[d.at], c.shape[1:]
        dh_t, dc_t, rows = d.last(dh, shape), d.last(dc, shape), []
        for t in reversed(range(len(c))):
            i, o, f, g = np.split(values[t], 4, axis=-1)
            bent = np.tanh(c[t])
            here = dh_t + above[t]
            dc_new = dc_t + here * o * (1 - bent**2)
            parts = (
                dc_new * g * i * (1 - i),
                here * bent * o * (1 - o),
                dc_new * c_before[t] * f * (1 - f),
                dc_new * i * (1 - g**2),
            )
            row = np.where(d.going[t], np.concatenate(parts, axis=-1), 0.0)
            dh_t = np.where(d.going[t], row @ weights, dh_t)
            dc_t = np.where(d.going[t], dc_new * f, dc_t)
            rows.append(row)
        return d.put(rows, (gates.shape[1], 4 * hidden)), dh_t, dc_t

    return over_directions(direction, gates.shape[0], gates.shape[1], lengths, run)


def _gru(
    r: Array,
    gates: Array,
    y: Array,
    kept: Array,
    dy: Array | None,
    dh: Array | None,
    lengths: Array | None,
    h0: Array | None,
    direction: str,
    linear_before_reset: bool,
) -> tuple[Array, ...]:
    hidden = r.shape[2]

    def run(d: TimeOrder) -> tuple[Array, ...]:
        values, above, term = d.rows(gates, 2), d.rows(dy, 1), d.rows(kept, 1)
        h_before, weights = d.before(d.rows(y, 1), h0), wide(r)[d.at]
        both, new = weights[: 2 * hidden], weights[2 * hidden :]
        dh_t, rows, terms = d.last(dh, h_before.shape[1:]), [], []
        for t in reversed(range(len(h_before))):
            z, reset, n = np.split(values[t], 3, axis=-1)
            here = dh_t + above[t]
            dn = here * (1 - z) * (1 - n**2)
            dz = here * (h_before[t] - n) * z * (1 - z)
            slope = reset * (1 - reset)
            if linear_before_reset:
                dk, dr = dn * reset, dn * term[t] * slope
                through = here * z + dk @ new
            else:
                back = dn @ new
                dk, dr = dn, back * h_before[t] * slope
                through = here * z + back * reset
            through = through + np.concatenate([dz, dr], axis=-1) @ both
            rows.append(np.where(d.going[t], np.concatenate([dz, dr, dn], axis=-1), 0.0))
            terms.append(np.where(d.going[t], dk, 0.0))
            dh_t = np.where(d.going[t], through, dh_t)
        batch = gates.shape[1]
        return d.put(rows, (batch, 3 * hidden)), d.put(terms, (batch, hidden)), dh_t

    return over_directions(direction, gates.shape[0], gates.shape[1], lengths, run)


def _rnn(
    r: Array,
    y: Array,
    dy: Array | None,
    dh: Array | None,
    lengths: Array | None,
    direction: str,
    activation: str,
) -> tuple[Array, ...]:
    def run(d: TimeOrder) -> tuple[Array, ...]:
        h, above, weights = d.rows(y, 1), d.rows(dy, 1), wide(r)[d.at]
        slopes = 1 - h**2 if activation == "tanh" else (h > 0).astype(np.float64)
        dh_t, rows = d.last(dh, h.shape[1:]), []
        for t in reversed(range(len(h))):
            rows.append(np.where(d.going[t], (dh_t + above[t]) * slopes[t], 0.0))
            dh_t = np.where(d.going[t], rows[-1] @ weights, dh_t)
        return d.put(rows, h.shape[1:]), dh_t

    return over_directions(direction, y.shape[0], y.shape[2], lengths, run)


_STEPS, _BATCH, _HIDDEN = 4, 3, 5


def _drawn(seed: int, directions: int, per: int = 0, low: float = -1, high: float = 1) -> Array:
    """A sequence like y, or like the gates; a state if `per` is -1."""
    shape: tuple[int, ...] = (_STEPS, directions, _BATCH, _HIDDEN)
    if per > 0:
        shape = (_STEPS, _BATCH, directions, per * _HIDDEN)
    return draw(*(shape[1:] if per < 0 else shape), seed=seed, low=low, high=high)


def _weights(per: int, directions: int) -> Array:
    return draw(directions, per * _HIDDEN, _HIDDEN)


_LENGTHS = np.array([4, 0, 2], np.int32)


def _lstm_samples() -> list[Sample]:
    found = []
    for directions, name in ((1, "forward"), (1, "reverse"), (2, "bidirectional")):
        first = [
            _weights(4, directions),
            _drawn(1, directions, 4, low=0.1, high=0.9),
            _drawn(2, directions),
        ]
        ends = [_drawn(seed, directions, -1) for seed in (4, 5)]
        dy, c0 = _drawn(3, directions), _drawn(6, directions, -1)
        found += [
            sample(*first, dy, direction=name),
            sample(*first, dy, *ends, _LENGTHS, c0, direction=name),
            sample(*first, None, ends[0], None, None, c0, direction=name),
        ]
    return found


def _gru_samples() -> list[Sample]:
    found = []
    for directions, name in ((1, "forward"), (1, "reverse"), (2, "bidirectional")):
        first = [
            _weights(3, directions),
            _drawn(1, directions, 3, low=0.1, high=0.9),
            _drawn(2, directions),
            _drawn(7, directions),
        ]
        dy, dh, h0 = _drawn(3, directions), _drawn(4, directions, -1), _drawn(6, directions, -1)
        for linear in (False, True):
            attrs: dict[str, Any] = {"direction": name, "linear_before_reset": linear}
            found += [
                sample(*first, dy, **attrs),
                sample(*first, dy, dh, _LENGTHS.astype(np.int64), h0, **attrs),
                sample(*first, None, dh, **attrs),
            ]
    return found


def _rnn_samples() -> list[Sample]:
    found = []
    for directions, name in ((1, "forward"), (1, "reverse"), (2, "bidirectional")):
        first = [_weights(1, directions), _drawn(2, directions)]
        dy, dh = _drawn(3, directions), _drawn(4, directions, -1)
        found += [
            sample(*first, dy, direction=name),
            sample(*first, dy, dh, _LENGTHS, direction=name),
            sample(*first, None, dh, direction=name, activation="relu"),
        ]
    return found


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    """Operations of the recurrent product of every step."""
    steps, batch = ys[0].shape[:2]
    return 2 * steps * batch * xs[0].count


OPDEFS = [
    OpDef(
        name,
        Kind.COMPUTE,
        operands,
        infer=infer,
        reference=reference,
        samples=samples,
        flops=_flops,
        grad=compose_backward(name),
        attrs={"direction": DIRECTION, **attrs},
        doc=doc,
    )
    for name, operands, infer, reference, samples, attrs, doc in (
        (
            "lstm_backward",
            "r, gates, cells, dy?, dh?, dc?, lengths?, c0?",
            _infer_lstm,
            _lstm,
            _lstm_samples,
            {},
            "Gradients of the gates' inputs[S, B, directions, 4H], the first hidden state and the "
            "first cell state, from results of lstm_train and gradients of y, h and c.",
        ),
        (
            "gru_backward",
            "r, gates, y, kept, dy?, dh?, lengths?, h0?",
            _infer_gru,
            _gru,
            _gru_samples,
            {"linear_before_reset": Attr("bool", False)},
            "Gradients of the gates' inputs[S, B, directions, 3H], of the recurrent term of the "
            "candidate, and the first state, from results of gru_train and gradients of y and h.",
        ),
        (
            "rnn_backward",
            "r, y, dy?, dh?, lengths?",
            _infer_rnn,
            _rnn,
            _rnn_samples,
            {"activation": Attr("str", "tanh", choices=("tanh", "relu"))},
            "Gradients of the cells' inputs[S, B, directions, H] and the first state, from the "
            "hidden states y of rnn and gradients of y and h.",
        ),
    )
]
