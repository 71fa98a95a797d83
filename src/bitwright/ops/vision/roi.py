"""Pooling of regions of interest: boxes of any size become feature maps of one size.

    roi_align     the mean (or maximum) of x interpolated at a grid of points in each bin of a box
    max_roi_pool  the largest value among the pixels that a bin touches

Boxes are x1, y1, x2, y2 in image coordinates; `spatial_scale` maps them to pixels of x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dtype import i64
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.shape.gather import check_shape


def _require_boxes(x: TensorType, rois: TensorType, columns: int) -> None:
    expect.rank("x", x, 4)
    expect.floating("x", x)
    expect.same_dtype(x, rois)
    expect.rank("rois", rois, 2)
    expect.size("axis 1 of rois", rois.shape[1], columns)


def _require_positive(what: str, *values: int) -> None:
    if any(value < 1 for value in values):
        raise InferenceError(f"{what} is too small", expected="at least 1", found=list(values))


def _infer_align(
    x: TensorType,
    rois: TensorType,
    batch_indices: TensorType,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    **_: Any,
) -> TensorType:
    _require_boxes(x, rois, 4)
    expect.rank("batch_indices", batch_indices, 1)
    expect.element("batch_indices", batch_indices, i64)
    expect.size("batch_indices", batch_indices.shape[0], rois.shape[0])
    _require_positive("the output size", output_height, output_width)
    if sampling_ratio < 0:
        raise InferenceError(
            "sampling_ratio is too small", expected="at least 0", found=sampling_ratio
        )
    return x.with_shape((rois.shape[0], x.shape[1], output_height, output_width))


def _check_images(indices: Array, count: int) -> None:
    outside = (indices < 0) | (indices >= count)
    if outside.any():
        raise RunError(
            "a box names no image of the batch",
            expected=f"0 to {count - 1}",
            found=int(indices[outside][0]),
        )


def _grid(start: float, length: float, bins: int, points: int) -> Array:
    """The points along one axis: the centres of `points` equal parts of each bin."""
    steps = (np.arange(points) + 0.5) / max(points, 1)
    return np.asarray(start + (np.arange(bins)[:, None] + steps) * (length / bins)).reshape(-1)


def _neighbours(places: Array, size: int) -> tuple[Array, Array]:
    """Pixels [2, n] around each position and their weights, 0 beyond one pixel outside."""
    inside = (places >= -1) & (places <= size)
    clamped = np.clip(np.where(inside, places, 0), 0, size - 1)
    low = np.floor(clamped).astype(np.int64)
    cells = np.stack([low, np.minimum(low + 1, size - 1)])
    fraction = clamped - low
    return cells, np.stack([1 - fraction, fraction]) * inside


def _align(
    x: Array,
    rois: Array,
    batch_indices: Array,
    mode: str,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
    coordinate_mode: str,
) -> Array:
    half_pixel = coordinate_mode == "half_pixel"
    check_shape("batch_indices", batch_indices.shape, rois.shape[:1])
    _check_images(batch_indices, len(x))
    boxes = wide(rois) * spatial_scale - (0.5 if half_pixel else 0.0)
    result = np.zeros((len(rois), x.shape[1], output_height, output_width))
    for number, (left, top, right, bottom) in enumerate(boxes):
        height, width = bottom - top, right - left
        if not half_pixel:  # a box without area covers one pixel
            height, width = max(height, 1.0), max(width, 1.0)
        rows = sampling_ratio or max(math.ceil(height / output_height), 0)
        columns = sampling_ratio or max(math.ceil(width / output_width), 0)
        if not rows or not columns:
            continue
        ys, y_weights = _neighbours(_grid(top, height, output_height, rows), x.shape[2])
        xs, x_weights = _neighbours(_grid(left, width, output_width, columns), x.shape[3])
        image = wide(x[batch_indices[number]])
        corners = [
            image[:, ys[i][:, None], xs[j]] * (y_weights[i][:, None] * x_weights[j])
            for i in (0, 1)
            for j in (0, 1)
        ]
        bins = (x.shape[1], output_height, rows, output_width, columns)
        if mode == "avg":
            result[number] = sum(corners).reshape(bins).mean(axis=(2, 4))
        else:  # ONNX takes the largest weighted corner, not the sum of the corners
            result[number] = np.max(corners, axis=0).reshape(bins).max(axis=(2, 4))
    return result


def _infer_max(
    x: TensorType, rois: TensorType, pooled_shape: Sequence[int], spatial_scale: float
) -> TensorType:
    _require_boxes(x, rois, 5)
    if len(pooled_shape) != 2:
        raise InferenceError(
            "pooled_shape does not fit", expected="height and width", found=list(pooled_shape)
        )
    _require_positive("pooled_shape", *pooled_shape)
    return x.with_shape((rois.shape[0], x.shape[1], *pooled_shape))


def _bins(low: int, high: int, count: int, size: int) -> list[slice]:
    """The pixels of each of `count` bins between two pixels, both included."""
    length = max(high - low + 1, 1)
    edges = []
    for number in range(count):
        first = low + (number * length) // count
        stop = low - (-(number + 1) * length) // count
        edges.append(slice(min(max(first, 0), size), min(max(stop, 0), size)))
    return edges


def _max_pool(x: Array, rois: Array, pooled_shape: Sequence[int], spatial_scale: float) -> Array:
    table = wide(rois)
    images = table[:, 0].astype(np.int64)
    _check_images(images, len(x))
    height, width = pooled_shape
    scaled = table[:, 1:] * spatial_scale
    # to whole pixels, halves away from zero
    boxes = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).astype(np.int64)
    result = np.zeros((len(rois), x.shape[1], height, width))
    for number, (left, top, right, bottom) in enumerate(boxes.tolist()):
        image = wide(x[images[number]])
        columns = _bins(left, right, width, x.shape[3])
        for row, rows in enumerate(_bins(top, bottom, height, x.shape[2])):
            if rows.start >= rows.stop:
                continue
            highest = image[:, rows].max(axis=1)
            for column, cells in enumerate(columns):
                if cells.start < cells.stop:
                    result[number, :, row, column] = highest[:, cells].max(axis=1)
    return result


def _align_samples() -> list[Sample]:
    x = draw(2, 3, 8, 9)
    rois = np.array([[0, 0, 6, 5], [2, 1, 3, 7], [-4, -4, 20, 20]], np.float32)
    batch = np.array([0, 1, 1])
    size = {"output_height": 2, "output_width": 4}
    return [
        sample(x, rois, batch, **size),
        sample(x, rois, batch, mode="max", sampling_ratio=2, **size),
        sample(x, rois, batch, coordinate_mode="output_half_pixel", spatial_scale=0.5, **size),
        sample(x, rois[:0], batch[:0]),
    ]


def _max_samples() -> list[Sample]:
    rois = np.array([[0, 0, 0, 6, 5], [1, 2, 1, 3, 7], [1, 6, 5, 30, 20]], np.float32)
    return [
        sample(draw(2, 3, 8, 9), rois, pooled_shape=(2, 4)),
        sample(draw(2, 3, 8, 9), rois, pooled_shape=(3, 3), spatial_scale=0.5),
        sample(draw(2, 3, 8, 9), rois[:0], pooled_shape=(1, 1)),
    ]


OPDEFS = [
    OpDef(
        "roi_align",
        Kind.REDUCTION,
        "x, rois, batch_indices",
        infer=_infer_align,
        reference=_align,
        samples=_align_samples,
        attrs={
            "mode": Attr("str", "avg", ("avg", "max")),
            "output_height": Attr("int", 1),
            "output_width": Attr("int", 1),
            "sampling_ratio": Attr("int", 0),
            "spatial_scale": Attr("float", 1.0),
            "coordinate_mode": Attr("str", "half_pixel", ("half_pixel", "output_half_pixel")),
        },
        doc="Each box rois[R, 4] of its image, averaged over interpolated points of each bin.",
        keeps=("rois",),
    ),
    OpDef(
        "max_roi_pool",
        Kind.MOVEMENT,
        "x, rois",
        infer=_infer_max,
        reference=_max_pool,
        samples=_max_samples,
        attrs={"pooled_shape": Attr("ints"), "spatial_scale": Attr("float", 1.0)},
        doc="The largest value in each bin of each box rois[R, 5] (image, then corners).",
        keeps=("rois",),
    ),
]
