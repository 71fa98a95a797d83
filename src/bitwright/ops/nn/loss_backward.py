"""The gradient of cross entropy with respect to the logits.

dlogits[n, c, ...] = dy * weight * (softmax(logits)[n, c, ...] - [c is the label]) / divisor

weight is that of the label and 0 for ignored ones; the divisor is the sum of weights for the mean,
1 otherwise. With `from_log_probs` the softmax is absent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dtype import f64
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.gradients import number
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.nn.loss import (
    ATTRS,
    infer_loss,
    labels_by_ops,
    weighted_labels,
    weights_by_ops,
)
from bitwright.ops.nn.softmax import softmax


def _infer(
    dy: TensorType,
    logits: TensorType,
    labels: TensorType,
    weights: TensorType | None,
    **attrs: Any,
) -> TensorType:
    loss = infer_loss(logits, labels, weights, **attrs)
    expect.same_dtype(dy, logits)
    if dy.rank != loss.rank:
        raise InferenceError("dy is not the gradient of the loss", expected=loss, found=dy)
    for axis, size in enumerate(loss.shape):
        expect.size(f"axis {axis} of dy", dy.shape[axis], size)
    return logits


def _reference(
    dy: Array,
    logits: Array,
    labels: Array,
    weights: Array | None,
    ignore_index: int | None,
    reduction: str,
    from_log_probs: bool,
) -> Array:
    known, _, weight = weighted_labels(logits, labels, weights, ignore_index)
    factor = wide(dy) * weight
    if reduction == "mean":
        factor = factor / np.sum(weight)
    result = np.zeros(logits.shape) if from_log_probs else softmax(logits, 1)
    if logits.shape[1]:
        at = known[:, None]
        there = np.take_along_axis(result, at, axis=1)
        np.put_along_axis(result, at, there - 1, axis=1)
    return np.asarray(result * factor[:, None])


def backward_by_ops(
    b: Any,
    dy: Value,
    logits: Value,
    labels: Value,
    weights: Value | None,
    ignore_index: int | None,
    reduction: str,
    from_log_probs: bool,
) -> Any:
    """dlogits by softmax and a comparison of each class with the label."""
    known, ignored = labels_by_ops(b, labels, ignore_index)
    weight = weights_by_ops(b, weights, known, ignored, logits)
    if weight is None:
        weight = b.expand(number(b, 1.0, logits), shape=known.shape)
    factor = b.mul(dy, weight)
    if reduction == "mean":
        axes = tuple(range(known.rank))
        factor = b.div(factor, b.reduce_sum(weight, axes=axes, keepdims=False))
    column = (known.shape[0], 1, *known.shape[1:])
    classes = b.iota(length=logits.shape[1], dtype=known.dtype)
    classes = b.reshape(classes, shape=(logits.shape[1], *[1] * (logits.rank - 2)))
    is_label = b.eq(classes, b.reshape(known, shape=column))
    hot = b.where(is_label, number(b, 1.0, logits), number(b, 0.0, logits))
    result = b.neg(hot) if from_log_probs else b.sub(b.softmax(logits, axis=1), hot)
    return b.mul(result, b.reshape(factor, shape=column))


def _samples() -> list[Sample]:
    dy, logits, labels = draw(seed=5), draw(3, 5), np.array([1, 4, 0])
    images, targets = draw(2, 4, 3, 2), draw(2, 3, 2, dtype="i32", low=0, high=3)
    dys, weights = draw(2, 3, 2, seed=5), draw(4, seed=1, low=0.1)
    return [
        sample(dy, logits, labels),
        sample(draw(3, seed=5), logits, labels, reduction="none"),
        sample(dy, logits, labels, reduction="sum", ignore_index=4),
        sample(dy, images, targets, weights),
        sample(dys, images, targets, weights, ignore_index=-100, reduction="none"),
        sample(dy, images, targets, from_log_probs=True, ignore_index=2),
        sample(dy, draw(7, 17), draw(7, dtype="i64", low=0, high=16)),
        sample(dy.astype(f64.numpy), logits.astype(f64.numpy), labels),
        sample(draw(dtype="bf16", seed=5), draw(3, 5, dtype="bf16"), labels, tolerance=2e-2),
    ]


OPDEFS = [
    OpDef(
        "cross_entropy_backward",
        Kind.REDUCTION,
        "dy, logits, labels, weights?",
        infer=_infer,
        reference=_reference,
        grad=composed(backward_by_ops),
        samples=_samples,
        attrs=ATTRS,
        doc="The gradient of cross_entropy with respect to the logits.",
    )
]
