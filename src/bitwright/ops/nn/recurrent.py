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
from typing import Any

import numpy as np

from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.nn.recurrence import (
    ATTRS,
    Activation,
    Cell,
    States,
    check_activations,
    choose_activations,
    infer_recurrent,
    run_directions,
)

Type = TensorType | None
InputProduct = Callable[[Array], Array]
"""x W' of all gates, from the input of one step."""
StateProduct = Callable[[Array, slice], Array]
"""h R' of a slice of gate rows, from the hidden states."""
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
_DEFAULTS = {"rnn": ["tanh"], "gru": ["sigmoid", "tanh"], "lstm": ["sigmoid", "tanh", "tanh"]}


def gate_activations(
    op: str, direction: str, activations: Any, **limits: Any
) -> list[list[Activation]]:
    """The activations f, g and h that the op has, for each direction; h has no clip."""
    chosen = choose_activations(_DEFAULTS[op], direction, activations, **limits)
    if op != "lstm":
        return chosen
    return [[f, g, replace(h, clip=None)] for f, g, h in chosen]


def _weights(
    w: Array, r: Array, bias: Array | None, direction: int
) -> tuple[InputProduct, StateProduct, Array, Array]:
    """x W', h R' and the two halves of the bias of one direction, in f64."""
    gates = w.shape[1]
    both = np.zeros(2 * gates) if bias is None else wide(bias[direction])
    given, recalled = wide(w[direction]).T, wide(r[direction]).T
    return (lambda x: x @ given, lambda h, part: h @ recalled[:, part], both[:gates], both[gates:])


def _infer_rnn(
    x: TensorType,
    w: TensorType,
    r: TensorType,
    bias: Type,
    lengths: Type,
    h0: Type,
    hidden: int | None,
    direction: str,
    activations: Any,
    **_: Any,
) -> tuple[TensorType, ...]:
    check_activations(activations, 1, direction)
    return infer_recurrent(x, w, r, bias, lengths, {"h0": h0}, GATES["rnn"], hidden, direction)


def _rnn(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None,
    lengths: Array | None,
    h0: Array | None,
    hidden: int | None,
    direction: str,
    activations: Any,
    **limits: Any,
) -> tuple[Array, ...]:
    chosen = gate_activations("rnn", direction, activations, **limits)
    cells = [rnn_cell(*_weights(w, r, bias, i), *functions) for i, functions in enumerate(chosen)]
    return run_directions(x, lengths, direction, [h0], r.shape[2], cells)


def rnn_cell(
    share: InputProduct, recall: StateProduct, w_bias: Array, r_bias: Array, f: Activation
) -> Cell:
    return lambda x, states: (f(share(x) + recall(states[0], np.s_[:]) + w_bias + r_bias),)


def _infer_gru(
    x: TensorType,
    w: TensorType,
    r: TensorType,
    bias: Type,
    lengths: Type,
    h0: Type,
    hidden: int | None,
    direction: str,
    activations: Any,
    **_: Any,
) -> tuple[TensorType, ...]:
    check_activations(activations, 2, direction)
    return infer_recurrent(x, w, r, bias, lengths, {"h0": h0}, GATES["gru"], hidden, direction)


def _gru(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None,
    lengths: Array | None,
    h0: Array | None,
    hidden: int | None,
    direction: str,
    activations: Any,
    linear_before_reset: bool,
    **limits: Any,
) -> tuple[Array, ...]:
    chosen = gate_activations("gru", direction, activations, **limits)
    cells = [
        gru_cell(*_weights(w, r, bias, i), r.shape[2], linear_before_reset, *functions)
        for i, functions in enumerate(chosen)
    ]
    return run_directions(x, lengths, direction, [h0], r.shape[2], cells)


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


def _infer_lstm(
    x: TensorType,
    w: TensorType,
    r: TensorType,
    bias: Type,
    lengths: Type,
    h0: Type,
    c0: Type,
    peephole: Type,
    hidden: int | None,
    direction: str,
    activations: Any,
    **_: Any,
) -> tuple[TensorType, ...]:
    check_activations(activations, 3, direction)
    states = {"h0": h0, "c0": c0}
    y, last = infer_recurrent(x, w, r, bias, lengths, states, GATES["lstm"], hidden, direction)
    if peephole is not None:
        expect.same_dtype(x, peephole)
        expect.shape("peephole", peephole, (last.shape[0], 3 * last.shape[2]))
    return y, last, last


def _lstm(
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None,
    lengths: Array | None,
    h0: Array | None,
    c0: Array | None,
    peephole: Array | None,
    hidden: int | None,
    direction: str,
    activations: Any,
    input_forget: bool,
    **limits: Any,
) -> tuple[Array, ...]:
    size = r.shape[2]
    cells = []
    for i, functions in enumerate(gate_activations("lstm", direction, activations, **limits)):
        peeps = np.zeros(3 * size) if peephole is None else wide(peephole[i])
        cells.append(lstm_cell(*_weights(w, r, bias, i), peeps, input_forget, *functions))
    return run_directions(x, lengths, direction, [h0, c0], size, cells)


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


OPDEFS = [
    OpDef(
        "rnn",
        Kind.COMPUTE,
        "x, w, r, bias?, lengths?, h0?",
        infer=_infer_rnn,
        reference=_rnn,
        flops=_flops,
        samples=lambda: _samples(1, ["LeakyRelu"]),
        attrs=ATTRS,
        doc="A layer of plain recurrent cells over x[S, B, I]: all hidden states, and the last.",
    ),
    OpDef(
        "gru",
        Kind.COMPUTE,
        "x, w, r, bias?, lengths?, h0?",
        infer=_infer_gru,
        reference=_gru,
        flops=_flops,
        samples=lambda: _samples(3, ["Affine", "ScaledTanh"], linear_before_reset=True),
        attrs={**ATTRS, "linear_before_reset": Attr("bool", False)},
        doc="A layer of gated recurrent units over x[S, B, I]: all hidden states, and the last.",
    ),
    OpDef(
        "lstm",
        Kind.COMPUTE,
        "x, w, r, bias?, lengths?, h0?, c0?, peephole?",
        infer=_infer_lstm,
        reference=_lstm,
        flops=_flops,
        samples=_lstm_samples,
        attrs={**ATTRS, "input_forget": Attr("bool", False)},
        doc="A layer of long short-term memory over x[S, B, I]: all hidden states, the last hidden "
        "state, the last cell state.",
    ),
]
