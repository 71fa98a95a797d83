"""Attention over key-value caches of several sequences, and writes to the caches.

    kv_write           cache[slot[i], :, position[i], :] = new[i]      the last i of a place
    cached_attention   y[i] = softmax(cap(scale * q[i] @ k.T)) @ v over positions <= position[i]

A cache [slots, heads, context, features] holds one sequence per slot. Row i of q belongs to the
token at position[i] of the sequence in slot[i]; several heads of q may share one of the cache. A
window leaves positions > position[i] - window. The results of a row do not depend on other rows.

A cache in i8 has a scale [slots, heads, context] for each token and head: scale = peak / 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dtype import f32, i8
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import (
    Array,
    Attr,
    Kind,
    NonDifferentiable,
    OpDef,
    Sample,
    draw,
    sample,
)
from bitwright.ops.nn.attention import score_factor, softmax_rows
from bitwright.ops.quant.int8_attention import quantize_rows

_NO_GRADIENT = NonDifferentiable("a cache is for inference; train with attention")


def _require_cache(what: str, cache: TensorType, scale: TensorType | None) -> None:
    expect.rank(what, cache, 4)
    if scale is None:
        expect.floating(what, cache)
        return
    expect.element(what, cache, i8)
    expect.element(f"the scale of {what}", scale, f32)
    expect.shape(f"the scale of {what}", scale, cache.shape[:3])


def _require_places(rows: TensorType, slot: TensorType, position: TensorType) -> None:
    for name, type_ in (("slot", slot), ("position", position)):
        expect.integer(name, type_)
        expect.rank(name, type_, 1)
        expect.size(name, type_.shape[0], rows.shape[0])


def _places(slot: Array, position: Array, cache: Array) -> tuple[Array, Array]:
    """Slots and positions as indices; an error names one that is out of range."""
    for name, indices, size in (("slot", slot, len(cache)), ("position", position, cache.shape[2])):
        wrong = indices[(indices < 0) | (indices >= size)]
        if wrong.size:
            raise RunError(
                f"{name} {int(wrong[0])} is outside the cache",
                expected=f"0 to {size - 1}" if size else "an empty cache",
            )
    return slot.astype(np.int64), position.astype(np.int64)


def _infer_write(
    cache: TensorType,
    new: TensorType,
    slot: TensorType,
    position: TensorType,
    scale: TensorType | None,
) -> Any:
    _require_cache("the cache", cache, scale)
    expect.floating("new", new)
    expect.rank("new", new, 3)
    expect.size("axis 1 of new", new.shape[1], cache.shape[1])
    expect.size("axis 2 of new", new.shape[2], cache.shape[3])
    _require_places(new, slot, position)
    return cache if scale is None else (cache, scale)


def _write(cache: Array, new: Array, slot: Array, position: Array, scale: Array | None) -> Any:
    places = _places(slot, position, cache)
    found = cache.copy()
    if scale is None:
        found[places[0], :, places[1]] = wide(new).astype(cache.dtype)
        return found
    q, factors = quantize_rows(wide(new).astype(np.float32))
    scales = scale.copy()
    found[places[0], :, places[1]] = q.astype(np.int8)
    scales[places[0], :, places[1]] = factors[..., 0]
    return found, scales


def _infer_attention(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    slot: TensorType,
    position: TensorType,
    k_scale: TensorType | None,
    v_scale: TensorType | None,
    window: int | None,
    **_: Any,
) -> TensorType:
    expect.floating("q", q)
    expect.rank("q", q, 3)
    if (k_scale is None) != (v_scale is None):
        raise InferenceError("k_scale and v_scale come together or not at all")
    _require_cache("k", k, k_scale)
    _require_cache("v", v, v_scale)
    expect.same_dtype(k, v)
    expect.size("axis 3 of k", k.shape[3], q.shape[2])
    for axis in range(3):
        expect.size(f"axis {axis} of v", v.shape[axis], k.shape[axis])
    heads, shared = q.shape[1], k.shape[1]
    known = isinstance(heads, int) and isinstance(shared, int)
    if known and (heads % shared if shared else heads):
        raise InferenceError(
            "the heads of q do not share those of k evenly",
            expected=f"a multiple of {shared}",
            found=heads,
        )
    if window is not None and window < 1:
        raise InferenceError("'window' is too small", expected="at least 1", found=window)
    _require_places(q, slot, position)
    return q.with_shape((*q.shape[:2], v.shape[3]))


def _attention(
    q: Array,
    k: Array,
    v: Array,
    slot: Array,
    position: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    scale: float | None,
    softcap: float,
    window: int | None,
) -> Array:
    slots, positions = _places(slot, position, k)
    shared = q.shape[1] // max(k.shape[1], 1)
    factor = score_factor(q.shape[2], scale)
    found = np.zeros((*q.shape[:2], v.shape[3]))
    for i, (at, end) in enumerate(zip(slots, positions, strict=True)):
        first = 0 if window is None else max(0, end + 1 - window)
        seen = slice(first, end + 1)
        keys, values = wide(k[at, :, seen]), wide(v[at, :, seen])
        if k_scale is not None and v_scale is not None:
            keys = keys * k_scale[at, :, seen, None]
            values = values * v_scale[at, :, seen, None]
        keys, values = (np.repeat(x, shared, axis=0) for x in (keys, values))
        scores = np.einsum("hd,hkd->hk", wide(q[i]) * factor, keys)
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
        found[i] = np.einsum("hk,hkd->hd", softmax_rows(scores, np.zeros(1)), values)
    return found


def _write_samples() -> list[Sample]:
    new, slot, position = draw(3, 2, 5, seed=1), np.array([0, 1, 0]), np.array([6, 0, 2], np.int32)
    quantized, scale = draw(2, 2, 7, 5, dtype="i8", low=-9, high=9), draw(2, 2, 7, low=0.1)
    return [
        sample(draw(2, 2, 7, 5, dtype="f16"), new, slot, position),
        sample(draw(2, 2, 7, 5), new, slot.astype(np.int32), position),
        sample(draw(2, 2, 7, 5, dtype="bf16"), draw(3, 2, 5, dtype="bf16"), slot, position),
        sample(quantized, new, slot, position, scale),
        sample(draw(2, 2, 7, 5), draw(0, 2, 5), np.zeros(0, np.int64), np.zeros(0, np.int64)),
    ]


def _attention_samples() -> list[Sample]:
    q, slot, position = draw(3, 4, 8), np.array([1, 0, 1]), np.array([6, 0, 2])
    k, v = draw(2, 2, 7, 8, seed=1), draw(2, 2, 7, 5, seed=2)
    halves = k.astype(np.float16), v.astype(np.float16)
    long = draw(1, 1, 300, 17, dtype="f16", seed=3)
    quantized = [draw(2, 2, 7, n, dtype="i8", low=-127, high=127, seed=n) for n in (8, 5)]
    scales = draw(2, 2, 7, low=0.01, high=0.02), draw(2, 2, 7, low=0.01, high=0.02, seed=1)
    return [
        sample(q, k, v, slot, position),
        sample(q, *halves, slot, position.astype(np.int32), scale=0.3, softcap=2.0),
        sample(q, *halves, slot, position, window=3),
        sample(q, *quantized, slot, position, *scales),
        sample(draw(2, 3, 17), long, long, np.zeros(2, np.int32), np.array([299, 128])),
        sample(draw(20, 2, 17), long, long, np.zeros(20, np.int32), np.arange(20) * 13),
        sample(draw(0, 4, 8), k, v, np.zeros(0, np.int64), np.zeros(0, np.int64)),
    ]


def _flops(xs: Any, ys: Any, attrs: Any) -> Any:
    """Operations over whole contexts; the positions are data."""
    q, k, v = xs[:3]
    return 2 * q.shape[0] * q.shape[1] * k.shape[2] * (q.shape[2] + v.shape[3])


OPDEFS = [
    OpDef(
        "kv_write",
        Kind.MOVEMENT,
        "cache, new, slot, position, scale?",
        infer=_infer_write,
        reference=_write,
        samples=_write_samples,
        grad=_NO_GRADIENT,
        doc="The cache with new[i] at position[i] of slot[i], and its scales for a cache in i8. "
        "A state is updated in place. Of several rows for one place, any one remains.",
        fixed_types=True,
        is_foldable=False,
    ),
    OpDef(
        "cached_attention",
        Kind.COMPUTE,
        "q, k, v, slot, position, k_scale?, v_scale?",
        infer=_infer_attention,
        reference=_attention,
        flops=_flops,
        samples=_attention_samples,
        grad=_NO_GRADIENT,
        attrs={
            "scale": Attr("float", None),
            "softcap": Attr("float", 0.0),
            "window": Attr("int", None),
        },
        doc="softmax(q[i] @ k.T * scale) @ v over the cached positions up to position[i] of "
        "slot[i]; q may have several heads per k and v.",
        fixed_types=True,
    ),
]
