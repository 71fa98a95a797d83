"""Normalizations fused with residual sums, and BERT embeddings."""

from __future__ import annotations

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, refuse, required
from bitwright.frontend.onnx.microsoft.nn import channels_first, channels_last
from bitwright.ir import Value
from bitwright.ir.types import normalize_axis

EPS = 1e-12
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def _moments(ctx: Context, x: Value, axis: int, eps: float, centred: bool) -> list[Value | None]:
    """The mean and inverse deviation over the axes from `axis` on, outputs for training."""
    axes = list(range(axis, x.rank))
    wide = ctx.cast(x, "f32")
    mean = None
    if centred:
        mean = ctx.b.reduce_mean(wide, axes=axes, keepdims=True)
        wide = ctx.b.sub(wide, mean)
    variance = ctx.b.reduce_mean(ctx.b.mul(wide, wide), axes=axes, keepdims=True)
    return [mean, ctx.b.rsqrt(ctx.b.add(variance, ctx.like(variance, eps)))]


@microsoft("SimplifiedLayerNormalization", needs=2, domain="")
@microsoft("SimplifiedLayerNormalization", needs=2)
def simplified_layer_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale = inputs[0], inputs[1]
    axis = normalize_axis(node.integer("axis", -1), x.rank)
    eps = node.number("epsilon", 1e-5)
    y = ctx.cast(ctx.b.rms_norm(ctx.cast(x, scale.dtype), scale, axis=axis, eps=eps), scale.dtype)
    return [y, _moments(ctx, x, axis, eps, False)[1] if node.has_output(1) else None]


@microsoft("SkipLayerNormalization", needs=3)
def skip_layer_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """layer_norm(x + skip + bias), and that sum"""
    x, skip, gamma, beta, bias = (inputs[i] for i in range(5))
    eps = node.number("epsilon", EPS)
    total = _sum(ctx, x, skip, bias)
    y = ctx.b.layer_norm(total, gamma, beta, axis=-1, eps=eps)
    wanted = node.has_output(1) or node.has_output(2)
    moments = _moments(ctx, total, x.rank - 1, eps, True) if wanted else [None, None]
    return [y, *moments, total]


@microsoft("SkipSimplifiedLayerNormalization", needs=3)
def skip_simplified_layer_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, skip, gamma, bias = (inputs[i] for i in range(4))
    eps = node.number("epsilon", EPS)
    total = _sum(ctx, x, skip, bias)
    if node.has_output(1):
        raise refuse(node, "the mean, which this norm does not compute, is an output")
    inverse = _moments(ctx, total, x.rank - 1, eps, False)[1] if node.has_output(2) else None
    return [ctx.b.rms_norm(total, gamma, axis=-1, eps=eps), None, inverse, total]


def _sum(ctx: Context, x: Value, skip: Value, bias: Value | None) -> Value:
    total = ctx.b.add(x, skip)
    return total if bias is None else ctx.b.add(total, bias)


@microsoft("EmbedLayerNormalization", needs=1)
def embed_layer_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """layer_norm(word[ids] + position[places] + segment[segments]), and sequence lengths."""
    ids, segments, words, positions, segment_table, gamma, beta, mask, places = (
        inputs[i] for i in range(9)
    )
    total = embedded(ctx, node, ids, words, positions, places)
    if segments is not None and segment_table is not None:
        total = ctx.b.add(total, ctx.b.gather(segment_table, segments, axis=0))
    y = ctx.b.layer_norm(total, gamma, beta, axis=-1, eps=node.number("epsilon", EPS))
    return [y, mask_index(ctx, ids, mask), total]


def embedded(
    ctx: Context,
    node: OnnxNode,
    ids: Value,
    words: Value | None,
    positions: Value | None,
    places: Value | None,
) -> Value:
    """Word embeddings plus position embeddings; positions are 0, 1, … unless given."""
    if ids.rank != 2 or words is None or positions is None:
        raise refuse(node, f"ids {ids.type} have no batch, or a table is missing")
    if places is None:
        place = ctx.slice(positions, 0, 0, ids.shape[1])
    else:
        place = ctx.b.gather(positions, places, axis=0)
    return ctx.b.add(ctx.b.gather(words, ids, axis=0), place)


def mask_index(ctx: Context, ids: Value, mask: Value | None) -> Value:
    """The number of unmasked words of each sequence; 0 without a mask."""
    if mask is None:
        zeros = ctx.b.mul(ids, ctx.like(ids, 0))
        return ctx.cast(ctx.b.reduce_sum(zeros, axes=[1], keepdims=False), "i32")
    shown = ctx.cast(ctx.b.eq(mask, ctx.like(mask, 1)), "i32")
    return ctx.b.reduce_sum(shown, axes=[1], keepdims=False)


@microsoft("GroupNorm", "SkipGroupNorm", needs=3)
def group_norm(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, gamma, beta, skip, bias = (inputs[i] for i in range(5))
    last = node.flag("channels_last", 1)
    total = x
    if node.op_type == "SkipGroupNorm":
        if skip is None:
            raise refuse(node, "its skip operand is missing")
        for term in (skip, bias):
            if term is not None:
                total = ctx.b.add(total, _per_channel(ctx, term, x.rank, last))
    gamma, beta = (ctx.cast(v, x.dtype) for v in (gamma, beta))
    eps, groups = node.number("epsilon", 1e-5), required(node, "groups")
    y = channels_first(ctx, total) if last else total
    y = ctx.b.group_norm(y, gamma, beta, groups=groups, eps=eps)
    if required(node, "activation") == 1:
        y = ctx.b.silu(y)
    return [channels_last(ctx, y) if last else y, total]


def _per_channel(ctx: Context, x: Value, rank: int, last: bool) -> Value:
    """[N, C] or [C] reshaped to broadcast over an image; an image is unchanged."""
    if x.rank == rank:
        return x
    batch = list(x.shape[:-1]) or [1]
    spatial = [1] * (rank - 2)
    channels = x.shape[-1]
    return ctx.reshape(x, [*batch, *spatial, channels] if last else [*batch, channels, *spatial])


@microsoft("GatedRMSNorm", needs=3, most=3)
def gated_rms_norm(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """rms_norm(x) * scale * activation(gate), in groups of the scale's length"""
    x, scale, gate = inputs
    name = node.text("activation", "silu")
    if name not in _ACTIVATIONS:
        raise refuse(node, f"its activation {name!r} is not known")
    wide, wide_scale, wide_gate = (ctx.cast(v, "f32") for v in (x, scale, gate))
    normal = _grouped_rms(ctx, wide, wide_scale, scale.shape[0], node.number("epsilon", 1e-5))
    return ctx.cast(ctx.b.mul(normal, ctx.b.op(_ACTIVATIONS[name], wide_gate)), x.dtype)


@microsoft("BranchwiseRMSNorm")
def branchwise_rms_norm(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale, branches = inputs[0], inputs[1], node.integer("num_branches", 0)
    wide = ctx.cast(x, "f32")
    size = x.shape[-1] // branches if branches else x.shape[-1]
    count = branches or x.shape[-2]
    eps = node.number("epsilon", 1e-5)
    grouped = ctx.reshape(wide, [*x.shape[:-1], count, size]) if branches else wide
    y = ctx.b.rms_norm(grouped, axis=-1, eps=eps)
    if scale is not None:
        factor = ctx.cast(scale, "f32")
        if scale.rank == 1 and scale.shape[0] != size:
            factor = ctx.reshape(factor, [count, size])
        y = ctx.b.mul(y, factor)
    return ctx.cast(ctx.reshape(y, x.shape), x.dtype)


def _grouped_rms(ctx: Context, x: Value, scale: Value, size: int, eps: float) -> Value:
    features = x.shape[-1]
    if features == size:
        return ctx.b.rms_norm(x, scale, axis=-1, eps=eps)
    grouped = ctx.reshape(x, [*x.shape[:-1], features // size, size])
    return ctx.reshape(ctx.b.rms_norm(grouped, scale, axis=-1, eps=eps), x.shape)
