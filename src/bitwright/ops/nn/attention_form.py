"""Attention as an expression of other ops, from which gradients of rare variants are derived.

weights = softmax(where(hidden, low, cap(scale * q @ k.T) + mask)) * ~hidden
y       = weights @ v
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dim import Size
from bitwright.ir.dtype import bool_
from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number

LOW = {"f16": -6e4}
"""A score whose power vanishes beside any other, where it is not -1e30."""


def compose_attention(
    b: Builder,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    past_k: Value | None = None,
    past_v: Value | None = None,
    lengths: Value | None = None,
    *,
    scale: float | None,
    softcap: float,
    **attrs: Any,
) -> Value:
    """The results of attention; a row without visible keys gives zeros."""
    before: Size = 0
    if past_k is not None and past_v is not None:
        before = past_k.shape[2]
        k, v = b.concat(past_k, k, axis=2), b.concat(past_v, v, axis=2)
    keys, values = (_per_query_head(b, x, q.shape[1]) for x in (k, v))
    features = q.shape[3]
    assert isinstance(features, int)
    factor = (features or 1) ** -0.5 if scale is None else scale
    scaled = b.mul(q, number(b, factor, q))
    scores = b.matmul(scaled, b.transpose(keys, perm=(0, 1, 3, 2)))
    if softcap > 0:
        cap = number(b, softcap, q)
        scores = b.mul(b.tanh(b.div(scores, cap)), cap)
    hidden = _hidden(b, q, k.shape[2], before, lengths, **attrs)
    if mask is not None:
        mask = _whole_mask(b, mask, k.shape[2])
        if mask.dtype == bool_:
            hidden.append(b.not_(mask))
        else:
            bias = mask if mask.dtype == q.dtype else b.cast(mask, to=q.dtype)
            hidden.append(b.eq(bias, number(b, -np.inf, bias)))
            scores = b.add(scores, bias)
    if not hidden:
        return _as_value(b.matmul(b.softmax(scores, axis=-1), values))
    covered = hidden[0]
    for more in hidden[1:]:
        covered = b.or_(covered, more)
    scores = b.where(covered, number(b, LOW.get(q.dtype.name, -1e30), q), scores)
    weights = b.where(covered, number(b, 0.0, q), b.softmax(scores, axis=-1))
    return _as_value(b.matmul(weights, values))


def _as_value(value: Any) -> Value:
    assert isinstance(value, Value)
    return value


def _per_query_head(b: Builder, x: Value, heads: Size) -> Value:
    """Keys or values [B, G, T, D] repeated for the query heads that share them."""
    batch, groups, keys, features = x.shape
    if heads == groups:
        return x
    shared = b.reshape(x, shape=(batch, groups, 1, keys, features))
    shared = b.expand(shared, shape=(batch, groups, heads // groups, keys, features))
    return _as_value(b.reshape(shared, shape=(batch, heads, keys, features)))


def _whole_mask(b: Builder, mask: Value, total: Size) -> Value:
    """The mask with hidden keys beyond its end, if it is shorter than the keys."""
    size = mask.shape[-1]
    shorter = isinstance(size, int) and isinstance(total, int) and 1 != size < total
    if not shorter:
        return mask
    missing = total - size
    rest = np.zeros(()) if mask.dtype == bool_ else np.asarray(-np.inf)
    added = b.expand(b.constant(rest, mask.dtype), shape=(*mask.shape[:-1], missing))
    return _as_value(b.concat(mask, added, axis=-1))


def _hidden(
    b: Builder,
    q: Value,
    total: Size,
    before: Size,
    lengths: Value | None,
    *,
    causal: bool,
    causal_offset: str,
    window: int | None,
    window_right: int | None,
    **_: Any,
) -> list[Value]:
    """Conditions [B or 1, 1, S, T] under which a query does not see a key."""
    batch, _, queries, _ = q.shape
    at = b.iota(length=total)
    found: list[Value] = []
    if lengths is not None:
        limit = b.reshape(lengths, shape=(batch, 1, 1, 1))
        found.append(b.ge(at, limit))
        offset = b.sub(limit, b.sizes(values=(queries,), shape=()))
    else:
        first = total - queries if causal_offset == "end" else before
        offset = b.sizes(values=(first,), shape=())
    positions = b.add(b.reshape(b.iota(length=queries), shape=(1, 1, queries, 1)), offset)
    if causal:
        found.append(b.gt(at, positions))
    if window is not None:
        found.append(b.le(at, b.sub(positions, window)))
    if window_right is not None:
        found.append(b.gt(at, b.add(positions, window_right)))
    return found
