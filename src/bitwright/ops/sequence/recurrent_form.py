"""Recurrent layers as scans of other ops, from which gradients of rare variants are derived.

The formulas are those of `ops.sequence.recurrent`. A scan runs over p = x W' + Wb of one direction;
a direction over sequences of unequal length reverses them first, and a mask keeps states after the
end of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import full_like, number
from bitwright.ops.sequence.recurrence import DIRECTIONS, Activation
from bitwright.ops.sequence.scan_form import Values, scan_over

GATES = {"rnn": 1, "gru": 3, "lstm": 4}


def apply_activation(b: Builder, form: Activation, x: Value) -> Value:
    """The activation of a gate, by other ops."""
    if form.clip is not None:
        x = b.clip(x, number(b, -form.clip, x), number(b, form.clip, x))
    alpha, beta = form.alpha, form.beta
    forms: dict[str, Callable[[], Any]] = {
        "relu": lambda: b.relu(x),
        "tanh": lambda: b.tanh(x),
        "sigmoid": lambda: b.sigmoid(x),
        "softsign": lambda: b.softsign(x),
        "softplus": lambda: b.softplus(x),
        "affine": lambda: b.add(b.mul(x, alpha), beta),
        "leakyrelu": lambda: b.leaky_relu(x, alpha=alpha),
        "thresholdedrelu": lambda: b.where(b.ge(x, alpha), x, number(b, 0.0, x)),
        "scaledtanh": lambda: b.mul(b.tanh(b.mul(x, beta)), alpha),
        "hardsigmoid": lambda: b.hard_sigmoid(x, alpha=alpha, beta=beta),
        "elu": lambda: b.elu(x, alpha=alpha),
    }
    found = forms[form.name]()
    assert isinstance(found, Value)
    return found


def part(b: Builder, x: Value, start: Any, stop: Any, axis: int) -> Value:
    """Elements start … stop - 1 of an axis."""
    found = b.slice(x, starts=(start,), stops=(stop,), steps=(1,), axes=(axis,))
    assert isinstance(found, Value)
    return found


def gates_of(b: Builder, x: Value, count: int) -> list[Value]:
    """Equal parts of the last axis."""
    size, axis = x.shape[-1] // count, x.rank - 1
    return [part(b, x, i * size, (i + 1) * size, axis) for i in range(count)]


def pick(b: Builder, x: Value, at: int, axis: int = 0) -> Value:
    """One slice of an axis, without the axis."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    found = b.reshape(part(b, x, at, at + 1, axis), shape=shape)
    assert isinstance(found, Value)
    return found


def active_steps(b: Builder, lengths: Value, steps: Any) -> Value:
    """[S, B, 1]: whether a step lies within its sequence."""
    at = b.reshape(b.iota(length=steps, dtype=lengths.dtype), shape=(steps, 1, 1))
    found = b.lt(at, b.reshape(lengths, shape=(1, lengths.shape[0], 1)))
    assert isinstance(found, Value)
    return found


def compose_layer(
    op: str,
    b: Builder,
    x: Value,
    w: Value,
    r: Value,
    bias: Value | None,
    lengths: Value | None,
    h0: Value | None,
    c0: Value | None = None,
    peephole: Value | None = None,
    *,
    activations: Sequence[Sequence[Activation]],
    direction: str,
    linear_before_reset: bool = False,
    input_forget: bool = False,
    keep: bool = False,
) -> tuple[Value, ...]:
    """The results of a layer; with `keep`, those of its training op."""
    steps, batch = x.shape[:2]
    hidden = r.shape[2]
    found: list[list[Value]] = []
    initial = [h0, c0] if op == "lstm" else [h0]
    for i, reverse in enumerate(DIRECTIONS[direction]):
        zeros = b.expand(number(b, 0.0, x), shape=(batch, hidden))
        states = [zeros if state is None else pick(b, state, i) for state in initial]
        cell = _Cell(b, op, i, r, bias, peephole, activations[i], linear_before_reset, input_forget)
        p = b.matmul(x, b.transpose(pick(b, w, i), perm=(1, 0)))
        if cell.input_bias is not None:
            p = b.add(p, cell.input_bias)
        finals, rows = _run(b, cell, p, lengths, reverse, states)
        if steps == 0:
            finals = [full_like(b, 0.0, state) for state in finals]
        elif lengths is not None:
            ran = b.reshape(b.gt(lengths, 0), shape=(batch, 1))
            finals = [b.where(ran, state, number(b, 0.0, x)) for state in finals]
        found.append([rows[0], *finals, *(rows[1:] if keep else ())])
    results = []
    for n, parts in enumerate(zip(*found, strict=True)):
        gates = keep and n == len(initial) + 1
        axis = 2 if gates else 0 if 1 <= n <= len(initial) else 1
        stacked = [b.reshape(v, shape=(*v.shape[:axis], 1, *v.shape[axis:])) for v in parts]
        results.append(stacked[0] if len(stacked) == 1 else b.concat(*stacked, axis=axis))
    return tuple(results)


def _run(
    b: Builder,
    cell: _Cell,
    p: Value,
    lengths: Value | None,
    reverse: bool,
    states: list[Value],
) -> tuple[list[Value], list[Value]]:
    """Final states, and rows: hidden states, gates, and the state or term that training keeps."""
    if lengths is None:
        return scan_over(b, states, [p], cell.captures, cell.step, reverse)
    if reverse:
        p = b.reverse_sequence(p, lengths)
    sequences = [p, active_steps(b, lengths, p.shape[0])]
    finals, rows = scan_over(b, states, sequences, cell.captures, cell.step)
    if reverse:
        rows = [b.reverse_sequence(row, lengths) for row in rows]
    return finals, rows


class _Cell:
    """One step of a direction, in the body of a scan."""

    def __init__(
        self,
        b: Builder,
        op: str,
        at: int,
        r: Value,
        bias: Value | None,
        peephole: Value | None,
        forms: Sequence[Activation],
        linear_before_reset: bool,
        input_forget: bool,
    ) -> None:
        self.op, self.forms = op, forms
        self.linear_before_reset, self.input_forget = linear_before_reset, input_forget
        weights = b.transpose(pick(b, r, at), perm=(1, 0))
        size = r.shape[2]
        self.captures = [weights]
        self.input_bias: Value | None = None
        if op == "gru":
            self.captures = [
                part(b, weights, 0, 2 * size, 1),
                part(b, weights, 2 * size, 3 * size, 1),
            ]
        self.has_bias = self.has_peephole = False
        if bias is not None:
            both = pick(b, bias, at)
            given, recurrent = gates_of(b, both, 2)
            if op == "gru" and linear_before_reset:
                self.has_bias = True
                *rest, new = gates_of(b, recurrent, 3)
                zero = full_like(b, 0.0, new)
                self.captures.append(new)
                recurrent = b.concat(*rest, zero, axis=0)
            self.input_bias = b.add(given, recurrent)
        if peephole is not None:
            self.has_peephole = True
            self.captures.append(pick(b, peephole, at))

    def step(
        self, b: Builder, states: Values, elements: Values, captures: Values
    ) -> tuple[Values, Values]:
        p, *active = elements
        new, kept = getattr(self, f"_{self.op}")(b, states, p, captures)
        rows = [new[0], *kept]
        if active:
            zero = number(b, 0.0, p)
            rows = [b.where(active[0], row, zero) for row in rows]
            new = [b.where(active[0], a, old) for a, old in zip(new, states, strict=True)]
        return new, rows

    def _rnn(self, b: Builder, states: Values, p: Value, captures: Values) -> Any:
        h = apply_activation(b, self.forms[0], b.add(p, b.matmul(states[0], captures[0])))
        return [h], []

    def _gru(self, b: Builder, states: Values, p: Value, captures: Values) -> Any:
        (h,), (gate_weights, new_weights, *bias) = states, captures
        f, g = self.forms
        p_z, p_r, p_n = gates_of(b, p, 3)
        recalled = gates_of(b, b.matmul(h, gate_weights), 2)
        update, reset = (
            apply_activation(b, f, b.add(given, term))
            for given, term in zip((p_z, p_r), recalled, strict=True)
        )
        if self.linear_before_reset:
            kept = b.matmul(h, new_weights)
            kept = b.add(kept, bias[0]) if self.has_bias else kept
            term = b.mul(reset, kept)
        else:
            kept = b.mul(reset, h)
            term = b.matmul(kept, new_weights)
        new = apply_activation(b, g, b.add(p_n, term))
        h = b.add(b.mul(b.sub(number(b, 1.0, p), update), new), b.mul(update, h))
        return [h], [b.concat(update, reset, new, axis=1), kept]

    def _lstm(self, b: Builder, states: Values, p: Value, captures: Values) -> Any:
        (hidden, c), (weights, *peephole) = states, captures
        f, g, h = self.forms
        p_i, p_o, p_f, p_c = gates_of(b, b.add(p, b.matmul(hidden, weights)), 4)
        peeps = gates_of(b, peephole[0], 3) if self.has_peephole else [None] * 3

        def gate(given: Value, cell: Value, peep: Value | None) -> Value:
            with_peep = given if peep is None else b.add(given, b.mul(peep, cell))
            return apply_activation(b, f, with_peep)

        admit = gate(p_i, c, peeps[0])
        forget = b.sub(number(b, 1.0, p), admit) if self.input_forget else gate(p_f, c, peeps[2])
        new = apply_activation(b, g, p_c)
        c = b.add(b.mul(forget, c), b.mul(admit, new))
        output = gate(p_o, c, peeps[1])
        hidden = b.mul(output, apply_activation(b, h, c))
        return [hidden, c], [b.concat(admit, output, forget, new, axis=1), c]
