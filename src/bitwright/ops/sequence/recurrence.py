"""Shared parts of the recurrent ops: gate activations, directions, sequences of unequal length.

A cell maps the input and the states of a step (hidden first) to new states. After the end of a
sequence its states stay and its outputs are zero; the reverse direction starts at the end of each
sequence. Where ONNX is not specific, this follows ONNX Runtime: an empty sequence has zero states,
and `clip` bounds the input of the gates, not the cell state that h reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dtype import i32, i64
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr
from bitwright.ops.core.registry import get

States = tuple[Array, ...]
Cell = Callable[[Array, States], States]
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}

ATTRS = {
    "hidden": Attr("int", None),
    "direction": Attr("str", "forward", choices=tuple(DIRECTIONS)),
    "activations": Attr("strs", None),
    "alpha": Attr("floats", None),
    "beta": Attr("floats", None),
    "clip": Attr("float", None),
}


def sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1 + np.tanh(0.5 * x)))


Formula = Callable[[Array, Any, Any], Any]
# name: the function of (x, alpha, beta), its scalar form, the defaults of alpha and beta it takes
_ACTIVATIONS: dict[str, tuple[Formula, Callable[..., Any], float | None, float | None]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0), lambda e, x, a, b: e.max(x, 0), None, None),
    "tanh": (lambda x, a, b: np.tanh(x), lambda e, x, a, b: e.tanh(x), None, None),
    "sigmoid": (lambda x, a, b: sigmoid(x), lambda e, x, a, b: _of("sigmoid", e, x), None, None),
    "softsign": (
        lambda x, a, b: x / (1 + np.abs(x)),
        lambda e, x, a, b: _of("softsign", e, x),
        None,
        None,
    ),
    "softplus": (
        lambda x, a, b: np.logaddexp(x, 0),
        lambda e, x, a, b: _of("softplus", e, x),
        None,
        None,
    ),
    "affine": (lambda x, a, b: a * x + b, lambda e, x, a, b: e.add(e.mul(x, a), b), 1.0, 0.0),
    "leakyrelu": (
        lambda x, a, b: np.where(x >= 0, x, a * x),
        lambda e, x, a, b: _of("leaky_relu", e, x, alpha=a),
        0.01,
        None,
    ),
    "thresholdedrelu": (
        lambda x, a, b: np.where(x >= a, x, 0),
        lambda e, x, a, b: e.select(e.ge(x, a), x, 0.0),
        1.0,
        None,
    ),
    "scaledtanh": (
        lambda x, a, b: a * np.tanh(b * x),
        lambda e, x, a, b: e.mul(e.tanh(e.mul(x, b)), a),
        1.0,
        1.0,
    ),
    "hardsigmoid": (
        lambda x, a, b: np.clip(a * x + b, 0, 1),
        lambda e, x, a, b: _of("hard_sigmoid", e, x, alpha=a, beta=b),
        0.2,
        0.5,
    ),
    "elu": (
        lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))),
        lambda e, x, a, b: _of("elu", e, x, alpha=a),
        1.0,
        None,
    ),
}


def _of(op: str, e: Any, x: Any, **attrs: float) -> Any:
    """An op's scalar form."""
    form = get(op).scalar
    assert form is not None
    return form(e, x, **attrs)


@dataclass(frozen=True)
class Activation:
    """The activation function of a gate; `clip` bounds its input."""

    name: str
    alpha: float | None = None
    beta: float | None = None
    clip: float | None = None

    def __call__(self, x: Array) -> Array:
        bounded = x if self.clip is None else np.clip(x, -self.clip, self.clip)
        return np.asarray(_ACTIVATIONS[self.name][0](bounded, self.alpha, self.beta))

    def scalar(self, e: Any, x: Any) -> Any:
        """The activation, rendered by `e`."""
        bounded = x if self.clip is None else e.min(e.max(x, -self.clip), self.clip)
        return _ACTIVATIONS[self.name][1](e, bounded, self.alpha, self.beta)


def activation_defaults(name: str) -> tuple[float | None, float | None]:
    """The default alpha and beta of an activation; None for one that it does not take."""
    return _ACTIVATIONS[name.lower()][2:]


def check_activations(names: Sequence[str] | None, count: int, direction: str) -> None:
    """Raise unless there are `count` known names for each direction."""
    wanted = count * len(DIRECTIONS[direction])
    if names is not None and len(names) != wanted:
        raise InferenceError(
            "has the wrong number of activations", expected=wanted, found=len(names)
        )
    for name in names or ():
        if name.lower() not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise InferenceError(f"no activation is named {name!r}", expected=known)


def choose_activations(
    defaults: Sequence[str],
    direction: str,
    names: Sequence[str] | None,
    alpha: Sequence[float] | None,
    beta: Sequence[float] | None,
    clip: float | None,
) -> list[list[Activation]]:
    """The functions of each direction; those that take alpha or beta consume them in order."""
    alphas, betas = iter(alpha or ()), iter(beta or ())
    directions = len(DIRECTIONS[direction])
    chosen = [_activation(name, alphas, betas, clip) for name in names or [*defaults] * directions]
    count = len(chosen) // directions
    return [chosen[i * count : (i + 1) * count] for i in range(directions)]


def _activation(
    name: str, alphas: Iterator[float], betas: Iterator[float], clip: float | None
) -> Activation:
    alpha, beta = activation_defaults(name)
    return Activation(
        name.lower(),
        None if alpha is None else next(alphas, alpha),
        None if beta is None else next(betas, beta),
        clip,
    )


def infer_recurrent(
    x: TensorType,
    w: TensorType,
    r: TensorType,
    bias: TensorType | None,
    lengths: TensorType | None,
    states: dict[str, TensorType | None],
    gates: int,
    hidden: int | None,
    direction: str,
) -> tuple[TensorType, TensorType]:
    """The types of all hidden states and of the last one."""
    expect.floating("x", x)
    expect.same_dtype(x, w, r, bias, *states.values())
    for name, type_ in (("x", x), ("w", w), ("r", r)):
        expect.rank(name, type_, 3)
    directions, size = len(DIRECTIONS[direction]), hidden
    if size is None:
        if not isinstance(r.shape[2], int):
            raise InferenceError("'hidden' is missing and the last axis of r is not known", found=r)
        size = r.shape[2]
    steps, batch, features = x.shape
    expected: dict[str, tuple[TensorType | None, tuple[Any, ...]]] = {
        "w": (w, (directions, gates * size, features)),
        "r": (r, (directions, gates * size, size)),
        "bias": (bias, (directions, 2 * gates * size)),
        **{name: (type_, (directions, batch, size)) for name, type_ in states.items()},
    }
    for name, (operand, shape) in expected.items():
        if operand is not None:
            expect.shape(name, operand, shape)
    if lengths is not None:
        expect.dtype("lengths", lengths, lambda d: d in (i32, i64), "i32 or i64")
        expect.shape("lengths", lengths, (batch,))
    return (
        TensorType(x.dtype, (steps, directions, batch, size)),
        TensorType(x.dtype, (directions, batch, size)),
    )


def require_lengths(lengths: Array, steps: int) -> None:
    """Raise a `RunError` unless every sequence has 0 to `steps` steps."""
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= steps:
        raise RunError("a sequence length is out of range", expected=f"0 to {steps}", found=lengths)


def run_directions(
    x: Array,
    lengths: Array | None,
    direction: str,
    initial: Sequence[Array | None],
    hidden: int,
    cells: Sequence[Cell],
) -> tuple[Array, ...]:
    """Every hidden state [S, dirs, B, H], then the last of each state [dirs, B, H]."""
    steps, batch = x.shape[:2]
    if lengths is None:
        lengths = np.full(batch, steps)
    else:
        require_lengths(lengths, steps)
    zeros = np.zeros((len(cells), batch, hidden))
    start = [zeros if state is None else wide(state) for state in initial]
    runs = [
        _run(wide(x), lengths, reverse, tuple(state[i] for state in start), cell)
        for i, (reverse, cell) in enumerate(zip(DIRECTIONS[direction], cells, strict=True))
    ]
    outputs = np.stack([y for y, _ in runs], axis=1)
    finals = (np.stack(states) for states in zip(*(states for _, states in runs), strict=True))
    return (outputs, *finals)


def _run(
    x: Array, lengths: Array, reverse: bool, states: States, cell: Cell
) -> tuple[Array, States]:
    steps = np.arange(len(x))[:, None]
    going = (steps < lengths)[..., None]
    # time t reads and writes step `order[t]`; padding after a sequence stays in place
    order = np.where(going[..., 0] & reverse, lengths - 1 - steps, steps)[..., None]
    x = np.take_along_axis(x, order, axis=0)
    outputs = np.zeros((*x.shape[:2], states[0].shape[-1]))
    for t, x_t in enumerate(x):
        states = tuple(
            np.where(going[t], new, old) for new, old in zip(cell(x_t, states), states, strict=True)
        )
        outputs[t] = np.where(going[t], states[0], 0)
    finals = tuple(np.where(lengths[:, None] > 0, state, 0) for state in states)
    return np.take_along_axis(outputs, order, axis=0), finals
