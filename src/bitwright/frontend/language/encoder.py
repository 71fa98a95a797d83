"""The graph of an encoder (bert): hidden states of every token, and an embedding of each text.

    tokens[b, s], mask[b, s]  ->  hidden[b, s, width], embedding[b, width]

`mask` is 1 for tokens of the text and 0 for padding. The embedding is the mean over the text, or
the first token's state (`pooling`), and has length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from bitwright.errors import UnsupportedError
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.feed_forward import activate
from bitwright.frontend.language.stored import StoredTensor
from bitwright.frontend.language.weights import Weights
from bitwright.ir import Graph
from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder


def encoder_graph(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    where: str = "",
    exact: bool = False,
    weights_of: Callable[[Builder], Weights] | None = None,
) -> Graph:
    """The graph; `weights_of` makes its weights otherwise than as blocks of GGUF."""
    b = Builder(config.name or config.architecture)
    weights = weights_of(b) if weights_of else Weights(b, tensors, where, exact)
    tokens, mask = b.input("tokens", "i32[b, s]"), b.input("mask", "i32[b, s]")
    x = _embedded(b, config, weights, tokens)
    seen = b.reshape(b.ne(mask, np.int32(0)), shape=(mask.shape[0], 1, 1, mask.shape[1]))
    for layer in range(config.layers):
        with b.at(f"blk.{layer}"):
            x = _layer(b, config, weights, x, seen, f"blk.{layer}")
    b.output("hidden", x)
    b.output("embedding", _pooled(b, config, x, mask))
    if unused := weights.unused():
        raise UnsupportedError(
            f"the architecture {config.architecture!r} has no tensor {unused[0]!r}", where=where
        )
    return b.build()


def _embedded(b: Builder, c: ModelConfig, w: Weights, tokens: Value) -> Value:
    x = w.rows(tokens, "token_embd.weight", c.vocab, c.width)
    positions = w.vector("position_embd.weight", c.context, c.width)
    places = b.slice(positions, starts=(0,), stops=(tokens.shape[1],), steps=(1,), axes=(0,))
    kinds = w.tensors.get("token_types.weight")
    if kinds is not None:
        table = w.vector("token_types.weight", kinds.shape[0], c.width)
        x = b.add(x, b.slice(table, starts=(0,), stops=(1,), steps=(1,), axes=(0,)))
    return w.layer_norm(b.add(x, places), "token_embd_norm", c.width, c.eps)


def _layer(b: Builder, c: ModelConfig, w: Weights, x: Value, seen: Value, name: str) -> Value:
    batch, length, _ = x.shape
    heads = [
        b.transpose(
            b.reshape(
                w.linear(x, f"{name}.attn_{kind}", c.heads * c.head_dim, c.width),
                shape=(batch, length, c.heads, c.head_dim),
            ),
            perm=(0, 2, 1, 3),
        )
        for kind in "qkv"
    ]
    y = b.attention(*heads, seen, scale=c.attention_scale)
    y = b.reshape(b.transpose(y, perm=(0, 2, 1, 3)), shape=(batch, length, c.heads * c.head_dim))
    y = w.linear(y, f"{name}.attn_output", c.width, c.heads * c.head_dim)
    x = w.layer_norm(b.add(x, y), f"{name}.attn_output_norm", c.width, c.eps)
    inner = w.tensors[f"{name}.ffn_up.weight"].shape[0] if f"{name}.ffn_up.weight" in w else 0
    h = activate(b, c.activation, w.linear(x, f"{name}.ffn_up", inner, c.width))
    y = w.linear(h, f"{name}.ffn_down", c.width, inner)
    return w.layer_norm(b.add(x, y), f"{name}.layer_output_norm", c.width, c.eps)


def _pooled(b: Builder, c: ModelConfig, x: Value, mask: Value) -> Value:
    """One vector of length 1 for each text."""
    if c.pooling == "cls":
        first = b.slice(x, starts=(0,), stops=(1,), steps=(1,), axes=(1,))
        found = b.reshape(first, shape=(x.shape[0], c.width))
    else:
        kept = b.reshape(b.cast(mask, to=x.dtype), shape=(*mask.shape, 1))
        total = b.reduce_sum(b.mul(x, kept), axes=[1], keepdims=False)
        count = b.reduce_sum(kept, axes=[1], keepdims=False)
        found = b.div(total, b.maximum(count, np.float32(1)))
    square = b.reduce_sum(b.mul(found, found), axes=[1], keepdims=True)
    result: Value = b.div(found, b.maximum(b.sqrt(square), np.float32(1e-12)))
    return result
