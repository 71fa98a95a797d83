"""Gradients of softmax, log-softmax and cross-entropy."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.nn.compiled import Array, gradients, require, require_same, results


def softmax_backward(y: Any, dy: Any, axis: int = -1) -> Array:
    """The gradient of x from y = softmax(x): y (dy - sum(y dy))."""
    require_same(y=y, dy=dy)
    return results("softmax_backward", {"dy": dy, "y": y}, axis=axis)[0]


def log_softmax_backward(y: Any, dy: Any, axis: int = -1) -> Array:
    """The gradient of x from y = log_softmax(x): dy - exp(y) sum(dy)."""
    require_same(y=y, dy=dy)
    return results("log_softmax_backward", {"dy": dy, "y": y}, axis=axis)[0]


def cross_entropy_backward(
    logits: Any,
    labels: Any,
    dy: Any = 1.0,
    weights: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> Array:
    """The gradient of logits [batch, classes, ...] of the cross entropy with integer labels.

    `dy` is one number, or with reduction "none" one for each label; `weights` are those of classes.
    """
    scores, classes = np.asarray(logits), np.asarray(labels)
    require(
        scores.ndim >= 2,
        "logits has the wrong rank",
        expected="batch, classes, ...",
        found=list(scores.shape),
    )
    count = scores.shape[1]
    counted = classes if ignore_index is None else classes[classes != ignore_index]
    wrong = (counted < 0) | (counted >= count)
    if wrong.any():
        found = counted[wrong].reshape(-1)[0]
        require(False, "a label is out of range", expected=f"0 to {count - 1}", found=found)
    operands: dict[str, Any] = {"logits": scores, "labels": classes}
    if weights is not None:
        operands["weights"] = weights
    attrs = {"reduction": reduction, "ignore_index": ignore_index}
    given = np.asarray(dy, scores.dtype)
    return gradients("cross_entropy", operands, given, ("logits",), **attrs)[0]
