"""Recurrent layers with the semantics of ONNX LSTM, GRU and RNN (layout 0).

With p_g = x_t W_g' + h R_g' + Wb_g + Rb_g for gate g, and f, g, h the activations:

    rnn    h = f(p)
    gru    z = f(p_z)   r = f(p_r)   n = g(x_t W_n' + (r*h) R_n' + Wb_n + Rb_n)
           h = (1 - z)*n + z*h       linear_before_reset: n = g(x_t W_n' + Wb_n + r*(h R_n' + Rb_n))
    lstm   i = f(p_i + P_i*c)   f = f(p_f + P_f*c)   c = f*c + i*g(p_c)
           o = f(p_o + P_o*c)   h = o*h(c)           gates stored in the order i, o, f, c
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.sequence.recurrence import (
    ATTRS,
    Activation,
    Cell,
    States,
    check_activations,
    choose_activations,
    infer_recurrent,
    run_directions,
)
from bitwright.ops.sequence.recurrent_rules import layer_gradient

Type = TensorType | None
InputProduct = Callable[[Array], Array]
"""x W' of all gates, from the input of one step."""
StateProduct = Callable[[Array, slice], Array]
"""h R' of a slice of gate rows, from the hidden states."""
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
_FIRST = "bias?, lengths?, h0?"
OPERANDS = {"rnn": _FIRST, "gru": _FIRST, "lstm": f"{_FIRST}, c0?, peephole?"}
"""The operands after the weights."""
LAYER_ATTRS = {
    "rnn": ATTRS,
    "gru": {**ATTRS, "linear_before_reset": Attr("bool", False)},
    "lstm": {**ATTRS, "input_forget": Attr("bool", False)},
}
_DEFAULTS = {"rnn": ["tanh"], "gru": ["sigmoid", "tanh"], "lstm": ["sigmoid", "tanh", "tanh"]}


def gate_activations(
    op: str, direction: str, activations: Any, **limits: Any
) -> list[list[Activation]]:
    """The activations f, g and h that the op has, for each direction; h has no clip."""
    chosen = choose_activations(_DEFAULTS[op], direction, activations, **limits)
    if op != "lstm":
        return chosen
    return [[f, g, replace(h, clip=None)] for f, g, h in chosen]


def rnn_cell(
    share: InputProduct, recall: StateProduct, w_bias: Array, r_bias: Array, f: Activation
) -> Cell:
    return lambda x, states: (f(share(x) + recall(states[0], np.s_[:]) + w_bias + r_bias),)


def gru_cell(
    share: InputProduct,
    recall: StateProduct,
    w_bias: Array,
    r_bias: Array,
    size: int,
    linear_before_reset: bool,
    f: Activation,
    g: Activation,
) -> Cell:
    gates, new = np.s_[: 2 * size], np.s_[2 * size :]

    def cell(x: Array, states: States) -> States:
        (h,) = states
        given = share(x) + w_bias
        entering = given[..., gates] + recall(h, gates) + r_bias[gates]
        update, reset = np.split(f(entering), 2, axis=-1)
        if linear_before_reset:
            recalled = reset * (recall(h, new) + r_bias[new])
        else:
            recalled = recall(reset * h, new) + r_bias[new]
        return ((1 - update) * g(given[..., new] + recalled) + update * h,)

    return cell


def lstm_cell(
    share: InputProduct,
    recall: StateProduct,
    w_bias: Array,
    r_bias: Array,
    peeps: Array,
    input_forget: bool,
    f: Activation,
    g: Activation,
    h: Activation,
) -> Cell:
    peep_i, peep_o, peep_f = np.split(peeps, 3)

    def cell(x: Array, states: States) -> States:
        hidden, c = states
        entering = share(x) + recall(hidden, np.s_[:]) + w_bias + r_bias
        p_i, p_o, p_f, p_c = np.split(entering, 4, axis=-1)
        admit = f(p_i + peep_i * c)
        keep = 1 - admit if input_forget else f(p_f + peep_f * c)
        c = keep * c + admit * g(p_c)
        return f(p_o + peep_o * c) * h(c), c

    return cell


def infer_layer(
    op: str,
    x: TensorType,
    w: TensorType,
    r: TensorType,
    bias: Type,
    lengths: Type,
    h0: Type,
    c0: Type = None,
    peephole: Type = None,
    *,
    hidden: int | None,
    direction: str,
    activations: Any,
    **_: Any,
) -> tuple[TensorType, ...]:
    check_activations(activations, len(_DEFAULTS[op]), direction)
    states = {"h0": h0, "c0": c0}
    y, last = infer_recurrent(x, w, r, bias, lengths, states, GATES[op], hidden, direction)
    if peephole is not None:
        expect.shape("peephole", peephole, (last.shape[0], 3 * last.shape[2]))
    return (y, last, last) if op == "lstm" else (y, last)


def run_layer(
    op: str,
    x: Array,
    r: Array,
    products: Callable[[int], tuple[InputProduct, StateProduct]],
    bias: Array | None,
    lengths: Array | None,
    h0: Array | None,
    c0: Array | None = None,
    peephole: Array | None = None,
    *,
    hidden: int | None,
    direction: str,
    activations: Any,
    linear_before_reset: bool = False,
    input_forget: bool = False,
    **limits: Any,
) -> tuple[Array, ...]:
    """The layer with the products x W' and h R' that `products` makes for each direction."""
    rows, size = r.shape[1:]
    cells: list[Cell] = []
    for i, functions in enumerate(gate_activations(op, direction, activations, **limits)):
        both = np.zeros(2 * rows) if bias is None else wide(bias[i])
        weights = (*products(i), both[:rows], both[rows:])
        if op == "rnn":
            cells.append(rnn_cell(*weights, *functions))
        elif op == "gru":
            cells.append(gru_cell(*weights, size, linear_before_reset, *functions))
        else:
            peeps = np.zeros(3 * size) if peephole is None else wide(peephole[i])
            cells.append(lstm_cell(*weights, peeps, input_forget, *functions))
    initial = [h0, c0] if op == "lstm" else [h0]
    return run_directions(x, lengths, direction, initial, size, cells)


def _infer(op: str, x: TensorType, *operands: Any, **attrs: Any) -> tuple[TensorType, ...]:
    if op == "lstm":
        expect.same_dtype(x, operands[-1])
    return infer_layer(op, x, *operands, **attrs)


def _reference(
    op: str, x: Array, w: Array, r: Array, *operands: Array | None, **attrs: Any
) -> tuple[Array, ...]:
    def products(i: int) -> tuple[InputProduct, StateProduct]:
        given, recalled = wide(w[i]).T, wide(r[i]).T
        return lambda x: x @ given, lambda h, part: h @ recalled[:, part]

    return run_layer(op, x, r, products, *operands, **attrs)


def _operands(gates: int, directions: int, hidden: int) -> list[Array]:
    """x, w, r and bias for 4 steps, a batch of 3 and 2 features."""
    return [
        draw(4, 3, 2),
        draw(directions, gates * hidden, 2, seed=1),
        draw(directions, gates * hidden, hidden, seed=2),
        draw(directions, 2 * gates * hidden, seed=3),
    ]


def _samples(gates: int, activations: list[str], **special: Any) -> list[Sample]:
    one, two = _operands(gates, 1, 5), _operands(gates, 2, 5)
    lengths = np.array([4, 0, 2], np.int32)
    states = [draw(2, 3, 5, seed=4)] + [draw(2, 3, 5, seed=5)] * (gates == 4)
    halves = [x.astype(np.float16) for x in one]
    return [
        sample(*one[:3], hidden=5),
        sample(*one, hidden=5, direction="reverse", clip=0.7),
        sample(*two, None, *states, hidden=5, direction="bidirectional", **special),
        sample(*two, lengths, *states, hidden=5, direction="bidirectional"),
        sample(*one[:3], None, lengths.astype(np.int64), activations=activations, alpha=[0.3]),
        sample(draw(0, 3, 2), *one[1:], hidden=5),
        sample(*halves, hidden=5, tolerance=1e-2),
    ]


def _lstm_samples() -> list[Sample]:
    peephole = draw(1, 15, seed=6)
    return [
        *_samples(4, ["HardSigmoid", "Softsign", "Elu"], input_forget=True),
        sample(*_operands(4, 1, 5), None, None, None, peephole, hidden=5),
    ]


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    """Operations of both products of every step, for all gates and directions."""
    steps, batch = xs[0].shape[:2]
    return 2 * steps * batch * (xs[1].count + xs[2].count)


_DOCS = {
    "rnn": "plain recurrent cells over x[S, B, I]: all hidden states, and the last.",
    "gru": "gated recurrent units over x[S, B, I]: all hidden states, and the last.",
    "lstm": "long short-term memory over x[S, B, I]: all hidden states, the last hidden state, "
    "the last cell state.",
}
_SAMPLES = {
    "rnn": lambda: _samples(1, ["LeakyRelu"]),
    "gru": lambda: _samples(3, ["Affine", "ScaledTanh"], linear_before_reset=True),
    "lstm": _lstm_samples,
}
OPDEFS = [
    OpDef(
        op,
        Kind.COMPUTE,
        f"x, w, r, {OPERANDS[op]}",
        infer=partial(_infer, op),
        reference=partial(_reference, op),
        flops=_flops,
        samples=_SAMPLES[op],
        grad=layer_gradient(op, gate_activations),
        attrs=LAYER_ATTRS[op],
        doc=f"A layer of {_DOCS[op]}",
    )
    for op in GATES
]
