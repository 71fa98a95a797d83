"""LSTM, GRU and RNN; layout 1 is layout 0 between transposes."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, imports
from bitwright.ir import Value


def _attrs(node: OnnxNode) -> dict[str, Any]:
    return {
        "hidden": node.integer("hidden_size"),
        "direction": node.text("direction", "forward").lower(),
        "activations": node.items("activations"),
        "alpha": node.items("activation_alpha"),
        "beta": node.items("activation_beta"),
        "clip": node.number("clip"),
    }


@imports("LSTM", "GRU", "RNN")
def recurrent(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    attrs = _attrs(node)
    x, w, r, bias, lengths, h0, c0, peephole = (inputs[i] for i in range(8))
    batch_first = node.flag("layout")
    if batch_first:
        x = ctx.transpose(x, 1, 0, 2)
        h0, c0 = (_swapped(ctx, state) for state in (h0, c0))
    results: tuple[Value, ...]
    if node.op_type == "LSTM":
        attrs["input_forget"] = node.flag("input_forget")
        results = ctx.b.lstm(x, w, r, bias, lengths, h0, c0, peephole, **attrs)
    elif node.op_type == "GRU":
        attrs["linear_before_reset"] = node.flag("linear_before_reset")
        results = ctx.b.gru(x, w, r, bias, lengths, h0, **attrs)
    else:
        results = ctx.b.rnn(x, w, r, bias, lengths, h0, **attrs)
    if not batch_first:
        return list(results)
    y, *states = results
    return [ctx.transpose(y, 2, 0, 1, 3), *(_swapped(ctx, state) for state in states)]


def _swapped(ctx: Context, state: Value | None) -> Value | None:
    return None if state is None else ctx.transpose(state, 1, 0, 2)
