"""LSTM, GRU and RNN, with several layers and directions.

Torch stores gates in the order i, f, g, o (LSTM) and r, z, n (GRU); ours are i, o, f, c
and z, r, n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitwright.frontend.torch.aten.random import drop
from bitwright.frontend.torch.context import Context, maps
from bitwright.ir.graph import Value

_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn": (0,)}


def _reordered(ctx: Context, w: Value, order: Sequence[int]) -> Value:
    """The weight with its gates, which are blocks of rows, in another order."""
    if list(order) == list(range(len(order))):
        return w
    size = w.shape[0] // len(order)
    parts = ctx.b.split(w, axis=0, sizes=(size,) * len(order))
    return ctx.b.concat(*(parts[i] for i in order), axis=0)


def _stacked(ctx: Context, tensors: Sequence[Value]) -> Value:
    parts = [ctx.unsqueeze(tensor, 0) for tensor in tensors]
    return parts[0] if len(parts) == 1 else ctx.b.concat(*parts, axis=0)


def _weights(
    ctx: Context, op: str, params: Sequence[Value], has_biases: bool
) -> list[Value | None]:
    """w, r and bias of one layer from the parameters of its directions."""
    each = 4 if has_biases else 2
    directions = [params[i : i + each] for i in range(0, len(params), each)]
    order = _GATES[op]
    w, r = (_stacked(ctx, [_reordered(ctx, d[i], order) for d in directions]) for i in (0, 1))
    if not has_biases:
        return [w, r, None]
    biases = [
        ctx.b.concat(*(_reordered(ctx, d[i], order) for i in (2, 3)), axis=0) for d in directions
    ]
    return [w, r, _stacked(ctx, biases)]


def _layers(
    ctx: Context,
    op: str,
    x: Value,
    states: Sequence[Value],
    params: Sequence[Value],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
    **attrs: Any,
) -> list[Value]:
    directions = 2 if bidirectional else 1
    each = len(params) // num_layers
    hidden = states[0].shape[-1]
    if each != directions * (4 if has_biases else 2) or params[1].shape[1] != hidden:
        raise ctx.refuse("a projection of the hidden state (proj_size)")
    attrs |= {"hidden": hidden, "direction": "bidirectional" if bidirectional else "forward"}
    if batch_first:
        x = ctx.transpose(x, (1, 0, 2))
    finals: list[list[Value]] = [[] for _ in states]
    for layer in range(num_layers):
        weights = _weights(ctx, op, params[layer * each : (layer + 1) * each], has_biases)
        start = layer * directions
        initial = [ctx.slice(state, 0, start, start + directions) for state in states]
        y, *last = ctx.b.results(op, x, *weights, None, *initial, **attrs)
        for collected, state in zip(finals, last, strict=True):
            collected.append(state)
        x = ctx.transpose(y, (0, 2, 1, 3))  # [steps, batch, directions, hidden]
        x = ctx.reshape(x, (*x.shape[:2], directions * hidden))
        if layer < num_layers - 1:
            x, _ = drop(ctx, x, dropout, True)
    joined = [f[0] if num_layers == 1 else ctx.b.concat(*f, axis=0) for f in finals]
    return [ctx.transpose(x, (1, 0, 2)) if batch_first else x, *joined]


def _recurrent(op: str, activation: str | None = None, **attrs: Any) -> Any:
    def mapping(
        ctx: Context, x: Value, states: Any, params: list[Value], *options: Any
    ) -> list[Value]:
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        given = dict(attrs)
        if activation:
            given["activations"] = (activation,) * (2 if bidirectional else 1)
        shape = (has_biases, num_layers, dropout if train else 0.0, bidirectional, batch_first)
        initial = states if op == "lstm" else [states]
        return _layers(ctx, op, x, initial, params, *shape, **given)

    return mapping


maps("lstm.input")(_recurrent("lstm"))
maps("gru.input")(_recurrent("gru", linear_before_reset=True))
maps("rnn_tanh.input")(_recurrent("rnn", "tanh"))
maps("rnn_relu.input")(_recurrent("rnn", "relu"))
