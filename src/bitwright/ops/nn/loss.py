"""Cross entropy of class scores against labels.

    loss[n, ...] = -weights[label] * log_softmax(logits)[n, label, ...],   0 for ignored labels
    mean         = sum(loss) / sum(weights[label] of labels not ignored)

Classes are axis 1. With `from_log_probs` the logits are log probabilities (NLL loss).
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dtype import i32, i64
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.nn.softmax import log_softmax
from bitwright.ops.shape.gather import check_shape


def _infer(
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


def _reference(
    logits: Array,
    labels: Array,
    weights: Array | None,
    ignore_index: int | None,
    reduction: str,
    from_log_probs: bool,
) -> Array:
    check_shape("labels", labels.shape, (len(logits), *logits.shape[2:]))
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    classes = logits.shape[1]
    outside = ~ignored & ((labels < 0) | (labels >= classes))
    if outside.any():
        raise RunError(
            "a label is not a class", expected=f"0 to {classes - 1}", found=int(labels[outside][0])
        )
    log_probs = wide(logits) if from_log_probs else log_softmax(logits, 1)
    known = np.where(ignored, 0, labels).astype(np.int64)
    if classes:
        chosen = np.take_along_axis(log_probs, known[:, None], axis=1)[:, 0]
        weight = np.ones(labels.shape) if weights is None else wide(weights)[known]
    else:
        chosen = weight = np.zeros(labels.shape)
    weight = np.where(ignored, 0, weight)
    loss = np.where(ignored, 0, -chosen * weight)
    if reduction == "none":
        return loss
    total = np.sum(loss)
    return np.asarray(total / np.sum(weight) if reduction == "mean" else total)


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
        infer=_infer,
        reference=_reference,
        samples=_samples,
        attrs={
            "ignore_index": Attr("int", None),
            "reduction": Attr("str", "mean", ("mean", "sum", "none")),
            "from_log_probs": Attr("bool", False),
        },
        doc="The negative weighted log probability of each label, reduced over all labels.",
    )
]
