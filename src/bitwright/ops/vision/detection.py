"""Non-maximum suppression of boxes.

For each batch and class, boxes are visited by descending score. A box is kept unless its overlap
(intersection over union) with a kept box exceeds the threshold.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.dim import UNKNOWN
from bitwright.ir.dtype import i64
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import Array, wide
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample


def _infer(
    boxes: TensorType,
    scores: TensorType,
    max_output: TensorType | None,
    iou_threshold: TensorType | None,
    score_threshold: TensorType | None,
    center_point_box: bool,
) -> TensorType:
    expect.same_dtype(boxes, scores)
    for what, operand in (("boxes", boxes), ("scores", scores)):
        expect.floating(what, operand)
        expect.rank(what, operand, 3)
    expect.size("a box", boxes.shape[2], 4)
    expect.size("the batch of scores", scores.shape[0], boxes.shape[0])
    expect.size("the boxes in scores", scores.shape[2], boxes.shape[1])
    if max_output is not None:
        expect.index("max_output", max_output)
        expect.size("max_output", max_output.count, 1)
    for limit in (iou_threshold, score_threshold):
        if limit is not None:
            expect.floating("a threshold", limit)
            expect.size("a threshold", limit.count, 1)
    return TensorType(i64, (UNKNOWN, 3))


def _corners(boxes: Array, center_point_box: bool) -> tuple[Array, Array]:
    """The lower and the upper corner of each box."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if center_point_box:
        return first - second / 2, first + second / 2
    return np.minimum(first, second), np.maximum(first, second)


def overlap(low: Array, high: Array, one: int) -> Array:
    """Intersection over union of box `one` with every box; 0 for boxes without area."""
    sides = np.minimum(high[one], high) - np.maximum(low[one], low)
    common = np.prod(np.maximum(sides, 0), axis=1)
    area = np.prod(high - low, axis=1)
    union = area[one] + area - common
    real = (area > 0) & (area[one] > 0) & (union > 0)
    return np.where(real, common / np.where(real, union, 1), 0)


def _select(
    low: Array, high: Array, scores: Array, limit: int, iou: float, least: float | None
) -> list[int]:
    """Indices of the kept boxes, by descending score."""
    alive = np.ones(scores.shape, bool) if least is None else scores > least
    kept: list[int] = []
    for index in np.argsort(-scores, kind="stable"):
        if len(kept) >= limit:
            break
        if alive[index]:
            kept.append(int(index))
            alive &= overlap(low, high, int(index)) <= iou
    return kept


def _scalar(operand: Array | None) -> float | None:
    return None if operand is None else float(operand.reshape(-1)[0])


def _non_max_suppression(
    boxes: Array,
    scores: Array,
    max_output: Array | None,
    iou_threshold: Array | None,
    score_threshold: Array | None,
    center_point_box: bool,
) -> Array:
    limit, iou = int(_scalar(max_output) or 0), _scalar(iou_threshold) or 0
    least = _scalar(score_threshold)
    lows, highs = _corners(wide(boxes), center_point_box)
    found = [
        (batch, group, box)
        for batch, rows in enumerate(wide(scores))
        for group, row in enumerate(rows)
        for box in _select(lows[batch], highs[batch], row, limit, iou, least)
    ]
    return np.array(found, np.int64).reshape(-1, 3)


def _samples() -> list[Sample]:
    boxes = draw(2, 6, 4, low=0, high=1)
    scores = draw(2, 3, 6, seed=1, low=0, high=1)
    half = np.array([0.5], np.float32)
    return [
        sample(boxes, scores, np.array([2]), half, half),
        sample(boxes, scores, np.array(9, np.int32), np.array(0.1, np.float32)),
        sample(boxes, scores, np.array([3]), half, None, center_point_box=True),
        sample(boxes, scores),
        sample(draw(1, 0, 4), draw(1, 2, 0), np.array([3])),
    ]


OPDEFS = [
    OpDef(
        "non_max_suppression",
        Kind.REDUCTION,
        "boxes, scores, max_output?, iou_threshold?, score_threshold?",
        _infer,
        _non_max_suppression,
        _samples,
        NonDifferentiable("its results are indices"),
        attrs={"center_point_box": Attr("bool", False)},
        doc="Rows (batch, class, box) of the kept boxes: at most max_output for each class "
        "(none if absent), scores above score_threshold, overlaps at most iou_threshold. Boxes "
        "are two corners, or centre and extent with center_point_box.",
    )
]
