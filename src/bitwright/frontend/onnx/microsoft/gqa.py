"""Rotary embedding, and grouped-query attention over a cache of keys.

Each sequence of the batch has `seqlens_k + 1` valid keys after the step, and S of them are new:
those from position p = max(seqlens_k + 1 - S, 0) on. (A prompt padded on the right has fewer valid
keys than S; its p is 0, and the rows of the padding are not read.) The present cache is the past
with the new keys written at p, and query i attends to keys up to p + i.
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import count_up, microsoft, refuse, required
from bitwright.frontend.onnx.standard.attention import join_heads, split_heads
from bitwright.ir import Size, Value
from bitwright.ir.dim import max_size


@microsoft("RotaryEmbedding", needs=4, most=4)
def rotary_embedding(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, positions, cos, sin = inputs
    if node.flag("is_packed_batching"):
        raise refuse(node, "its batch is packed without padding")
    rotated = node.integer("rotary_embedding_dim", 0)
    folded = x.rank == 3
    if folded:
        heads = node.integer("num_heads", 0) or x.shape[2] // (2 * cos.shape[1])
        x = split_heads(ctx, node, x, heads)
    elif x.rank != 4:
        raise ImportModelError("has the wrong rank", where=node.where, found=x.type)
    batch, _, length, _ = x.shape
    if positions.rank < 2:
        steps = count_up(ctx, length, "i64", x)
        positions = ctx.b.add(
            ctx.unsqueeze(steps, [0]), ctx.reshape(ctx.cast(positions, "i64"), [1, 1])
        )
        positions = ctx.b.expand(positions, shape=(batch, length))
    y = ctx.b.rotary(
        x, cos, sin, positions, interleaved=node.flag("interleaved"), rotary_dim=rotated
    )
    return join_heads(ctx, y) if folded else y


@microsoft("GroupQueryAttention", needs=1)
def group_query_attention(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    query, key, value, past_k, past_v, lengths, total, cos, sin, positions, bias, sink = (
        inputs[i] for i in range(12)
    )
    _check(node, inputs)
    q, k, v = _heads(ctx, node, query, key, value)
    if inputs[14] is not None and inputs[15] is not None:
        eps = node.number("qk_norm_epsilon", 1e-6)
        q, k = (
            ctx.b.rms_norm(x, scale, axis=-1, eps=eps)
            for x, scale in ((q, inputs[14]), (k, inputs[15]))
        )
    step = ctx.vector([q.shape[2]], q)
    valid = ctx.b.add(ctx.reshape(ctx.cast(lengths, "i64"), [q.shape[0]]), ctx.const(1))
    start = ctx.b.maximum(ctx.b.sub(valid, step), ctx.const(0))
    if node.flag("do_rotary"):
        q, k = _rotated(ctx, node, q, k, start, cos, sin, positions)
    if past_k is not None and past_v is not None and past_k.shape[2] != 0:
        growth = _growth(ctx, past_k, total)
        k, v = (
            _write_cache(ctx, old, new, start, growth) for old, new in ((past_k, k), (past_v, v))
        )
    ends = ctx.b.add(start, step)
    y = _attend(ctx, node, q, k, v, ends, bias, sink)
    return [join_heads(ctx, y), k, v]


def _check(node: OnnxNode, inputs: Inputs) -> None:
    if inputs[5] is None or inputs[6] is None:
        raise ImportModelError("the lengths of the keys are missing", where=node.where)
    if inputs[12] is not None or inputs[13] is not None:
        raise refuse(node, "its cache is quantized")
    if node.flag("sliding_window_cache"):
        raise refuse(node, "its cache drops keys outside the window")
    if node.has_output(3):
        raise refuse(node, "the scores are an output")
    if node.flag("do_rotary") and (inputs[7] is None or inputs[8] is None):
        raise ImportModelError(
            "do_rotary is set, and the tables of angles are missing", where=node.where
        )


def _heads(
    ctx: Context, node: OnnxNode, query: Value, key: Value | None, value: Value | None
) -> tuple[Value, Value, Value]:
    """q, k and v as [batch, heads, length, features]; without a key, the query is packed."""
    heads, groups = required(node, "num_heads"), required(node, "kv_num_heads")
    if heads < 1 or groups < 1 or heads % groups:
        raise ImportModelError(
            "num_heads is no multiple of kv_num_heads",
            where=node.where,
            found=f"{heads} and {groups}",
        )
    if key is None or value is None:
        size = query.shape[2] // (heads + 2 * groups)
        sizes = (heads * size, groups * size, groups * size)
        query, key, value = ctx.b.split(query, axis=2, sizes=sizes)
    return (
        split_heads(ctx, node, query, heads),
        split_heads(ctx, node, key, groups),
        split_heads(ctx, node, value, groups),
    )


def _rotated(
    ctx: Context,
    node: OnnxNode,
    q: Value,
    k: Value,
    start: Value,
    cos: Value,
    sin: Value,
    positions: Value | None,
) -> tuple[Value, Value]:
    batch, _, length, features = q.shape
    if positions is None:
        steps = count_up(ctx, length, "i64", q)
        positions = ctx.b.add(ctx.reshape(start, [batch, 1]), ctx.unsqueeze(steps, [0]))
    rotated = 2 * cos.shape[1]
    attrs = {
        "interleaved": node.flag("rotary_interleaved"),
        "rotary_dim": 0 if rotated == features else rotated,
    }
    return (
        ctx.b.rotary(q, cos, sin, positions, **attrs),
        ctx.b.rotary(k, cos, sin, positions, **attrs),
    )


def _growth(ctx: Context, past: Value, total: Value) -> Size | Value:
    """By how much the present cache exceeds the past one, which may be preallocated."""
    sizes = ctx.sizes(total, past)
    if sizes is not None:
        return max_size(sizes[0] - past.shape[2], 0)
    length = ctx.vector([past.shape[2]], past)
    missing = ctx.b.sub(ctx.reshape(ctx.cast(total, "i64"), [1]), length)
    return ctx.b.maximum(missing, ctx.const(0))


def _write_cache(
    ctx: Context, past: Value, new: Value, start: Value, growth: Size | Value
) -> Value:
    if isinstance(growth, Value):
        pads = ctx.b.concat(
            ctx.const(np.zeros(6, np.int64)), growth, ctx.const(np.zeros(1, np.int64)), axis=0
        )
        longer = ctx.refine(ctx.b.pad(past, None, pads), [*past.shape[:2], None, past.shape[3]])
    else:
        longer = past if growth == 0 else ctx.b.pad(past, pads=(0, 0, 0, 0, 0, 0, growth, 0))
    return ctx.b.tensor_scatter(longer, new, start, axis=2)


def _attend(
    ctx: Context,
    node: OnnxNode,
    q: Value,
    k: Value,
    v: Value,
    ends: Value,
    bias: Value | None,
    sink: Value | None,
) -> Value:
    causal, window = node.flag("causal", 1), node.integer("local_window_size", -1)
    attrs = {
        "scale": node.number("scale") or None,
        "softcap": node.number("softcap", 0.0),
        "causal": causal,
        "window": window if window > 0 else None,
    }
    if sink is None and node.integer("smooth_softmax", -1) != 1:
        return ctx.b.attention(q, k, v, bias, None, None, ends, **attrs)
    return _with_sink(ctx, node, (q, k, v), ends, bias, sink, attrs)


def _with_sink(
    ctx: Context,
    node: OnnxNode,
    heads: tuple[Value, Value, Value],
    ends: Value,
    bias: Value | None,
    sink: Value | None,
    attrs: dict[str, object],
) -> Value:
    """Attention with an attention sink: one more key, whose value is 0 and whose score is the
    sink's, comes first."""
    q, k, v = heads
    batch, _, length, _ = q.shape
    at = count_up(ctx, k.shape[2], "i64", k)
    steps = ctx.unsqueeze(count_up(ctx, length, "i64", q), [1])
    before = ctx.b.sub(ends, ctx.vector([length], q))
    last = ctx.b.add(steps, ctx.reshape(before, [batch, 1, 1, 1]))
    stops = ctx.reshape(ends, [batch, 1, 1, 1])
    visible = ctx.b.le(at, last) if attrs["causal"] else ctx.b.lt(at, stops)
    if attrs["window"] is not None:
        visible = ctx.b.and_(visible, ctx.b.gt(at, ctx.b.sub(last, ctx.const(attrs["window"]))))
    score_bias = ctx.b.where(visible, ctx.like(q, 0), ctx.like(q, -np.inf))
    if bias is not None:
        score_bias = ctx.b.add(score_bias, bias)
    count = required(node, "num_heads")
    score = ctx.const(np.zeros(1), q.dtype) if sink is None else sink
    first = ctx.reshape(score, [1, score.shape[0], 1, 1])
    shape = (batch, count, score_bias.shape[2], 1)
    mask = ctx.b.concat(
        ctx.b.expand(first, shape=shape),
        ctx.b.expand(score_bias, shape=(batch, count, *score_bias.shape[2:])),
        axis=3,
    )
    pads = (0, 0, 1, 0, 0, 0, 0, 0)
    k, v = ctx.b.pad(k, pads=pads), ctx.b.pad(v, pads=pads)
    return ctx.b.attention(q, k, v, mask, scale=attrs["scale"], softcap=attrs["softcap"])
