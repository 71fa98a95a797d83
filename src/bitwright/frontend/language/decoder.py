"""The graph of a decoder: one for prefill, decode, and batches of sequences of any lengths.

    tokens[n], slot[n], position[n], rows[m]  ->  logits[m, vocab]

Row i is a token of the sequence in `slot[i]` at `position[i]`; `rows` names the rows whose logits
are wanted. Keys and values live in the states `k.<layer>` and `v.<layer>`
[slots, kv_heads, context, head_dim]; in i8 with `k_scale.<layer>` and `v_scale.<layer>`
[slots, kv_heads, context]. A layer is

    x += norm?(attention(norm(x)))        x += norm?(down(act(gate(norm(x))) * up(norm(x))))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.experts import mixture_of_experts
from bitwright.frontend.language.feed_forward import gated
from bitwright.frontend.language.from_metadata import is_used_by_config
from bitwright.frontend.language.rope import tables
from bitwright.frontend.language.stored import StoredTensor
from bitwright.frontend.language.weights import Weights
from bitwright.ir import Graph
from bitwright.ir.dim import symbol
from bitwright.ir.dtype import DTYPES
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder

CACHES = ("f16", "f32", "bf16", "i8")


@dataclass(frozen=True)
class CacheShape:
    """How many sequences of which length have their keys and values in memory, and as what."""

    slots: int = 1
    context: int = 2048
    element: str = "f16"


def decoder_graph(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    cache: CacheShape,
    where: str = "",
    exact: bool = False,
    output: str = "logits",
) -> Graph:
    """The graph of a model whose tensors have the names of GGUF files.

    `output` is "logits", or "hidden": the states behind the final norm, [m, width].
    """
    if cache.slots < 1 or cache.context < 1:
        raise ImportModelError(
            "the cache has no room", found=f"{cache.slots} slots of {cache.context}"
        )
    if cache.element not in CACHES:
        raise UnsupportedError(
            f"a cache of {cache.element!r} is not supported", expected=", ".join(CACHES)
        )
    b = Builder(config.name or config.architecture)
    weights = Weights(b, tensors, where, exact)
    tokens, *places = (b.input(name, "i32[n]") for name in ("tokens", "slot", "position"))
    rows = b.input("rows", "i32[m]")
    decoder = Decoder(b, config, weights, cache, *places)
    x = weights.rows(tokens, "token_embd.weight", config.vocab, config.width)
    if config.embedding_scale != 1:
        x = b.mul(x, np.float32(config.embedding_scale))
    for layer in range(config.layers):
        x = decoder.layer(x, layer, rows if layer == config.layers - 1 else None)
    is_hidden = output == "hidden"
    b.output(output, decoder.normed(x) if is_hidden else decoder.logits(x))
    require_all_used(config, weights, ("output.weight", "output.bias") if is_hidden else ())
    return b.build()


def require_all_used(config: ModelConfig, weights: Weights, left: Sequence[str] = ()) -> None:
    """Raise if the file has a tensor that the graph does not use, those `left` out aside."""
    unused = [name for name in weights.unused() if not is_used_by_config(name) and name not in left]
    if unused:
        raise UnsupportedError(
            f"the architecture {config.architecture!r} has no tensor {unused[0]!r}",
            where=weights.where,
            hint="The model differs from its architecture; it would not be computed right.",
        )


def layer_graph(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    layer: int,
    context: int,
    where: str = "",
) -> tuple[Graph, dict[str, str]]:
    """One layer for calibration: x[n, width] -> y and the inputs of its matrices.

    The mapping gives the output that holds the input of each matrix.
    """
    b = Builder(f"{config.name or config.architecture}.{layer}")
    weights = Weights(b, tensors, where, exact=True)
    x = b.input("x", TensorType(DTYPES["f32"], (symbol("n"), config.width)))
    places = [b.input(name, "i32[n]") for name in ("slot", "position")]
    decoder = Decoder(b, config, weights, CacheShape(1, context, "f32"), *places)
    b.output("y", decoder.layer(x, layer))
    outputs: dict[Value, str] = {}
    for value in weights.inputs.values():
        if value not in outputs:
            outputs[value] = f"in.{len(outputs)}"
            b.output(outputs[value], value)
    return b.build(), {name: outputs[value] for name, value in weights.inputs.items()}


class DecoderLayers:
    """The layers of a decoder on rows x[n, width]; a subclass says what rows attend to."""

    def __init__(self, b: Builder, config: ModelConfig, weights: Weights) -> None:
        self.b, self.config, self.weights = b, config, weights

    def logits(self, x: Value) -> Value:
        b, c, w = self.b, self.config, self.weights
        head = "output" if "output.weight" in w else "token_embd"
        # no later layer hides the error of the head
        y = w.linear(self.normed(x), head, c.vocab, c.width, outlier=0.0)
        if c.logit_scale != 1:
            y = b.mul(y, np.float32(c.logit_scale))
        return self.capped(y, c.final_softcap)

    def normed(self, x: Value) -> Value:
        """The states behind the final norm."""
        c = self.config
        return self.weights.rms_norm(x, "output_norm", c.width, c.eps)

    def capped(self, y: Value, cap: float) -> Value:
        """cap * tanh(y / cap)"""
        if not cap:
            return y
        b = self.b
        found: Value = b.mul(b.tanh(b.mul(y, np.float32(1 / cap))), np.float32(cap))
        return found

    def layer(self, x: Value, layer: int, rows: Value | None = None) -> Value:
        """The layer's output; what follows its attention only for `rows`."""
        b, c, w = self.b, self.config, self.weights
        name = f"blk.{layer}"
        with b.at(name):
            y = self.attention(w.rms_norm(x, f"{name}.attn_norm", c.width, c.eps), layer)
            if rows is not None:
                x, y = (b.gather(value, rows, axis=0) for value in (x, y))
            y = w.linear(y, f"{name}.attn_output", c.width, c.heads * c.head_dim)
            x = b.add(x, self.post_norm(y, f"{name}.post_attention_norm"))
            h = w.rms_norm(x, f"{name}.ffn_norm", c.width, c.eps)
            if f"{name}.ffn_gate_inp.weight" in w:
                y = mixture_of_experts(w, c, h, name)
            else:
                y = gated(w, c, h, name)
            found: Value = b.add(x, self.post_norm(y, f"{name}.post_ffw_norm"))
            return found

    def post_norm(self, y: Value, name: str) -> Value:
        if f"{name}.weight" not in self.weights:
            return y
        return self.weights.rms_norm(y, name, self.config.width, self.config.eps)

    def attention(self, x: Value, layer: int) -> Value:
        """The heads' results side by side, [n, heads * head_dim]."""
        b, c, name = self.b, self.config, f"blk.{layer}"
        rows = x.shape[0]
        parts = self.queries_keys_values(x, name)
        heads = [
            b.reshape(part, shape=(rows, count, c.head_dim))
            for part, count in zip(parts, (c.heads, c.kv_heads, c.kv_heads), strict=True)
        ]
        q, k = (
            self.head_norm(part, f"{name}.attn_{kind}_norm")
            for kind, part in zip("qk", heads[:2], strict=True)
        )
        y = self.attended(q, k, heads[2], layer)
        found: Value = b.reshape(y, shape=(rows, c.heads * c.head_dim))
        return found

    def attended(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """Each row's heads with the keys and values of its sequence, from [n, heads, head_dim]."""
        raise NotImplementedError

    def queries_keys_values(self, x: Value, name: str) -> list[Value]:
        b, c, w = self.b, self.config, self.weights
        sizes = [count * c.head_dim for count in (c.heads, c.kv_heads, c.kv_heads)]
        if f"{name}.attn_qkv.weight" not in w:
            return [
                w.linear(x, f"{name}.attn_{kind}", size, c.width)
                for kind, size in zip("qkv", sizes, strict=True)
            ]
        y = w.linear(x, f"{name}.attn_qkv", sum(sizes), c.width)
        ends = np.cumsum(sizes).tolist()
        return [
            b.slice(y, starts=(end - size,), stops=(end,), steps=(1,), axes=(1,))
            for end, size in zip(ends, sizes, strict=True)
        ]

    def head_norm(self, x: Value, name: str) -> Value:
        if f"{name}.weight" not in self.weights:
            return x
        return self.weights.rms_norm(x, name, self.config.head_dim, self.config.eps)


class Decoder(DecoderLayers):
    """Attention over caches of several sequences, which are states."""

    def __init__(
        self,
        b: Builder,
        config: ModelConfig,
        weights: Weights,
        cache: CacheShape,
        slot: Value,
        position: Value,
    ) -> None:
        super().__init__(b, config, weights)
        self.cache, self.slot, self.position = cache, slot, position
        self.angles = [
            tuple(
                b.constant(table, name=f"{kind}.{number}")
                for kind, table in zip(("cos", "sin"), tables(rope, cache.context), strict=True)
            )
            for number, rope in enumerate(config.ropes)
        ]
        self.ids = b.reshape(self.position, shape=(*self.position.shape, 1))

    def attended(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        b, c = self.b, self.config
        q, k = self.rotated(q, layer), self.rotated(k, layer)
        keys, values = self.written("k", layer, k), self.written("v", layer, v)
        found: Value = b.cached_attention(
            q,
            keys[0],
            values[0],
            self.slot,
            self.position,
            *keys[1:],
            *values[1:],
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            window=c.windows[layer] or None,
        )
        return found

    def written(self, kind: str, layer: int, new: Value) -> list[Value]:
        """The cache with the new rows, and the scales of a cache in i8."""
        b, c, element = self.b, self.config, self.cache.element
        places = (self.cache.slots, c.kv_heads, self.cache.context)
        states = [b.state(f"{kind}.{layer}", None, _tensor(element, *places, c.head_dim))]
        if element == "i8":
            states.append(b.state(f"{kind}_scale.{layer}", None, _tensor("f32", *places)))
        results = b.kv_write(states[0], new, self.slot, self.position, *states[1:])
        found = list(results) if len(states) > 1 else [results]
        for state, value in zip(states, found, strict=True):
            b.update(state, value)
        return found

    def rotated(self, x: Value, layer: int) -> Value:
        """x[n, heads, head_dim] rotated by its rows' positions."""
        b, c = self.b, self.config
        number = c.rope_of_layer[layer]
        if number < 0:
            return x
        rows, heads, size = x.shape
        cos, sin = self.angles[number]
        dim = 2 * len(c.ropes[number].frequencies)
        y = b.rotary(
            b.reshape(x, shape=(rows, heads, 1, size)),
            cos,
            sin,
            self.ids,
            interleaved=c.interleaved,
            rotary_dim=0 if dim == size else dim,
        )
        found: Value = b.reshape(y, shape=x.shape)
        return found


def _tensor(element: str, *sizes: int) -> TensorType:
    return TensorType(DTYPES[element], sizes)
