"""A mixture of experts in a decoder.

    y[t] = sum over the used experts e of weight[t, e] * expert_e(x[t])   (+ a shared expert)

Pairs of token and expert are sorted by expert, so that each expert multiplies one block of rows.
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.feed_forward import activate, gated, inner_size
from bitwright.frontend.language.weights import Weights
from bitwright.ir.graph import Value


def mixture_of_experts(w: Weights, c: ModelConfig, x: Value, name: str) -> Value:
    if c.experts is None:
        raise ImportModelError(
            f"{name} has experts, but the configuration does not say how many are used",
            where=w.where,
        )
    b, count, used = w.b, c.experts.count, c.experts.used
    scores = w.linear(x, f"{name}.ffn_gate_inp", count, c.width)
    top, chosen = b.top_k(scores, k=used, axis=1)
    if c.experts.normalize:  # softmax over the used experts: the same as normalizing their shares
        shares = b.softmax(top, axis=1)
    else:
        shares = b.gather_elements(b.softmax(scores, axis=1), chosen, axis=1)
    rows = x.shape[0]
    pairs = rows * used
    flat = b.reshape(chosen, shape=(pairs,))
    order = b.top_k(flat, k=pairs, axis=0, largest=False)[1]
    back = b.top_k(order, k=pairs, axis=0, largest=False)[1]
    hot = b.one_hot(flat, b.constant(np.array([0, 1])), depth=count)
    counts = b.reduce_sum(hot, axes=[0], keepdims=False)
    tokens = b.div(order, b.constant(np.array(used)))
    y = _experts(w, c, b.gather(x, tokens, axis=0), counts, name)
    by_token = b.reshape(b.gather(y, back, axis=0), shape=(rows, used, c.width))
    weighted = b.mul(by_token, b.reshape(shares, shape=(rows, used, 1)))
    total = b.reduce_sum(weighted, axes=[1], keepdims=False)
    if f"{name}.ffn_down_shexp.weight" in w:
        shared = gated(w, c, x, name, "_shexp")
        gate = w.linear(x, f"{name}.ffn_gate_inp_shexp", 1, c.width)
        total = b.add(total, b.mul(shared, b.sigmoid(gate)))
    found: Value = total
    return found


def _experts(w: Weights, c: ModelConfig, x: Value, counts: Value, name: str) -> Value:
    """Rows of x, sorted by expert, through the gated layer of their expert."""
    b, count = w.b, c.experts.count if c.experts else 0
    gate, up, down = (f"{name}.ffn_{part}_exps" for part in ("gate", "up", "down"))
    inner = inner_size(w, down)

    def product(rows: Value, part: str, outputs: int, inputs: int) -> Value:
        return w.experts(rows, f"{part}.weight", counts, count, outputs, inputs)

    first, second = (product(x, part, inner, c.width) for part in (gate, up))
    return product(b.mul(activate(b, c.activation, first), second), down, c.width, inner)
