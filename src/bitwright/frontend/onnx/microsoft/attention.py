"""Attention with projections, masks and caches in one node.

    Attention           x @ weights + bias gives q, k and v
    MultiHeadAttention  q, k and v are operands, separate or packed

Masks are 1 for visible keys; `mask_filter_value` is added to the scores of the others, so a row
without visible keys is an average. Caches grow by concatenation: present = concat(past, new keys).
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import count_up, microsoft, refuse, required
from bitwright.frontend.onnx.standard.attention import join_heads, split_heads
from bitwright.ir import Size, Value

FILTER = -10000.0


@microsoft("Attention", needs=2)
def attention(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, weights, bias, mask, past, attention_bias, past_length = (inputs[i] for i in range(7))
    if past_length is not None:
        raise refuse(node, "past and present share a buffer")
    projected = ctx.b.matmul(x, weights)
    if bias is not None:
        projected = ctx.b.add(projected, bias)
    return attend_projected(ctx, node, projected, mask, past, attention_bias)


def attend_projected(
    ctx: Context,
    node: OnnxNode,
    projected: Value,
    mask: Value | None,
    past: Value | None,
    attention_bias: Value | None = None,
) -> list[Value | None]:
    """Attention over concatenated q, k and v; the result and the present cache."""
    if node.flag("do_rotary") or node.flag("past_present_share_buffer"):
        raise refuse(node, "it rotates positions, or past and present share a buffer")
    third = projected.shape[2] // 3
    sizes = node.items("qkv_hidden_sizes") or [third, third, third]
    heads = required(node, "num_heads")
    q, k, v = (
        split_heads(ctx, node, part, heads)
        for part in ctx.b.split(projected, axis=2, sizes=tuple(sizes))
    )
    past_kv = None if past is None else [_past_part(ctx, past, index) for index in range(2)]
    added = score_bias(ctx, node, mask, q, k, total_keys(k, past_kv), attention_bias)
    y = attend(ctx, node, q, k, v, added, past_kv)
    if not node.has_output(1):
        return [join_heads(ctx, y)]
    keys, values = (ctx.unsqueeze(x, [0]) for x in present(ctx, k, v, past_kv))
    return [join_heads(ctx, y), ctx.b.concat(keys, values, axis=0)]


def _past_part(ctx: Context, past: Value, index: int) -> Value:
    return ctx.squeeze(ctx.slice(past, 0, index, index + 1), [0])


def attend(
    ctx: Context,
    node: OnnxNode,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    past: Sequence[Value] | None,
) -> Value:
    scale, causal = node.number("scale") or None, node.flag("unidirectional")
    return ctx.b.attention(q, k, v, mask, *(past or ()), scale=scale, causal=causal)


def total_keys(k: Value, past: Sequence[Value] | None) -> Size:
    new: Size = k.shape[2]
    return new + past[0].shape[2] if past else new


def present(ctx: Context, k: Value, v: Value, past: Sequence[Value] | None) -> list[Value]:
    """The keys and values of the past, concatenated with the new ones."""
    if not past:
        return [k, v]
    return [ctx.b.concat(old, new, axis=2) for old, new in zip(past, (k, v), strict=True)]


def score_bias(
    ctx: Context,
    node: OnnxNode,
    mask: Value | None,
    q: Value,
    k: Value,
    total: Size,
    attention_bias: Value | None,
) -> Value | None:
    """The bias of the scores, from a mask in any form and an attention bias."""
    visible = None if mask is None else _visible(ctx, node, mask, q.shape[0], total, k)
    if visible is None:
        return attention_bias
    filter_value = node.number("mask_filter_value", FILTER)
    added = ctx.b.where(visible, ctx.like(q, 0), ctx.like(q, filter_value))
    return added if attention_bias is None else ctx.b.add(added, attention_bias)


def _visible(
    ctx: Context, node: OnnxNode, mask: Value, batch: Size, total: Size, k: Value
) -> Value | None:
    """The visible keys as [batch, 1, 1 or queries, keys]; None if all are visible."""
    if mask.rank == 1:
        return _within(ctx, node, mask, batch, total, k)
    if mask.rank == 2 and mask.shape[1] == 1 and total != 1:
        return None  # a mask of one column means no mask
    shown = ctx.b.gt(mask, ctx.like(mask, 0))
    if mask.rank == 2:
        return ctx.unsqueeze(shown, [1, 2])
    if mask.rank == 3:
        return ctx.unsqueeze(shown, [1])
    raise refuse(node, f"its mask {mask.type} has rank {mask.rank}")


def _within(ctx: Context, node: OnnxNode, ends: Value, batch: Size, total: Size, k: Value) -> Value:
    """Keys between the start and the end of each sequence; starts follow the ends, if given."""
    at = count_up(ctx, total, "i32", k)
    column = [batch, 1, 1, 1]
    if ends.shape[0] == batch:
        return ctx.b.lt(at, ctx.reshape(ends, column))
    if ends.shape[0] == 2 * batch:
        stops, starts = ctx.b.split(ends, axis=0, sizes=(batch, batch))
        before = ctx.b.lt(at, ctx.reshape(stops, column))
        return ctx.b.and_(before, ctx.b.ge(at, ctx.reshape(starts, column)))
    raise refuse(node, f"a mask {ends.type} is ambiguous for {batch} sequences")


@microsoft("MultiHeadAttention", "DecoderMaskedMultiHeadAttention")
def multi_head_attention(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    if node.op_type == "MultiHeadAttention":
        query, key, value, bias, mask, attention_bias, past_k, past_v, length, indirection = (
            inputs[i] for i in range(10)
        )
    else:
        query, key, value, mask, attention_bias, past_k, past_v, length = (
            inputs[i] for i in range(8)
        )
        indirection, bias = inputs[9], inputs[10]
    if indirection is not None:
        raise refuse(node, "it uses beam search")
    if node.has_output(3):
        raise refuse(node, "the scores are an output")
    q, k, v = _heads(ctx, node, query, key, value, bias)
    past = None if past_k is None or past_v is None else [past_k, past_v]
    if past and (length is not None or node.flag("past_present_share_buffer")):
        return _in_buffer(ctx, node, (q, k, v), past, length, mask, attention_bias)
    added = score_bias(ctx, node, mask, q, k, total_keys(k, past), attention_bias)
    y = attend(ctx, node, q, k, v, added, past)
    return [join_heads(ctx, y), *present(ctx, k, v, past)]


def _in_buffer(
    ctx: Context,
    node: OnnxNode,
    heads: tuple[Value, Value, Value],
    past: Sequence[Value],
    length: Value | None,
    mask: Value | None,
    attention_bias: Value | None,
) -> Results:
    """Attention with a preallocated cache; new keys are written after the first `length`."""
    if length is None:
        raise refuse(node, "the length of its cache is missing")
    q, k, v = heads
    batch, queries = q.shape[0], q.shape[2]
    filled = ctx.b.expand(ctx.reshape(ctx.cast(length, "i64"), [1]), shape=(batch,))
    keys, values = (
        ctx.b.tensor_scatter(old, new, filled, axis=2)
        for old, new in zip(past, (k, v), strict=True)
    )
    added = score_bias(ctx, node, mask, q, keys, keys.shape[2], attention_bias)
    count = ctx.need_vector([queries], q)
    y = ctx.b.attention(
        q,
        keys,
        values,
        added,
        None,
        None,
        ctx.b.add(filled, count),
        scale=node.number("scale") or None,
        causal=node.flag("unidirectional"),
    )
    return [join_heads(ctx, y), keys, values]


def _heads(
    ctx: Context,
    node: OnnxNode,
    query: Value,
    key: Value | None,
    value: Value | None,
    bias: Value | None,
) -> tuple[Value, Value, Value]:
    """q, k and v as [batch, heads, length, features], with the bias of their projection."""
    heads = required(node, "num_heads")
    if query.rank == 5:  # [batch, length, heads, 3, features]
        q, k, v = _packed(ctx, query, 3)
        return _with_bias(ctx, node, [q, k, v], bias, heads)
    if key is None:  # [batch, length, q then k then v]
        third = query.shape[2] // 3
        parts: Sequence[Value] = ctx.b.split(query, axis=2, sizes=(third, third, third))
        q, k, v = (split_heads(ctx, node, part, heads) for part in parts)
        return _with_bias(ctx, node, [q, k, v], bias, heads)
    q = split_heads(ctx, node, query, heads)
    if key.rank == 5:  # [batch, length, heads, 2, features]
        k, v = _packed(ctx, key, 2)
    elif value is None:
        raise refuse(node, f"its key {key.type} has no value operand")
    elif key.rank == 4:  # heads are split already
        q, _, _ = _with_bias(ctx, node, [q, q, q], bias, heads)
        return q, key, value
    else:
        k, v = (split_heads(ctx, node, part, heads) for part in (key, value))
    return _with_bias(ctx, node, [q, k, v], bias, heads)


def _packed(ctx: Context, x: Value, count: int) -> list[Value]:
    """The `count` parts of [batch, length, heads, count, features]."""
    parts = ctx.b.split(x, axis=3, sizes=(1,) * count)
    return [ctx.transpose(ctx.squeeze(part, [3]), 0, 2, 1, 3) for part in parts]


def _with_bias(
    ctx: Context, node: OnnxNode, parts: Sequence[Value], bias: Value | None, heads: int
) -> tuple[Value, Value, Value]:
    q, k, v = parts
    if bias is None:
        return q, k, v
    sizes = tuple(heads * part.shape[3] for part in parts)
    biases = ctx.b.split(bias, axis=0, sizes=sizes)
    q, k, v = (
        ctx.b.add(part, ctx.reshape(own, [heads, 1, part.shape[3]]))
        for part, own in zip(parts, biases, strict=True)
    )
    return q, k, v
