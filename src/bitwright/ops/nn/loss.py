"""Cross entropy of class scores against labels.

    loss[n, ...] = -weights[label] * log_softmax(logits)[n, label, ...],   0 for ignored labels
    mean         = sum(loss) / sum(weights[label] of labels not ignored)

Classes are axis 1. With `from_log_probs` the logits are log probabilities (NLL loss).
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dtype import i32, i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, composed
from bitwright.ops.nn.softmax import log_softmax
from bitwright.ops.shape.gather import check_shape

ATTRS = {
    "ignore_index": Attr("int", None),
    "reduction": Attr("str", "mean", ("mean", "sum", "none")),
    "from_log_probs": Attr("bool", False),
}
# Replaces negative labels; out of range for any number of classes, so that the gather fails.
_NO_CLASS = 2**31 - 1


def infer_loss(
    logits: TensorType,
    labels: TensorType,
    weights: TensorType | None,
    ignore_index: int | None,
    reduction: str,
    from_log_probs: bool,
) -> TensorType:
    expect.floating("logits", logits)
    expect.dtype("labels", labels, lambda d: d in (i32, i64), "i32 or i64")
    if logits.rank < 2:
        raise InferenceError(
            "logits has the wrong rank", expected="batch, classes, ...", found=logits
        )
    expect.rank("labels", labels, logits.rank - 1)
    shape = (logits.shape[0], *logits.shape[2:])
    for axis, size in enumerate(shape):
        expect.size(f"axis {axis} of labels", labels.shape[axis], size)
    if weights is not None:
        expect.same_dtype(logits, weights)
        expect.rank("weights", weights, 1)
        expect.size("weights", weights.shape[0], logits.shape[1])
    return logits.with_shape(shape if reduction == "none" else ())


def weighted_labels(
    logits: Array, labels: Array, weights: Array | None, ignore_index: int | None
) -> tuple[Array, Array, Array]:
    """Labels with 0 for ignored ones, which are ignored, and the weight of each label."""
    check_shape("labels", labels.shape, (len(logits), *logits.shape[2:]))
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    classes = logits.shape[1]
    outside = ~ignored & ((labels < 0) | (labels >= classes))
    if outside.any():
        raise RunError(
            "a label is not a class", expected=f"0 to {classes - 1}", found=int(labels[outside][0])
        )
    known = np.where(ignored, 0, labels).astype(np.int64)
    weight = np.ones(labels.shape)
    if weights is not None:
        weight = wide(weights)[known] if classes else np.zeros(labels.shape)
    return known, ignored, np.where(ignored, 0, weight)


def _reference(
    logits: Array,
    labels: Array,
    weights: Array | None,
    ignore_index: int | None,
    reduction: str,
    from_log_probs: bool,
) -> Array:
    known, ignored, weight = weighted_labels(logits, labels, weights, ignore_index)
    log_probs = wide(logits) if from_log_probs else log_softmax(logits, 1)
    chosen = np.zeros(labels.shape)
    if logits.shape[1]:
        chosen = np.take_along_axis(log_probs, known[:, None], axis=1)[:, 0]
    loss = np.where(ignored, 0, -chosen * weight)
    if reduction == "none":
        return loss
    total = np.sum(loss)
    return np.asarray(total / np.sum(weight) if reduction == "mean" else total)


def labels_by_ops(b: Any, labels: Value, ignore_index: int | None) -> tuple[Value, Value | None]:
    """Labels that fail a gather where they are no class, and which of them are ignored."""
    valid = b.where(
        b.lt(labels, b.constant(0, labels.dtype)), b.constant(_NO_CLASS, labels.dtype), labels
    )
    if ignore_index is None:
        return valid, None
    ignored = b.eq(labels, b.constant(ignore_index, labels.dtype))
    return b.where(ignored, b.constant(0, labels.dtype), valid), ignored


def weights_by_ops(
    b: Any, weights: Value | None, known: Value, ignored: Value | None, like: Value
) -> Value | None:
    """The weight of each label, 0 for ignored ones; None if all are 1."""
    weight = None if weights is None else b.gather(weights, known, axis=0)
    if ignored is None:
        return weight
    one = b.constant(1, like.dtype) if weight is None else weight
    return cast(Value, b.where(ignored, b.constant(0, like.dtype), one))


def cross_entropy_by_ops(
    b: Any,
    logits: Value,
    labels: Value,
    weights: Value | None,
    ignore_index: int | None,
    reduction: str,
    from_log_probs: bool,
) -> Any:
    """The loss by log_softmax, one gathered log probability per label, and a weighted sum."""
    log_probs = logits if from_log_probs else b.log_softmax(logits, axis=1)
    known, ignored = labels_by_ops(b, labels, ignore_index)
    column = b.reshape(known, shape=(known.shape[0], 1, *known.shape[1:]))
    chosen = b.reshape(b.gather_elements(log_probs, column, axis=1), shape=known.shape)
    weight = weights_by_ops(b, weights, known, ignored, chosen)
    loss = b.neg(chosen if weight is None else b.mul(chosen, weight))
    if ignored is not None:  # 0, also where the logarithm is infinite
        loss = b.where(ignored, b.constant(0, chosen.dtype), loss)
    axes = tuple(range(loss.rank))
    if reduction == "none":
        return loss
    if reduction == "mean" and weight is None:
        return b.reduce_mean(loss, axes=axes, keepdims=False)
    total = b.reduce_sum(loss, axes=axes, keepdims=False)
    if reduction == "sum" or weight is None:
        return total
    return b.div(total, b.reduce_sum(weight, axes=axes, keepdims=False))


def _grad(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    logits, labels, weights = (*node.inputs, None)[:3]
    dlogits = b.cross_entropy_backward(dys[0], logits, labels, weights, **node.attrs)
    if weights is None:
        return [dlogits]
    through_formula = composed(cross_entropy_by_ops)(b, node, dys)
    return [dlogits, None, through_formula[2]]


def _samples() -> list[Sample]:
    logits, labels = draw(3, 5), np.array([1, 4, 0])
    images, targets = draw(2, 4, 3, 2), draw(2, 3, 2, dtype="i32", low=0, high=3)
    weights = draw(4, seed=1, low=0.1)
    return [
        sample(logits, labels),
        sample(logits, labels, reduction="none"),
        sample(logits, labels, reduction="sum", ignore_index=4),
        sample(images, targets, weights),
        sample(images, targets, weights, ignore_index=-100, reduction="none"),
        sample(images, targets, from_log_probs=True, ignore_index=2),
        sample(logits.astype(np.float64), labels),
    ]


OPDEFS = [
    OpDef(
        "cross_entropy",
        Kind.REDUCTION,
        "logits, labels, weights?",
        infer=infer_loss,
        reference=_reference,
        samples=_samples,
        grad=_grad,
        attrs=ATTRS,
        doc="The negative weighted log probability of each label, reduced over all labels.",
    )
]
