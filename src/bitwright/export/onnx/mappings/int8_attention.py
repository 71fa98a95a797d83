"""Int8 attention as a function of standard ops with the op's name.

Quantized values are integers in f32, whose sums are exact up to 2^24. `ops.quant.int8_attention`
defines the steps. The function reads sizes from its operands, so that calls of all shapes share it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from bitwright.export.onnx.forms import reduce, static_size, unsqueeze
from bitwright.export.onnx.functions import call
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import bool_, f32, i64
from bitwright.ops.quant.int8_attention import (
    FLAT,
    MEAN_ROUNDING,
    MOST_ADDED,
    PARTS,
    STEPS,
    TINY,
    WEIGHT_STEPS,
    levels,
)


def quantized_scores(e: Scope, q: Ref, k: Ref, scale: float) -> Ref:
    """Scores of queries and keys with the same number of heads."""
    q8, q_scale = _quantize_rows(e, q)
    k8, k_scale = _quantize_rows(e, k)
    sums = e.MatMul(q8, e.Transpose(k8, perm=(0, 1, 3, 2)))
    by_key = e.Mul(sums, e.Transpose(k_scale, perm=(0, 1, 3, 2)))
    return e.Mul(by_key, e.Mul(q_scale, e.scalar(scale, sums)))


def weighted_values(e: Scope, scores: Ref, bias: Ref | None, v: Ref, causal: bool) -> Ref:
    """The weighted sum of the values; zeros where the bias masks every key."""
    quantized = _quantize_values(e, v, causal)
    total = scores if bias is None else e.Add(scores, bias)
    total = e.Sub(total, e.Transpose(quantized.logs, perm=(0, 1, 3, 2)))
    top = reduce(e, "ReduceMax", total, [-1])
    is_hidden = e.Equal(top, e.scalar(-math.inf, top))
    power = e.Exp(e.Sub(total, e.Where(is_hidden, e.scalar(0, top), top)))
    weights = e.Round(e.Mul(power, e.scalar(WEIGHT_STEPS, power)))
    most = e.scalar(WEIGHT_STEPS * PARTS, power)
    if causal:
        sums = e.MatMul(e.Round(e.Mul(power, most)), quantized.finer)
    else:
        by_key = e.Transpose(e.Mul(quantized.finer, most), perm=(0, 1, 3, 2))
        sums = reduce(e, "ReduceSum", e.Round(e.Mul(power, by_key)), [-1])
    step = e.Div(e.scalar(PARTS, quantized.unit), quantized.unit)
    found = e.Mul(e.Div(e.MatMul(weights, quantized.qvalues), sums), step)
    if quantized.mean is not None:
        found = e.Add(found, quantized.mean)
    return e.Where(is_hidden, e.scalar(0, found), found)


def _quantize_rows(e: Scope, x: Ref) -> tuple[Ref, Ref]:
    """Quantized rows and their scales."""
    peak = reduce(e, "ReduceMax", e.Abs(x), [-1])
    is_tiny = e.Less(peak, e.scalar(TINY, peak))
    steps = e.scalar(STEPS, peak)
    inverse = e.Where(is_tiny, e.scalar(0, peak), e.Div(steps, peak))
    return e.Round(e.Mul(x, inverse)), e.Div(peak, steps)


class _QuantizedValues(NamedTuple):
    qvalues: Ref
    finer: Ref
    """m of each row"""
    logs: Ref
    """ln m"""
    unit: Ref
    """u of each head"""
    mean: Ref | None


def _quantize_values(e: Scope, v: Ref, causal: bool) -> _QuantizedValues:
    mean = None if causal else _rounded_mean(e, v)
    distance = v if mean is None else e.Sub(v, mean)
    peak = reduce(e, "ReduceMax", e.Abs(distance), [-1])
    largest = e.Gather(peak, e.ints([0]), axis=2) if causal else reduce(e, "ReduceMax", peak, [-2])
    is_flat = e.Less(largest, e.scalar(FLAT, largest))
    largest = e.Where(is_flat, e.scalar(1, largest), largest)
    numbers, logs = levels(causal)
    fits = e.LessOrEqual(peak, e.Div(largest, e.constant(numbers[1:], f32)))

    def of_level(numbers: np.ndarray[Any, Any]) -> Ref:
        found = e.Where(fits, e.constant(numbers[1:], f32), e.constant(numbers[0], f32))
        return reduce(e, "ReduceMax", found, [-1])

    finer, unit = of_level(numbers), e.Div(e.scalar(STEPS, largest), largest)
    qvalues = e.Round(e.Mul(distance, e.Mul(finer, unit)))
    if causal:
        qvalues = e.Clip(qvalues, e.scalar(-STEPS, qvalues), e.scalar(STEPS, qvalues))
    return _QuantizedValues(qvalues, finer, of_level(logs), unit, mean)


def _rounded_mean(e: Scope, v: Ref) -> Ref:
    """The means of the features over all keys, rounded to few bits."""
    mean = reduce(e, "ReduceMean", v, [-2])
    largest = reduce(e, "ReduceMax", e.Abs(mean), [-1])
    added = e.Mul(largest, e.scalar(MEAN_ROUNDING, largest))
    added = e.Min(added, e.scalar(MOST_ADDED, largest))
    return e.Sub(e.Add(mean, added), added)


def call_attention(e: Scope, q: Ref, k: Ref, v: Ref, mask: Ref | None, attrs: Any) -> Ref:
    """A call of the function; its attributes determine the visible keys."""
    shared = static_size(e, q.shape[1]) // static_size(e, k.shape[1])
    given = [q, k, v] if mask is None else [q, k, v, mask]
    factor = (
        attrs["scale"] if attrs["scale"] is not None else 1 / math.sqrt(static_size(e, q.shape[3]))
    )
    kept = {
        "scale": float(factor),
        "causal": attrs["causal"],
        "causal_offset": attrs["causal_offset"],
        "window": attrs["window"],
        "window_right": attrs["window_right"],
        "softcap": float(attrs["softcap"]),
        "int8": True,
        "shared": shared,
    }
    kept = {name: value for name, value in kept.items() if value is not None}

    def body(e: Scope, q: Ref, k: Ref, v: Ref, mask: Ref | None = None) -> tuple[Ref, ...]:
        if shared != 1:
            k, v = _repeated(e, q, k, shared), _repeated(e, q, v, shared)
        scores = quantized_scores(e, q, k, factor)
        if attrs["softcap"] > 0:
            cap = e.scalar(attrs["softcap"], scores)
            scores = e.Mul(cap, e.Tanh(e.Div(scores, cap)))
        bias = _visible(e, q, k, attrs)
        if mask is not None:
            if mask.dtype == bool_:
                hidden = e.scalar(-math.inf, scores)
                added = e.Where(mask, e.scalar(0, scores), hidden)
            else:
                added = e.cast(mask, f32)
            bias = added if bias is None else e.Add(bias, added)
        return (weighted_values(e, scores, bias, v, attrs["causal"]),)

    return call(e, "attention", given, kept, body)[0]


def _size(e: Scope, x: Ref, axis: int) -> Ref:
    """One size as a scalar."""
    return e.Gather(e.Shape(x), e.constant(axis, i64), axis=0)


def _repeated(e: Scope, q: Ref, x: Ref, shared: int) -> Ref:
    """[B, Hk, T, D] with each head repeated `shared` times."""
    wide = e.Expand(unsqueeze(e, x, 2), e.ints([1, 1, shared, 1, 1]))
    sizes = [unsqueeze(e, _size(e, of, axis), 0) for of, axis in ((x, 0), (q, 1), (x, 2), (x, 3))]
    return e.Reshape(wide, e.Concat(*sizes, axis=0))


def _visible(e: Scope, q: Ref, k: Ref, attrs: Any) -> Ref | None:
    """0 for visible keys and -inf for others; None if all keys are visible."""
    window, right = attrs["window"], attrs["window_right"]
    if not attrs["causal"] and window is None and right is None:
        return None
    zero, one = e.constant(0, i64), e.constant(1, i64)
    queries, keys = _size(e, q, 2), _size(e, k, 2)
    place = unsqueeze(e, e.Range(zero, queries, one), 1)
    if attrs["causal_offset"] == "end":
        place = e.Add(place, e.Sub(keys, queries))
    key = e.Range(zero, keys, one)
    rules = [e.LessOrEqual(key, place)] if attrs["causal"] else []
    if window is not None:
        rules.append(e.Greater(key, e.Sub(place, e.constant(window, i64))))
    if right is not None:
        rules.append(e.LessOrEqual(key, e.Add(place, e.constant(right, i64))))
    visible = rules[0]
    for rule in rules[1:]:
        visible = e.And(visible, rule)
    return e.Where(visible, e.constant(0.0, f32), e.constant(-math.inf, f32))
