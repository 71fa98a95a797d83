"""Scaled dot-product attention, with the semantics of ONNX Attention (opset 25).

    y = softmax(cap(scale * q @ k.T) + bias) @ v        cap(s) = softcap * tanh(s / softcap)

Query i has the position p = i + offset. The offset is the number of keys before the queries: the
length of the past; `lengths - S` for a cache with `lengths` valid keys; `T - S` if `causal_offset`
is "end". Causal attention uses keys j <= p, a window uses keys p - window < j and
j <= p + window_right. A row without visible keys gives zeros.

`int8` quantizes operands to 8 bits and sums the products exactly (`ops.quant.int8_attention`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import bool_, f32, i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, broadcast_shapes
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, composed, takes_wanted
from bitwright.ops.nn.attention_form import compose_attention
from bitwright.ops.quant.int8_attention import quantized_scores, weighted_values

Type = TensorType | None
ATTRS = {
    "scale": Attr("float", None),
    "causal": Attr("bool", False),
    "causal_offset": Attr("str", "start", choices=("start", "end")),
    "window": Attr("int", None),
    "window_right": Attr("int", None),
    "softcap": Attr("float", 0.0),
    "softmax_dtype": Attr("dtype", None),
}


def _infer(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: Type,
    past_k: Type,
    past_v: Type,
    lengths: Type,
    **attrs: Any,
) -> TensorType:
    _check_operands(q, k, v, past_k, past_v)
    if attrs["int8"]:
        expect.dtype("q", q, lambda d: d == f32, "f32, which int8 attention quantizes")
    for name in ("window", "window_right"):
        if attrs[name] is not None and attrs[name] < 0:
            raise InferenceError(f"{name!r} is negative", expected="0 or more", found=attrs[name])
    total: Size = k.shape[2]
    if past_k is not None:
        total = total + past_k.shape[2]
    if lengths is not None:
        if past_k is not None:
            raise InferenceError(
                "lengths and past_k exclude each other",
                hint="A cache that is filled from outside has no past operands.",
            )
        expect.element("lengths", lengths, i64)
        expect.rank("lengths", lengths, 1)
        expect.size("lengths", lengths.shape[0], q.shape[0])
    if mask is not None:
        _check_mask(mask, (*q.shape[:3], total))
    return TensorType(q.dtype, (*q.shape[:3], v.shape[3]))


def _check_operands(
    q: TensorType, k: TensorType, v: TensorType, past_k: Type, past_v: Type
) -> None:
    if (past_k is None) != (past_v is None):
        raise InferenceError("past_k and past_v come together or not at all")
    expect.same_dtype(q, k, past_k)
    expect.same_dtype(v, past_v)
    names = ("q", "k", "v", "past_k", "past_v")
    for name, type_ in zip(names, (q, k, v, past_k, past_v), strict=True):
        if type_ is not None:
            expect.floating(name, type_)
            expect.rank(name, type_, 4)
            expect.size(f"axis 0 of {name}", type_.shape[0], q.shape[0])
    for name, type_, like in (("past_k", past_k, k), ("past_v", past_v, v)):
        if type_ is not None:
            expect.size(f"axis 1 of {name}", type_.shape[1], like.shape[1])
            expect.size(f"axis 3 of {name}", type_.shape[3], like.shape[3])
    if past_k is not None and past_v is not None:
        expect.size("axis 2 of past_v", past_v.shape[2], past_k.shape[2])
    expect.size("axis 3 of k", k.shape[3], q.shape[3])
    expect.size("axis 1 of v", v.shape[1], k.shape[1])
    expect.size("axis 2 of v", v.shape[2], k.shape[2])
    heads, groups = q.shape[1], k.shape[1]
    known = isinstance(heads, int) and isinstance(groups, int)
    if known and (heads % groups if groups else heads):
        raise InferenceError(
            "the heads of q do not share those of k evenly",
            expected=f"a multiple of {groups}",
            found=heads,
        )


def _check_mask(mask: TensorType, scores: tuple[Size, ...]) -> None:
    expect.dtype("mask", mask, lambda d: d == bool_ or expect.is_number(d), "bool or a number type")
    expect.rank("mask", mask, *range(1, 5))
    shorter = isinstance(mask.shape[-1], int) and isinstance(scores[-1], int)
    shorter = shorter and mask.shape[-1] < scores[-1]  # type: ignore[operator]
    shape = (*mask.shape[:-1], 1 if shorter else mask.shape[-1])
    together = broadcast_shapes(shape, scores)
    for found, expected in zip(together, scores, strict=True):
        expect.size("mask", found, expected)


def _bias(mask: Array | None, total: int) -> Array:
    """The mask as numbers to add to scores; keys beyond the end of the mask are masked."""
    if mask is None:
        return np.zeros((1, 1, 1, total))
    added = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask.astype(np.float64)
    missing = total - added.shape[-1]
    if missing > 0 and added.shape[-1] != 1:
        pads = [(0, 0)] * (added.ndim - 1) + [(0, missing)]
        added = np.pad(added, pads, constant_values=-np.inf)
    return added.reshape((1,) * (4 - added.ndim) + added.shape)


def softmax_rows(scores: Array, bias: Array) -> Array:
    """Softmax of scores + bias along the last axis; zeros where the bias masks every key."""
    total = scores + bias
    top = total.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(total - np.where(np.isneginf(top), 0.0, top))
    sums = weights.sum(axis=-1, keepdims=True)
    masked = np.isneginf(bias.max(axis=-1, keepdims=True, initial=-np.inf))
    return np.where(masked, 0.0, weights / np.where(sums == 0, 1.0, sums))


def bias_of(
    mask: Array | None,
    lengths: Array | None,
    queries: int,
    total: int,
    before: int,
    *,
    causal: bool,
    causal_offset: str,
    window: int | None,
    window_right: int | None,
    **_: Any,
) -> Array:
    """The mask and the visible range of keys as numbers to add to scores, broadcastable to them."""
    offset = np.asarray(total - queries if causal_offset == "end" else before)
    if lengths is not None:
        offset = lengths.astype(np.int64) - queries
    positions = np.arange(queries)[:, None] + offset.reshape(-1, 1, 1, 1)
    at = np.arange(total)
    visible = np.ones((1, 1, queries, total), np.bool_)
    if causal:
        visible = visible & (at <= positions)
    if window is not None:
        visible = visible & (at > positions - window)
    if window_right is not None:
        visible = visible & (at <= positions + window_right)
    if lengths is not None:
        visible = visible & (at < lengths.reshape(-1, 1, 1, 1))
    return np.asarray(_bias(mask, total) + np.where(visible, 0.0, -np.inf))


def score_factor(features: int, scale: float | None) -> float:
    """The factor of the scores: `scale`, or 1 / sqrt(features)."""
    return float((features or 1) ** -0.5 if scale is None else scale)


def _reference(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    past_k: Array | None,
    past_v: Array | None,
    lengths: Array | None,
    *,
    scale: float | None,
    softcap: float,
    softmax_dtype: Any,
    int8: bool,
    **visible: Any,
) -> Array:
    before = 0
    if past_k is not None and past_v is not None:
        before = past_k.shape[2]
        k, v = np.concatenate([past_k, k], axis=2), np.concatenate([past_v, v], axis=2)
    queries, total = q.shape[2], k.shape[2]
    shared = q.shape[1] // max(k.shape[1], 1)
    keys, values = (np.repeat(wide(x), shared, axis=1) for x in (k, v))
    factor = score_factor(q.shape[3], scale)
    if int8:
        scores = quantized_scores(q, keys, factor)
    else:
        scores = np.matmul(wide(q) * factor, keys.swapaxes(-1, -2))
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    bias = bias_of(mask, lengths, queries, total, before, **visible)
    if int8:
        return weighted_values(scores, bias, values, visible["causal"])
    return np.asarray(np.matmul(softmax_rows(scores, bias), values))


@takes_wanted
def _gradient(b: Builder, node: Node, dys: list[Value | None], wanted: list[bool]) -> Gradients:
    """Gradients by `attention_backward`; keys of the past and a mask by the composed form.

    8-bit attention has the gradient of the float formula (straight through its rounding).
    """
    names = ("q", "k", "v", "mask", "past_k", "past_v", "lengths")
    given: dict[str, Value | None] = dict.fromkeys(names)
    given |= zip(names, node.inputs, strict=False)
    attrs = {name: value for name, value in node.attrs.items() if name != "int8"}
    if given["past_k"] is not None:
        return composed(compose_attention)(b, node, dys)
    operands = (given[name] for name in ("q", "k", "v", "mask", "lengths"))
    dq, dk, dv = b.attention_backward(dys[0], *operands, **attrs)
    found: list[Value | None] = [dq, dk, dv]
    if any(wanted[3:4]):
        found.append(composed(compose_attention)(b, node, dys)[3])
    return found


def _samples() -> list[Sample]:
    q, k, v = draw(2, 4, 3, 8), draw(2, 4, 6, 8, seed=1), draw(2, 4, 6, 5, seed=2)
    shared_k, shared_v = draw(2, 2, 6, 8, seed=1), draw(2, 2, 6, 5, seed=2)
    past_k, past_v = draw(2, 4, 7, 8, seed=3), draw(2, 4, 7, 5, seed=4)
    empty_k, empty_v = draw(2, 4, 0, 8), draw(2, 4, 0, 5)
    keep = draw(2, 1, 3, 6, dtype="bool", seed=5)
    halves = [x.astype(np.float16) for x in (q, k, v)]
    lengths = np.array([2, 6])
    return [
        sample(q, k, v),
        sample(q, shared_k, shared_v, draw(3, 6, seed=5), scale=0.3, softcap=2.0),
        sample(q, k, v, keep, causal=True),
        sample(q, k, v, None, past_k, past_v, causal=True, window=4),
        sample(q, k, v, draw(4, 3, 13), past_k, past_v),
        sample(q, k, v, None, empty_k, empty_v, causal=True, causal_offset="end"),
        sample(q, shared_k, shared_v, None, None, None, lengths, causal=True),
        sample(q, k, v, draw(1, 4, seed=6), None, None, lengths, window=2, window_right=1),
        sample(q, k, v, np.zeros((3, 6), np.bool_)),
        sample(q, empty_k, empty_v),
        sample(*halves, softmax_dtype="f32", tolerance=1e-2),
        sample(q, k, v, int8=True, tolerance=1e-2),
        sample(q, shared_k, shared_v, keep, causal=True, int8=True, tolerance=1e-2),
    ]


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    """Operations of both products over all keys; masks and causality do not reduce the count."""
    q, k, v = xs[:3]
    keys = k.shape[2] + (xs[4].shape[2] if len(xs) > 4 and xs[4] is not None else 0)
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * keys * (q.shape[3] + v.shape[3])


OPDEFS = [
    OpDef(
        "attention",
        Kind.COMPUTE,
        "q, k, v, mask?, past_k?, past_v?, lengths?",
        infer=_infer,
        reference=_reference,
        takes_epilogue=True,
        flops=_flops,
        samples=_samples,
        grad=_gradient,
        attrs={**ATTRS, "int8": Attr("bool", False)},
        doc="softmax(q @ k.T * scale + mask) @ v per head; q may have several heads per k and v. "
        "A kernel computes its softmax in softmax_dtype or wider; the reference is f64.",
        keeps=("mask",),
    )
]
