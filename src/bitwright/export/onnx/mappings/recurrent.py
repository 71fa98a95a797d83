"""Recurrent layers, and linear recurrences as Scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.export.onnx.bodies import Row, scan
from bitwright.export.onnx.forms import reduce, squeeze, unsqueeze
from bitwright.export.onnx.mapping import Ref, Scope, exports, exports_table
from bitwright.export.onnx.mappings.attention import scaled
from bitwright.export.onnx.sizes import sizes_tensor
from bitwright.ir.dtype import i32
from bitwright.ir.types import Shape
from bitwright.ops.quant.integer_recurrent import PREFIX
from bitwright.ops.sequence.recurrence import activation_defaults
from bitwright.ops.sequence.recurrent import GATES

_RESULTS = {"RNN": 2, "GRU": 2, "LSTM": 3}
_SPELLINGS = (
    *("Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh"),
    *("HardSigmoid", "Elu", "Softsign", "Softplus"),
)
_SPELLED = {name.lower(): name for name in _SPELLINGS}
"""The usual case of activation names; ONNX ignores case, some runtimes do not."""


def _layer(e: Scope, op_type: str, operands: list[Ref | None], attrs: dict[str, Any]) -> Any:
    r, lengths = operands[2], operands[4]
    assert r is not None
    if lengths is not None:
        operands[4] = e.cast(lengths, i32)
    hidden = attrs.pop("hidden")
    attrs["hidden_size"] = r.shape[2] if hidden is None else hidden
    names = attrs["activations"] or ()
    if names:
        attrs["activations"] = [_SPELLED[name.lower()] for name in names]
    for position, name in enumerate(("alpha", "beta")):
        given = attrs.pop(name)
        attrs[f"activation_{name}"] = _complete(given or (), names, position) or None
    attrs = {name: list(v) if isinstance(v, tuple) else v for name, v in attrs.items()}
    return e.emit(op_type, operands, attrs, results=_RESULTS[op_type])


def _complete(given: Sequence[float], names: Sequence[str], position: int) -> list[float]:
    """One number for each activation that takes one: the defaults of runtimes differ."""
    defaults = [activation_defaults(name)[position] for name in names]
    wanted = [default for default in defaults if default is not None]
    return [*given, *wanted[len(given) :]]


exports_table(
    {
        "rnn": lambda e, *operands, **attrs: _layer(e, "RNN", list(operands), attrs),
        "gru": lambda e, *operands, **attrs: _layer(e, "GRU", list(operands), attrs),
        "lstm": lambda e, *operands, **attrs: _layer(e, "LSTM", list(operands), attrs),
    }
)


def _reject_integer(e: Scope, *_: Ref | None, **__: Any) -> Any:
    hint = "Export the model before the integer lowering, with a layer on dequantized weights."
    raise e.reject("no ONNX op quantizes the states of a layer in every step", hint)


for _name in GATES:
    exports(PREFIX + _name, widens=False)(_reject_integer)


# recurrences


def _zeros(e: Scope, like: Ref, shape: Shape) -> Ref:
    return e.Expand(e.scalar(0, like), sizes_tensor(e, shape))


@exports("selective_scan")
def selective_scan(
    e: Scope, x: Ref, delta: Ref, a: Ref, b: Ref, c: Ref, d: Ref | None, state: Ref | None
) -> tuple[Ref, Ref]:
    """h = exp(delta a) h + (delta x) b', y = h c, along axis 1."""
    (batch, steps, channels), size = x.shape, a.shape[1]
    start = state or _zeros(e, x, (batch, channels, size))
    if steps == 0:
        return x, start
    channel, term = (x.element, (batch, channels)), (x.element, (batch, size))
    types: list[Row] = [(x.element, (batch, channels, size)), channel, channel, term, term]

    def body(e: Scope, h: Ref, x_t: Ref, delta_t: Ref, b_t: Ref, c_t: Ref) -> list[Ref]:
        step = unsqueeze(e, delta_t, 2)
        given = e.Mul(e.Mul(step, unsqueeze(e, x_t, 2)), unsqueeze(e, b_t, 1))
        after = e.Add(e.Mul(e.Exp(e.Mul(step, a)), h), given)
        return [after, squeeze(e, e.MatMul(after, unsqueeze(e, c_t, 2)), 2)]

    last, y = scan(e, "step", start, [x, delta, b, c], 1, types, channel, body)
    return y if d is None else e.Add(y, e.Mul(x, d)), last


@exports("gated_delta")
def gated_delta(
    e: Scope, q: Ref, k: Ref, v: Ref, g: Ref, beta: Ref, state: Ref | None, scale: float | None
) -> tuple[Ref, Ref]:
    """S = exp(g) S + k (beta (v - S' k))', y = S' q, along axis 2."""
    (batch, heads, steps, keys), values = q.shape, v.shape[3]
    start = state or _zeros(e, q, (batch, heads, keys, values))
    if steps == 0:
        return v, start
    key, value = (q.element, (batch, heads, keys)), (q.element, (batch, heads, values))
    gate = (q.element, (batch, heads))
    types: list[Row] = [(q.element, (batch, heads, keys, values)), key, key, value, gate, gate]

    def body(e: Scope, s: Ref, q_t: Ref, k_t: Ref, v_t: Ref, g_t: Ref, beta_t: Ref) -> list[Ref]:
        decayed = e.Mul(unsqueeze(e, e.Exp(g_t), 2, 3), s)
        column = unsqueeze(e, k_t, 3)
        recalled = reduce(e, "ReduceSum", e.Mul(decayed, column), [2], keepdims=False)
        correction = e.Mul(unsqueeze(e, beta_t, 2), e.Sub(v_t, recalled))
        after = e.Add(decayed, e.Mul(column, unsqueeze(e, correction, 2)))
        read = e.Mul(after, unsqueeze(e, q_t, 3))
        return [after, reduce(e, "ReduceSum", read, [2], keepdims=False)]

    rows = [scaled(e, q, scale), k, v, g, beta]
    last, y = scan(e, "step", start, rows, 2, types, value, body)
    return y, last
