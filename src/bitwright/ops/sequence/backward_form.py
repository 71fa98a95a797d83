"""The steps of `ops.sequence.recurrent_backward` as scans, from which second derivatives follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import full_like, number
from bitwright.ops.core.reverse import Rule, composed
from bitwright.ops.sequence.recurrence import DIRECTIONS
from bitwright.ops.sequence.recurrent_form import active_steps, gates_of, part, pick
from bitwright.ops.sequence.scan_form import Values, scan_over

Given = dict[str, Value]
"""The elements of a step by name; absent ones are not there."""
StepForm = Callable[[Builder, Values, Given, Values], tuple[list[Value], list[Value]]]


def states_before(b: Builder, x: Value, first: Value | None, reverse: bool) -> Value:
    """The states before each step: x[S, B, H] moved by one step, with `first` at its start."""
    steps = x.shape[0]
    if steps == 0:
        return x
    if first is None:
        first = b.expand(number(b, 0.0, x), shape=x.shape[1:])
    start = b.reshape(first, shape=(1, *x.shape[1:]))
    parts = (part(b, x, 1, steps, 0), start) if reverse else (start, part(b, x, 0, steps - 1, 0))
    found = b.concat(*parts, axis=0)
    assert isinstance(found, Value)
    return found


def _slope(b: Builder, x: Value) -> Value:
    """x (1 - x), the derivative of a sigmoid with the value x."""
    found = b.mul(x, b.sub(number(b, 1.0, x), x))
    assert isinstance(found, Value)
    return found


def _tanh_slope(b: Builder, x: Value) -> Value:
    found = b.sub(number(b, 1.0, x), b.mul(x, x))
    assert isinstance(found, Value)
    return found


def _above(b: Builder, dh: Value, given: Given) -> Value:
    return b.add(dh, given["dy"]) if "dy" in given else dh


def _lstm_step(b: Builder, states: Values, at: Given, weights: Values) -> Any:
    dh, dc = states
    i, o, f, g = gates_of(b, at["gates"], 4)
    bent, here = b.tanh(at["cells"]), _above(b, dh, at)
    dc = b.add(dc, b.mul(b.mul(here, o), _tanh_slope(b, bent)))
    parts = (
        b.mul(b.mul(dc, g), _slope(b, i)),
        b.mul(b.mul(here, bent), _slope(b, o)),
        b.mul(b.mul(dc, at["before"]), _slope(b, f)),
        b.mul(b.mul(dc, i), _tanh_slope(b, g)),
    )
    row = b.concat(*parts, axis=1)
    return [b.matmul(row, weights[0]), b.mul(dc, f)], [row]


def _gru_step(linear_before_reset: bool) -> StepForm:
    def step(b: Builder, states: Values, at: Given, weights: Values) -> Any:
        z, r, n = gates_of(b, at["gates"], 3)
        size, h = z.shape[1], at["before"]
        both, new = part(b, weights[0], 0, 2 * size, 0), part(b, weights[0], 2 * size, 3 * size, 0)
        here = _above(b, states[0], at)
        dn = b.mul(b.mul(here, b.sub(number(b, 1.0, z), z)), _tanh_slope(b, n))
        dz = b.mul(b.mul(here, b.sub(h, n)), _slope(b, z))
        if linear_before_reset:
            dk, dr = b.mul(dn, r), b.mul(b.mul(dn, at["kept"]), _slope(b, r))
            through = b.matmul(dk, new)
        else:
            back = b.matmul(dn, new)
            dk, dr = dn, b.mul(b.mul(back, h), _slope(b, r))
            through = b.mul(back, r)
        through = b.add(b.add(b.mul(here, z), through), b.matmul(b.concat(dz, dr, axis=1), both))
        return [through], [b.concat(dz, dr, dn, axis=1), b.identity(dk)]

    return step


def _rnn_step(activation: str) -> StepForm:
    def step(b: Builder, states: Values, at: Given, weights: Values) -> Any:
        y, here = at["y"], _above(b, states[0], at)
        zero = number(b, 0.0, y)
        if activation == "tanh":
            row = b.mul(here, _tanh_slope(b, y))
        else:
            row = b.where(b.gt(y, zero), here, zero)
        return [b.matmul(row, weights[0])], [row]

    return step


def _compose(
    b: Builder,
    step: StepForm,
    r: Value,
    sequences: dict[str, tuple[Value, int]],
    before: tuple[Value, Value | None] | None,
    ends: Sequence[Value | None],
    lengths: Value | None,
    direction: str,
) -> tuple[Any, ...]:
    """Rows, then the gradients of the first states; `sequences` have the axis of directions."""
    first = next(iter(sequences.values()))[0]
    steps = first.shape[0]
    found = []
    for i, reverse in enumerate(DIRECTIONS[direction]):
        given = {name: pick(b, x, i, axis) for name, (x, axis) in sequences.items()}
        if before is not None:
            given["before"] = pick(b, before[0], i, 1)
        moves = reverse and lengths is not None and steps != 0
        if moves:
            given = {name: b.reverse_sequence(x, lengths) for name, x in given.items()}
        if before is not None:
            start = None if before[1] is None else pick(b, before[1], i)
            given["before"] = states_before(b, given["before"], start, reverse and not moves)
        like = given.get("before", next(iter(given.values())))
        zeros = b.expand(number(b, 0.0, r), shape=(like.shape[1], r.shape[2]))
        states = [zeros if end is None else pick(b, end, i) for end in ends]
        if lengths is not None:
            ran = b.reshape(b.gt(lengths, 0), shape=(lengths.shape[0], 1))
            states = [b.where(ran, state, number(b, 0.0, r)) for state in states]
            given["active"] = active_steps(b, lengths, steps)
        names = list(given)

        def body(
            inner: Builder,
            states: Values,
            elements: Values,
            weights: Values,
            names: list[str] = names,
        ) -> tuple[Values, Values]:
            at = dict(zip(names, elements, strict=True))
            after, rows = step(inner, states, at, weights)
            if "active" in at:
                active, zero = at["active"], number(inner, 0.0, rows[0])
                rows = [inner.where(active, row, zero) for row in rows]
                pairs = zip(after, states, strict=True)
                after = [inner.where(active, new, old) for new, old in pairs]
            return after, rows

        backwards = not reverse or moves
        sequence = list(given.values())
        finals, rows = scan_over(b, states, sequence, [pick(b, r, i)], body, backwards)
        if steps == 0:  # the layer gives zeros, which do not depend on its first states
            finals = [full_like(b, 0.0, state) for state in finals]
        if moves:
            rows = [b.reverse_sequence(row, lengths) for row in rows]
        rows = [b.reshape(row, shape=(*row.shape[:2], 1, row.shape[2])) for row in rows]
        finals = [b.reshape(state, shape=(1, *state.shape)) for state in finals]
        found.append([*rows, *finals])
    return tuple(
        parts[0] if len(parts) == 1 else b.concat(*parts, axis=0 if parts[0].rank == 3 else 2)
        for parts in zip(*found, strict=True)
    )


def _sequences(**given: tuple[Value | None, int]) -> dict[str, tuple[Value, int]]:
    return {name: (x, axis) for name, (x, axis) in given.items() if x is not None}


def _lstm(
    b: Builder,
    r: Value,
    gates: Value,
    cells: Value,
    dy: Value | None,
    dh: Value | None,
    dc: Value | None,
    lengths: Value | None,
    c0: Value | None,
    direction: str,
) -> tuple[Any, ...]:
    given = _sequences(gates=(gates, 2), cells=(cells, 1), dy=(dy, 1))
    return _compose(b, _lstm_step, r, given, (cells, c0), (dh, dc), lengths, direction)


def _gru(
    b: Builder,
    r: Value,
    gates: Value,
    y: Value,
    kept: Value,
    dy: Value | None,
    dh: Value | None,
    lengths: Value | None,
    h0: Value | None,
    direction: str,
    linear_before_reset: bool,
) -> tuple[Any, ...]:
    given = _sequences(gates=(gates, 2), kept=(kept, 1), dy=(dy, 1))
    step = _gru_step(linear_before_reset)
    return _compose(b, step, r, given, (y, h0), (dh,), lengths, direction)


def _rnn(
    b: Builder,
    r: Value,
    y: Value,
    dy: Value | None,
    dh: Value | None,
    lengths: Value | None,
    direction: str,
    activation: str,
) -> tuple[Any, ...]:
    given = _sequences(y=(y, 1), dy=(dy, 1))
    return _compose(b, _rnn_step(activation), r, given, None, (dh,), lengths, direction)


def compose_backward(op: str) -> Rule:
    """The gradient rule of a backward op, through its composed form."""
    forms: dict[str, Callable[..., Any]] = {
        "lstm_backward": _lstm,
        "gru_backward": _gru,
        "rnn_backward": _rnn,
    }
    return composed(forms[op])
