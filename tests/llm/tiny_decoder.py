"""A small random decoder with the inputs, outputs and states of a real one, of plain ops."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

import bitwright as bw


def decoder_graph(vocab=97, width=16, heads=2, layers=2, slots=2, context=64, seed=0):
    draw = np.random.default_rng(seed)

    def weight(name, *shape):
        return b.parameter(name, draw.normal(0, shape[0] ** -0.5, shape).astype(np.float32))

    b = bw.Builder("tiny")
    size = width // heads
    tokens, slot = b.input("tokens", "i32[n]"), b.input("slot", "i32[n]")
    position, rows = b.input("position", "i32[n]"), b.input("rows", "i32[m]")
    n = tokens.tensor.shape[0]
    table = b.parameter("table", draw.normal(0, 1, (vocab, width)).astype(np.float32))
    places = b.parameter("places", draw.normal(0, 1, (512, width)).astype(np.float32)[:context])
    x = b.add(b.gather(table, tokens, axis=0), b.gather(places, position, axis=0))
    at = b.concat(b.reshape(slot, shape=[n, 1]), b.reshape(position, shape=[n, 1]), axis=1)
    seen = b.le(  # [n, 1, context]
        b.constant(np.arange(context, dtype=np.int32)[None, None]),
        b.reshape(position, shape=[n, 1, 1]),
    )
    for layer in range(layers):
        q, k, v = (
            b.reshape(b.matmul(x, weight(f"{name}{layer}", width, width)), shape=[n, heads, size])
            for name in "qkv"
        )
        caches = []
        for name, new in (("k", k), ("v", v)):
            empty = np.zeros((slots, heads, context, size), np.float32)
            state = b.state(f"{name}.{layer}", empty)
            by_position = b.transpose(state, perm=[0, 2, 1, 3])
            written = b.scatter_nd(by_position, at, new)
            b.update(state, b.transpose(written, perm=[0, 2, 1, 3]))
            caches.append(b.transpose(b.gather(written, slot, axis=0), perm=[0, 2, 1, 3]))
        keys, values = caches  # [n, heads, context, size]
        scores = b.reduce_sum(
            b.mul(b.reshape(q, shape=[n, heads, 1, size]), keys), axes=[3], keepdims=False
        )
        scores = b.where(seen, b.mul(scores, size**-0.5), -1e9)
        shares = b.reshape(b.softmax(scores, axis=-1), shape=[n, heads, context, 1])
        mixed = b.reduce_sum(b.mul(shares, values), axes=[2], keepdims=False)
        x = b.add(x, b.tanh(b.reshape(mixed, shape=[n, width])))
    logits = b.matmul(b.gather(x, rows, axis=0), weight("head", width, vocab))
    return b.build(logits=b.mul(logits, 3.0))


@dataclass(eq=False)
class TinyModel:
    """As `load_model` returns it."""

    tokenizer_source: object = None
    slots: int = 2
    context: int = 64
    vocab: int = 97
    seed: int = 0
    name: str = "tiny"

    @cached_property
    def graph(self):
        return decoder_graph(self.vocab, slots=self.slots, context=self.context, seed=self.seed)
