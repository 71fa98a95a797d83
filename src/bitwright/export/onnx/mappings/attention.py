"""Attention and rotary embeddings: one node if the opset has it, else a decomposition."""

from __future__ import annotations

import math
from typing import Any

from bitwright.export.onnx.forms import (
    counting,
    reduce,
    reshape,
    slice_axis,
    static_size,
    transpose,
    unsqueeze,
)
from bitwright.export.onnx.functions import region
from bitwright.export.onnx.mapping import Ref, Scope, exports
from bitwright.export.onnx.mappings.int8_attention import (
    call_attention,
    quantized_scores,
    weighted_values,
)
from bitwright.export.onnx.sizes import size_scalar, size_vector, sizes_tensor
from bitwright.ir.dim import Dim, Size, bounds
from bitwright.ir.dtype import DType, bool_, i64
from bitwright.ir.types import Shape


@exports("attention")
def attention(
    e: Scope,
    q: Ref,
    k: Ref,
    v: Ref,
    mask: Ref | None,
    past_k: Ref | None,
    past_v: Ref | None,
    lengths: Ref | None,
    **attrs: Any,
) -> Ref:
    int8 = attrs["int8"]
    if int8 and e.session.options.activations != "integer":
        return _float_region(e, (q, k, v, mask, past_k, past_v, lengths), attrs)
    if int8 and _is_function(q, k, mask, past_k, lengths):
        return call_attention(e, q, k, v, mask, attrs)
    if not int8 and attrs["causal_offset"] == "start" and _has_node(e, q, mask, lengths, attrs):
        return _node(e, (q, k, v, mask, past_k, past_v, lengths), attrs)
    before: Size = 0
    total: Size = k.shape[2]
    if past_k is not None and past_v is not None:
        before = past_k.shape[2]
        total = before + total
    keys = k if past_k is None else e.Concat(past_k, k, axis=2)
    values = v if past_v is None else e.Concat(past_v, v, axis=2)
    keys = _repeat_heads(e, keys, (*k.shape[:2], total, k.shape[3]), q.shape[1])
    values = _repeat_heads(e, values, (*v.shape[:2], total, v.shape[3]), q.shape[1])
    if int8:
        scores = quantized_scores(e, q, keys, attrs["scale"] or _inverse_root(e, q))
    else:
        scores = e.MatMul(scaled(e, q, attrs["scale"]), transpose(e, keys, 0, 1, 3, 2))
    if attrs["softcap"] > 0:
        cap = e.scalar(attrs["softcap"], q)
        scores = e.Mul(cap, e.Tanh(e.Div(scores, cap)))
    bias = _bias(e, q, total, before, mask, lengths, attrs)
    if int8:
        return weighted_values(e, scores, bias[0], values, attrs["causal"])
    weights = _softmax(e, scores, bias, attrs["softmax_dtype"])
    return e.MatMul(weights, values)


def _inverse_root(e: Scope, q: Ref) -> float:
    """1 / sqrt(features)"""
    return float((static_size(e, q.shape[3]) or 1) ** -0.5)


def _float_region(e: Scope, operands: tuple[Ref | None, ...], attrs: dict[str, Any]) -> Ref:
    """Float attention as a region; bitwright quantizes queries, keys and values at run time."""
    given = list(operands)
    while given[-1] is None:
        given.pop()

    def body(e: Scope, q: Ref, k: Ref, v: Ref, *rest: Ref | None) -> tuple[Ref, ...]:
        others: list[Ref | None] = [*rest, *[None] * (4 - len(rest))]
        mask, past_k, past_v, lengths = others
        plain = {**attrs, "int8": False}
        return (attention(e, q, k, v, mask, past_k, past_v, lengths, **plain),)

    return region(e, "attention", given, attrs, body)[0]


def _is_function(q: Ref, k: Ref, mask: Ref | None, past_k: Ref | None, lengths: Ref | None) -> bool:
    """Whether int8 attention is a call of a function: all sizes come from q, k and v."""
    known = all(isinstance(n, int) for n in (q.shape[1], k.shape[1], q.shape[3])) and k.shape[1]
    whole = mask is None or mask.shape[-1] in (1, k.shape[2])
    return bool(known) and whole and past_k is None and lengths is None


def _has_node(e: Scope, q: Ref, mask: Ref | None, lengths: Ref | None, attrs: Any) -> bool:
    """Whether the opset has this Attention; rows without visible keys are defined since 25."""
    is_windowed = attrs["window"] is not None or attrs["window_right"] is not None
    needs_25 = mask is not None or lengths is not None or is_windowed
    is_flat = mask is not None and mask.rank < 2
    return e.opset >= (25 if needs_25 else 23) and e.fits("Attention", [q, q, q]) and not is_flat


def _node(e: Scope, operands: tuple[Ref | None, ...], attrs: Any) -> Ref:
    window, right = attrs["window"], attrs["window_right"]
    return e.Attention(
        *operands,
        scale=attrs["scale"],
        is_causal=1 if attrs["causal"] else None,
        softcap=attrs["softcap"] or None,
        softmax_precision=attrs["softmax_dtype"],
        left_window_size=None if window is None else window - 1,  # ours includes the key itself
        right_window_size=right,
    )


def scaled(e: Scope, q: Ref, scale: float | None) -> Ref:
    features = q.shape[3]
    if scale is None and isinstance(features, Dim):
        return e.Div(q, e.Sqrt(e.cast(size_scalar(e, features), q.element)))
    factor = scale if scale is not None else 1 / math.sqrt(static_size(e, features) or 1)
    return q if factor == 1 else e.Mul(q, e.scalar(factor, q))


def _repeat_heads(e: Scope, x: Ref, shape: tuple[Size, ...], heads: Size) -> Ref:
    """[B, Hk, T, D] as [B, H, T, D], with each head repeated H / Hk times."""
    batch, own, length, features = shape
    if own == heads:
        return x
    shared = heads // own
    wide = e.Expand(unsqueeze(e, x, 2), sizes_tensor(e, [1, 1, shared, 1, 1]))
    return reshape(
        e, wide, (batch, own, shared, length, features), (batch, heads, length, features)
    )


def _bias(
    e: Scope, q: Ref, total: Size, before: Size, mask: Ref | None, lengths: Ref | None, attrs: Any
) -> tuple[Ref | None, bool]:
    """The bias of the scores, and whether it may mask every key of a row."""
    queries = q.shape[2]
    visible, may_hide = _visible(e, queries, total, before, lengths, attrs)
    low = e.scalar(-math.inf, q)
    bias = None if visible is None else e.Where(visible, e.scalar(0, q), low)
    if mask is None:
        return bias, may_hide
    is_choice = mask.dtype == bool_
    given = e.Where(mask, e.scalar(0, q), low) if is_choice else e.cast(mask, q.element)
    given = _widen_mask(e, given, mask.shape, total, low)
    return given if bias is None else e.Add(given, bias), True


def _widen_mask(e: Scope, mask: Ref, shape: Shape, total: Size, low: Ref) -> Ref:
    """The mask padded with `low` to all keys; a mask of width 1 broadcasts instead."""
    width = shape[-1]
    if width in (1, total):
        return mask
    missing = size_vector(e, total - width)
    if isinstance(width, Dim):
        is_wide = e.Not(e.Equal(size_vector(e, width), e.ints([1])))
        missing = e.Mul(missing, e.cast(is_wide, i64))
    return e.Pad(mask, e.Concat(e.ints([0] * (2 * len(shape) - 1)), missing, axis=0), low)


def _visible(
    e: Scope, queries: Size, total: Size, before: Size, lengths: Ref | None, attrs: Any
) -> tuple[Ref | None, bool]:
    """The visible keys of each query, as booleans that broadcast to [B, H, S, T], and whether a row
    may have none."""
    window, right = attrs["window"], attrs["window_right"]
    if not attrs["causal"] and window is None and right is None and lengths is None:
        return None, False
    place = unsqueeze(e, counting(e, queries), 1)
    offset: Size = total - queries if attrs["causal_offset"] == "end" else before
    ends: Ref | None = None
    if lengths is not None:
        ends = e.Reshape(e.cast(lengths, i64), e.ints([-1, 1, 1, 1]))
        place = e.Add(place, e.Sub(ends, size_scalar(e, queries)))
    elif offset != 0:
        place = e.Add(place, size_scalar(e, offset))
    key = counting(e, total)
    rules = [e.LessOrEqual(key, place)] if attrs["causal"] else []
    if window is not None:
        rules.append(e.Greater(key, e.Sub(place, e.constant(window, i64))))
    if right is not None:
        rules.append(e.LessOrEqual(key, e.Add(place, e.constant(right, i64))))
    if ends is not None:
        rules.append(e.Less(key, ends))
    visible = rules[0]
    for rule in rules[1:]:
        visible = e.And(visible, rule)
    sees_first = window is None and lengths is None and bounds(offset)[0] >= 0
    return visible, not sees_first


def _softmax(e: Scope, scores: Ref, bias: tuple[Ref | None, bool], precision: DType | None) -> Ref:
    """Softmax of scores + bias; zeros in rows where the bias masks every key."""
    added, may_hide = bias
    total = scores if added is None else e.Add(scores, added)
    wide = total if precision is None else e.cast(total, precision)
    weights = e.cast(e.Softmax(wide, axis=-1), scores.element)
    if added is None or not may_hide:
        return weights
    top = reduce(e, "ReduceMax", added, [-1])
    return e.Where(e.Equal(top, e.scalar(-math.inf, top)), e.scalar(0, weights), weights)


# rotary


@exports("rotary")
def rotary(
    e: Scope, x: Ref, cos: Ref, sin: Ref, ids: Ref | None, interleaved: bool, rotary_dim: int
) -> Ref:
    """RotaryEmbedding since opset 23, if the shape of the tables fits."""
    positions = None if ids is None else e.cast(ids, i64)
    is_direct = ids is not None or (cos.rank == 3 and cos.shape[0] == x.shape[0])
    if is_direct and e.fits("RotaryEmbedding", [x, cos, sin, positions]):
        attrs = {"interleaved": interleaved, "rotary_embedding_dim": rotary_dim}
        return e.RotaryEmbedding(x, cos, sin, positions, **attrs)
    if positions is not None:
        cos, sin = e.Gather(cos, positions, axis=0), e.Gather(sin, positions, axis=0)
        rank = 3
    else:
        rank = cos.rank
    if rank == 3:
        cos, sin = unsqueeze(e, cos, 1), unsqueeze(e, sin, 1)
    width = rotary_dim or x.shape[3]
    if width == x.shape[3]:
        return _rotate(e, x, x.shape, cos, sin, interleaved)
    rotated = slice_axis(e, x, 3, 0, width)
    rest = slice_axis(e, x, 3, width)
    shape = (*x.shape[:3], width)
    return e.Concat(_rotate(e, rotated, shape, cos, sin, interleaved), rest, axis=3)


def _rotate(
    e: Scope, x: Ref, shape: tuple[Size, ...], cos: Ref, sin: Ref, interleaved: bool
) -> Ref:
    """(a, b) -> (a*cos - b*sin, b*cos + a*sin) for the pairs of the last axis."""
    half = shape[-1] // 2
    if interleaved:
        pairs = (*shape[:-1], half, 2)
        split = reshape(e, x, shape, pairs)
        first, second = (e.Gather(split, e.constant(i, i64), axis=-1) for i in (0, 1))
    else:
        first, second = e.emit("Split", [x, sizes_tensor(e, [half, half])], {"axis": -1}, results=2)
    left = e.Sub(e.Mul(first, cos), e.Mul(second, sin))
    right = e.Add(e.Mul(second, cos), e.Mul(first, sin))
    if not interleaved:
        return e.Concat(left, right, axis=-1)
    joined = e.Concat(unsqueeze(e, left, -1), unsqueeze(e, right, -1), axis=-1)
    return reshape(e, joined, pairs, shape)


@exports("axial_rotary")
def axial_rotary(
    e: Scope, x: Ref, cos_h: Ref, sin_h: Ref, cos_w: Ref, sin_w: Ref, interleaved: bool
) -> Ref:
    """x as [B, H, rows, columns, D]; each half of D rotates with the tables of one direction."""
    rows, columns = cos_h.shape[0], cos_w.shape[0]
    batch, heads, _, features = x.shape
    half = features // 2
    grid = (batch, heads, rows, columns, features)
    image = reshape(e, x, x.shape, grid)
    parts = e.emit("Split", [image, sizes_tensor(e, [half, half])], {"axis": -1}, results=2)
    shape = (*grid[:-1], half)
    cos_h, sin_h = unsqueeze(e, cos_h, 1), unsqueeze(e, sin_h, 1)
    rotated = e.Concat(
        _rotate(e, parts[0], shape, cos_h, sin_h, interleaved),
        _rotate(e, parts[1], shape, cos_w, sin_w, interleaved),
        axis=-1,
    )
    return reshape(e, rotated, grid, x.shape)
