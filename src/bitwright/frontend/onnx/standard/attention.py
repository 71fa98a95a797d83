"""Attention and rotary embeddings, with 4-D operands or with heads folded into the features."""

from __future__ import annotations

from typing import Any

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.tensor import element_type
from bitwright.ir import Value


def split_heads(ctx: Context, node: OnnxNode, x: Value, heads: int | None) -> Value:
    """[B, S, H*D] as [B, H, S, D]."""
    if not heads or x.rank != 3:
        raise ImportModelError(
            "its heads cannot be split",
            where=node.where,
            expected="a number of heads and 3-D operands",
            found=f"{heads} and {x.type}",
        )
    batch, length, features = x.shape
    split = ctx.reshape(x, [batch, length, heads, features // heads])
    return ctx.transpose(split, 0, 2, 1, 3)


def join_heads(ctx: Context, x: Value) -> Value:
    """[B, H, S, D] as [B, S, H*D]."""
    batch, heads, length, features = x.shape
    return ctx.reshape(ctx.transpose(x, 0, 2, 1, 3), [batch, length, heads * features])


@imports("Attention")
def attention(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    q, k, v, mask, past_k, past_v, lengths = (inputs[i] for i in range(7))
    if node.has_output(3):
        raise UnmappedError("the scores are an output")
    folded = q.rank == 3
    if folded:
        q = split_heads(ctx, node, q, node.integer("q_num_heads"))
        k, v = (split_heads(ctx, node, x, node.integer("kv_num_heads")) for x in (k, v))
    if (past_k is None) != (past_v is None):
        raise ImportModelError("past keys and values come together", where=node.where)
    present = [k, v]
    if past_k is not None:
        present = [ctx.b.concat(past_k, k, axis=2), ctx.b.concat(past_v, v, axis=2)]
    precision = node.integer("softmax_precision")
    attrs: dict[str, Any] = {
        "scale": node.number("scale"),
        "causal": node.flag("is_causal"),
        "softcap": node.number("softcap", 0.0),
        "softmax_dtype": element_type(precision, node.where) if precision else None,
        "window_right": _bound(node.integer("right_window_size", -1)),
    }
    left = _bound(node.integer("left_window_size", -1))
    attrs["window"] = None if left is None else left + 1  # ours includes the query's own position
    y = ctx.b.attention(q, k, v, mask, past_k, past_v, lengths, **attrs)
    return [join_heads(ctx, y) if folded else y, *present]


def _bound(size: int) -> int | None:
    return None if size < 0 else size


@imports("RotaryEmbedding")
def rotary_embedding(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, cos, sin, positions = (inputs[i] for i in range(4))
    folded = x.rank == 3
    if folded:
        x = split_heads(ctx, node, x, node.integer("num_heads"))
    y = ctx.b.rotary(
        x,
        cos,
        sin,
        positions,
        interleaved=node.flag("interleaved"),
        rotary_dim=node.integer("rotary_embedding_dim", 0),
    )
    return join_heads(ctx, y) if folded else y
