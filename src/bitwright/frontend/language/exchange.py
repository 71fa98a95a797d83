"""A decoder of plain ops, for runtimes without blocks of GGUF files and caches as states.

    input_ids[batch, seq], attention_mask[batch, past + seq], position_ids[batch, seq],
    past_key_values.<layer>.key / .value [batch, kv_heads, past, head_dim]
      ->  logits[batch, seq, vocab], present.<layer>.key / .value [batch, kv_heads, past + seq, …]

One graph serves prefill (past = 0) and decode. Weights become integers with a scale per run of a
row; what a format subtracts from a run is a product with the sums of runs of x:

    x (s q - m)' = x (s q)' - sums(x) m'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.frontend.language.config import ModelConfig
from bitwright.frontend.language.decoder import DecoderLayers, require_all_used
from bitwright.frontend.language.stored import StoredTensor
from bitwright.frontend.language.weights import Weights, dequantized, require_format
from bitwright.ir import Graph
from bitwright.ir.dim import symbol
from bitwright.ir.dtype import DTYPES, f32
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.quant.block_formats import OUTLIER, RUN, format_named

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Runs:
    """w[..., K] = scale * q - minimum, each for `run` elements of K; q is signed."""

    q: Array
    scale: Array
    minimum: Array | None
    run: int


def runs_of(tensor: StoredTensor) -> Runs:
    """The integers of a tensor in a block format."""
    if tensor.scale is not None:
        runs = np.repeat(tensor.scale[..., None], tensor.shape[-1] // RUN, axis=-1)
        return Runs(np.ascontiguousarray(tensor.data), runs, None, RUN)
    form = format_named(tensor.format)
    assert form.split is not None
    data = np.ascontiguousarray(tensor.data).reshape(-1, form.nbytes)
    parts = form.split(data)
    q = parts.q
    scales, minimums = parts.scales(), parts.minimums()
    width = 8
    if form.values is not None:
        q, zero = form.values[q], form.zero
    elif minimums is None:
        zero, width = form.zero, 4 if form.bits <= 4 else 8
    else:  # around the middle of the range, whose products are smaller
        zero, width = 1 << (form.bits - 1), 4 if form.bits <= 4 else 8
        minimums = minimums - scales * np.float32(zero)
    element = DTYPES[f"i{width}"].numpy
    lead = tensor.shape[:-1]
    return Runs(
        (q.astype(np.int16) - np.int16(zero)).astype(element).reshape(tensor.shape),
        scales.reshape(*lead, -1),
        None if minimums is None else minimums.reshape(*lead, -1),
        form.run,
    )


class PlainWeights(Weights):
    """Weights as operands of `dequant_matmul` and of plain ops."""

    def __init__(self, b: Builder, tensors: Mapping[str, StoredTensor], where: str) -> None:
        super().__init__(b, tensors, where, exact=True)
        self._runs: dict[str, Runs] = {}

    def linear(
        self, x: Value, name: str, outputs: int, inputs: int, outlier: float = OUTLIER
    ) -> Value:
        b, weight = self.b, f"{name}.weight"
        tensor = self.matrix(weight, outputs, inputs)
        bias = self.vector(f"{name}.bias", outputs) if f"{name}.bias" in self else None
        y: Value
        if tensor.is_plain:
            y = b.matmul(x, b.transpose(self._floats(tensor), perm=(1, 0)))
        else:
            runs = self.runs(tensor)
            scale = self._parameter(f"{weight}.scale", lambda: runs.scale)
            q, zero = self._integers(tensor, runs)
            y = b.dequant_matmul(x, q, scale, zero, block=runs.run)
            if runs.minimum is not None:
                y = b.sub(y, b.matmul(self._sums(x, runs.run), self._minimums(weight, runs)))
        return y if bias is None else b.add(y, bias)

    def rows(self, tokens: Value, name: str, count: int, width: int) -> Value:
        b, tensor = self.b, self.matrix(name, count, width)
        found: Value
        if tensor.is_plain:
            table = self._parameter(name, lambda: np.ascontiguousarray(tensor.data))
            found = b.gather(table, tokens, axis=0)
            return found if found.dtype == f32 else b.cast(found, to=f32)
        runs = self.runs(tensor)
        by_run = (*tokens.shape, width // runs.run, runs.run)

        def of_tokens(suffix: str, values: Array) -> Value:
            table = self._parameter(f"{name}.{suffix}", lambda: values)
            rows: Value = b.reshape(b.gather(table, tokens, axis=0), shape=(*by_run[:-1], 1))
            return rows

        q = b.cast(b.gather(self._table(tensor, runs), tokens, axis=0), to=f32)
        if not _has_bytes(runs):
            high = b.floor(b.mul(q, np.float32(1 / 16)))
            pair = [b.sub(q, b.mul(high, np.float32(16))), high]
            q = b.concat(*(b.reshape(one, shape=(*one.shape, 1)) for one in pair), axis=q.rank)
        middle = np.float32(128 if _has_bytes(runs) else 8)
        wide = b.sub(b.reshape(q, shape=by_run), middle)
        found = b.mul(wide, of_tokens("scale", runs.scale))
        if runs.minimum is not None:
            found = b.sub(found, of_tokens("minimum", runs.minimum))
        found = b.reshape(found, shape=(*tokens.shape, width))
        return found

    def experts(self, x: Value, name: str, counts: Value, *shape: int) -> Value:
        b, tensor = self.b, self.matrix(name, *shape)
        y: Value
        if tensor.is_plain:
            y = b.grouped_matmul(x, b.transpose(self._floats(tensor), perm=(0, 2, 1)), counts)
            return y
        runs = self.runs(tensor)
        scale, q, zero = runs.scale, runs.q, None
        if runs.minimum is not None:
            empty = scale == 0
            scale = np.where(empty, np.float32(1), scale)
            spread = np.repeat(empty, runs.run, axis=-1)
            q = np.where(spread, np.zeros((), q.dtype), q)
            zero = self._parameter(f"{name}.zero", lambda: runs.minimum / scale)
        y = b.dequant_grouped_matmul(
            x,
            self._parameter(name, lambda: q),
            self._parameter(f"{name}.scale", lambda: scale),
            counts,
            zero,
            block=runs.run,
        )
        return y

    def matrix(self, name: str, *shape: int) -> StoredTensor:
        tensor = self.get(name, *shape)
        require_format(tensor, self.where)
        if tensor.scale is not None and tensor.shape[-1] % RUN:
            return StoredTensor(name, "F32", tensor.shape, dequantized(tensor))
        return tensor

    def runs(self, tensor: StoredTensor) -> Runs:
        if tensor.name not in self._runs:
            self._runs[tensor.name] = runs_of(tensor)
        return self._runs[tensor.name]

    def unused(self) -> list[str]:
        return sorted(set(super().unused()) - set(self._runs))

    def _floats(self, tensor: StoredTensor) -> Value:
        table = self._parameter(tensor.name, lambda: np.ascontiguousarray(tensor.data))
        return table if table.dtype == f32 else self.b.cast(table, to=f32)

    def _table(self, tensor: StoredTensor, runs: Runs) -> Value:
        """Rows of integers, above 0: bytes [rows, runs, run], or two of 4 bits in a byte."""

        def values() -> Array:
            if _has_bytes(runs):
                return runs.q.view(np.uint8).reshape(*runs.scale.shape, -1) ^ np.uint8(128)
            q = runs.q.astype(np.uint8) ^ np.uint8(8)
            return (q[..., ::2] & 15) | (q[..., 1::2] << 4)

        suffix = "" if _has_bytes(runs) else ".rows"
        return self._parameter(f"{tensor.name}{suffix}", values)

    def _integers(self, tensor: StoredTensor, runs: Runs) -> tuple[Value, Value | None]:
        """The operand q of a product, and its zero points if it is unsigned."""
        is_tied = tensor.name == "token_embd.weight"
        if not (is_tied and _has_bytes(runs)):
            return self._parameter(tensor.name, lambda: runs.q), None
        # a tied table is read as rows first
        table = self.b.reshape(self._table(tensor, runs), shape=tensor.shape)
        middle = np.full(runs.scale.shape, 128, np.uint8)
        return table, self._parameter(f"{tensor.name}.zero", lambda: middle)

    def _sums(self, x: Value, run: int) -> Value:
        """Sums of runs of x [..., K], once for each x."""
        key = f"{x.name}/{run}"
        if key not in self._made:
            parts = self.b.reshape(x, shape=(*x.shape[:-1], x.shape[-1] // run, run))
            self._made[key] = self.b.reduce_sum(parts, axes=[x.rank], keepdims=False)
        return self._made[key]

    def _minimums(self, name: str, runs: Runs) -> Value:
        assert runs.minimum is not None
        minimum = runs.minimum
        return self._parameter(f"{name}.minimum.columns", lambda: np.ascontiguousarray(minimum.T))


def _has_bytes(runs: Runs) -> bool:
    """Whether a table has the bytes of MatMulNBits, so that a tied head reads the same."""
    return bool(runs.q.dtype == np.int8)


class ExchangeDecoder(DecoderLayers):
    """Attention over keys and values of earlier runs, which are inputs and outputs."""

    def __init__(self, b: Builder, config: ModelConfig, weights: Weights, context: int) -> None:
        super().__init__(b, config, weights)
        batch, seq, past = symbol("batch"), symbol("seq"), symbol("past")
        self.batch, self.seq, self.total = batch, seq, past + seq
        i64 = DTYPES["i64"]
        self.tokens = b.input("input_ids", TensorType(i64, (batch, seq)))
        mask = b.input("attention_mask", TensorType(i64, (batch, self.total)))
        position = b.input("position_ids", TensorType(i64, (batch, seq)))
        sizes = (batch, config.kv_heads, past, config.head_dim)
        self.past = [
            tuple(
                b.input(f"past_key_values.{layer}.{kind}", TensorType(f32, sizes))
                for kind in ("key", "value")
            )
            for layer in range(config.layers)
        ]
        self.present: dict[str, Value] = {}
        self.seen = b.reshape(b.ne(mask, np.int64(0)), shape=(batch, 1, 1, self.total))
        places = b.reshape(b.cast(position, to=f32), shape=(batch, seq, 1))
        self.angles = []
        for rope in config.ropes:
            frequencies, scale = rope.at(context)
            angle = b.mul(places, np.asarray(frequencies, np.float32))
            self.angles.append(tuple(b.mul(f(angle), np.float32(scale)) for f in (b.cos, b.sin)))

    def attended(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        b, c = self.b, self.config
        heads = [
            b.transpose(
                b.reshape(part, shape=(self.batch, self.seq, *part.shape[1:])), perm=(0, 2, 1, 3)
            )
            for part in (q, k, v)
        ]
        q, k = (self._rotated(part, layer) for part in heads[:2])
        kept = []
        for kind, past, new in zip(("key", "value"), self.past[layer], (k, heads[2]), strict=True):
            kept.append(b.concat(past, new, axis=2))
            self.present[f"present.{layer}.{kind}"] = kept[-1]
        y = b.attention(
            q,
            *kept,
            self.seen,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            causal=True,
            causal_offset="end",
            window=c.windows[layer] or None,
        )
        found: Value = b.reshape(
            b.transpose(y, perm=(0, 2, 1, 3)),
            shape=(self.batch * self.seq, c.heads, c.head_dim),
        )
        return found

    def _rotated(self, x: Value, layer: int) -> Value:
        c, number = self.config, self.config.rope_of_layer[layer]
        if number < 0:
            return x
        dim = 2 * len(c.ropes[number].frequencies)
        rotary_dim = 0 if dim == c.head_dim else dim
        y: Value = self.b.rotary(
            x, *self.angles[number], interleaved=c.interleaved, rotary_dim=rotary_dim
        )
        return y


def exchange_graph(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    context: int,
    where: str = "",
    last_logits: bool = False,
) -> Graph:
    """The graph of plain ops; with `last_logits` only those of the last position, [batch, 1, …].

    `context` chooses among the frequencies of a model that has two sets of them.
    """
    b = Builder(config.name or config.architecture)
    weights = PlainWeights(b, tensors, where)
    decoder = ExchangeDecoder(b, config, weights, context)
    batch, seq = decoder.batch, decoder.seq
    tokens = b.reshape(decoder.tokens, shape=(batch * seq,))
    x = weights.rows(tokens, "token_embd.weight", config.vocab, config.width)
    if config.embedding_scale != 1:
        x = b.mul(x, np.float32(config.embedding_scale))
    for layer in range(config.layers):
        x = decoder.layer(x, layer)
    if last_logits:
        x = b.reshape(x, shape=(batch, seq, config.width))
        x = b.gather(x, np.int64(-1), axis=1)
    shape = (batch, 1 if last_logits else seq, config.vocab)
    logits = b.reshape(decoder.logits(x), shape=shape)
    b.output("logits", logits)
    for name, value in decoder.present.items():
        b.output(name, value)
    require_all_used(config, weights)
    return b.build()
