"""Layers with a state along the sequence: causal convolution and linear attention."""

from __future__ import annotations

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, refuse, required
from bitwright.frontend.onnx.standard.attention import join_heads, split_heads
from bitwright.ir import Value

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "none": ""}


@microsoft("CausalConvWithState", needs=2)
def causal_conv_with_state(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """A causal depthwise convolution over past state and x; its last positions are the state."""
    x, w, bias, past = (inputs[i] for i in range(4))
    name = node.text("activation", "none")
    if node.integer("ndim", 1) != 1 or node.flag("channels_last") or node.integer("state_window"):
        raise refuse(node, "it has several dimensions, channels last, or a window of states")
    if name not in _ACTIVATIONS:
        raise refuse(node, f"its activation {name!r} is not known")
    if x.rank != 3 or w.rank != 3 or not isinstance(w.shape[2], int):
        raise ImportModelError(
            "its operands have the wrong rank", where=node.where, found=f"{x.type} and {w.type}"
        )
    dilation = node.integer("dilation", 1)
    before = (w.shape[2] - 1) * dilation
    if past is None:
        whole = ctx.b.pad(x, pads=(0, 0, before, 0, 0, 0))
    else:
        whole = ctx.b.concat(past, x, axis=2)
    y = ctx.b.conv(whole, w, bias, dilations=(dilation,), groups=x.shape[1])
    if _ACTIVATIONS[name]:
        y = ctx.b.op(_ACTIVATIONS[name], y)
    return [y, ctx.slice(whole, 2, x.shape[2], x.shape[2] + before)]


@microsoft("LinearAttention", needs=3)
def linear_attention(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    query, key, value, past, decay, beta = (inputs[i] for i in range(6))
    heads, groups = required(node, "q_num_heads"), required(node, "kv_num_heads")
    rule = node.text("update_rule", "gated_delta")
    if rule not in ("delta", "gated_delta"):
        raise refuse(node, f"the update rule {rule!r} has no op here")
    if heads != groups:
        raise refuse(node, "its queries and keys have different numbers of heads")
    if node.integer("state_window"):
        raise refuse(node, "state_window is set")
    if beta is None or (rule == "gated_delta" and decay is None):
        raise ImportModelError("its decay or update rate is missing", where=node.where)
    q, k, v = (split_heads(ctx, node, x, heads) for x in (query, key, value))
    rate = _per_head(ctx, node, beta, q)
    if rule == "delta":
        forgotten = ctx.b.mul(rate, ctx.like(rate, 0))
    else:
        forgotten = _per_head(ctx, node, decay, q)
    state = None if past is None else ctx.cast(past, q.dtype)
    scale = node.number("scale", 0.0) or None
    y, last = ctx.b.gated_delta(q, k, v, forgotten, rate, state, scale=scale)
    return [join_heads(ctx, y), last if past is None else ctx.cast(last, past.dtype)]


def _per_head(ctx: Context, node: OnnxNode, x: Value, q: Value) -> Value:
    """[batch, length, heads or 1] as [batch, heads, length]."""
    batch, heads, length, _ = q.shape
    if x.rank != 3 or x.shape[2] not in (1, heads):
        raise refuse(node, f"a decay or update rate {x.type} for each key feature has no op here")
    return ctx.b.expand(ctx.transpose(x, 0, 2, 1), shape=(batch, heads, length))
