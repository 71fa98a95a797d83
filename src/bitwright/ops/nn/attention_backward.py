"""Gradients of scaled dot-product attention (`ops.nn.attention`).

    p  = softmax(cap(scale * q @ k.T) + bias)
    dv = p.T @ dy                    dp = dy @ v.T
    ds = p * (dp - sum(p * dp)) * cap'        cap'(s) = 1 - tanh(s / softcap)^2
    dq = scale * ds @ k              dk = scale * ds.T @ q

Gradients of keys and values are summed over the query heads that share them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.registry import get
from bitwright.ops.core.reverse import backpropagate, composed
from bitwright.ops.nn.attention import ATTRS, bias_of, score_factor, softmax_rows
from bitwright.ops.nn.attention_form import compose_attention

Type = TensorType | None


def _infer(
    dy: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: Type,
    lengths: Type,
    **attrs: Any,
) -> tuple[TensorType, ...]:
    y = get("attention").infer(q, k, v, mask, None, None, lengths, int8=False, **attrs)
    expect.same_dtype(dy, y)
    expect.shape("dy", dy, y.shape)
    return q, k, v


def _reference(
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    lengths: Array | None,
    *,
    scale: float | None,
    softcap: float,
    softmax_dtype: Any,
    **visible: Any,
) -> tuple[Array, ...]:
    dy, q, k, v = map(wide, (dy, q, k, v))
    queries, total = q.shape[2], k.shape[2]
    shared = q.shape[1] // max(k.shape[1], 1)
    keys, values = (np.repeat(x, shared, axis=1) for x in (k, v))
    factor = score_factor(q.shape[3], scale)
    scores, slope = np.matmul(q * factor, keys.swapaxes(-1, -2)), np.float64(1)
    if softcap > 0:
        bent = np.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent**2
    weights = softmax_rows(scores, bias_of(mask, lengths, queries, total, 0, **visible))
    dp = np.matmul(dy, values.swapaxes(-1, -2))
    ds = weights * (dp - np.sum(weights * dp, axis=-1, keepdims=True)) * slope * factor
    dk, dv = (np.matmul(x.swapaxes(-1, -2), y) for x, y in ((ds, q), (weights, dy)))
    return np.matmul(ds, keys), _sum_shared(dk, k.shape), _sum_shared(dv, v.shape)


def _sum_shared(dx: Array, shape: tuple[int, ...]) -> Array:
    """Gradients per query head, summed over the heads that share a key head."""
    if dx.shape == shape:
        return dx
    batch, groups, keys, features = shape
    shared = dx.shape[1] // max(groups, 1)  # not -1, because an axis may be empty
    return np.asarray(dx.reshape(batch, groups, shared, keys, features).sum(axis=2))


def _compose(
    b: Builder,
    dy: Value,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    lengths: Value | None,
    **attrs: Any,
) -> tuple[Any, ...]:
    start = len(b.nodes)
    y = compose_attention(b, q, k, v, mask, None, None, lengths, **attrs)
    found = backpropagate(b, b.nodes[start:], {y: dy}, (q, k, v))
    return tuple(found[value] for value in (q, k, v))


def _samples() -> list[Sample]:
    q, k, v, dy = draw(2, 4, 3, 8), draw(2, 4, 6, 8, seed=1), draw(2, 4, 6, 5, seed=2), _dy()
    shared_k, shared_v = draw(2, 2, 6, 8, seed=1), draw(2, 2, 6, 5, seed=2)
    keep = draw(2, 1, 3, 6, dtype="bool", seed=5)
    halves = [x.astype(np.float16) for x in (dy, q, k, v)]
    lengths = np.array([2, 6])
    return [
        sample(dy, q, k, v),
        sample(dy, q, shared_k, shared_v, draw(3, 6, seed=5), scale=0.3, softcap=2.0),
        sample(dy, q, k, v, keep, causal=True),
        sample(dy, q, k, v, causal=True, window=2, causal_offset="end"),
        sample(dy, q, shared_k, shared_v, None, lengths, causal=True),
        sample(dy, q, k, v, draw(1, 4, seed=6), lengths, window=2, window_right=1),
        sample(dy, q, k, v, np.zeros((3, 6), np.bool_)),
        sample(*halves, softmax_dtype="f32", tolerance=1e-2),
    ]


def _dy() -> Array:
    return draw(2, 4, 3, 5, seed=9)


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    """Operations of the five products over all keys."""
    q, k, v = xs[1:4]
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    return 2 * pairs * (3 * q.shape[3] + 2 * v.shape[3])


OPDEFS = [
    OpDef(
        "attention_backward",
        Kind.COMPUTE,
        "dy, q, k, v, mask?, lengths?",
        infer=_infer,
        reference=_reference,
        samples=_samples,
        flops=_flops,
        grad=composed(_compose),
        attrs=ATTRS,
        doc="Gradients of q, k and v through attention, from the gradient dy of its result.",
        keeps=("mask",),
    )
]
