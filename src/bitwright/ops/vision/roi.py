"""Pooling of regions of interest: boxes of any size become feature maps of one size.

    roi_align     the mean (or maximum) of x interpolated at a grid of points in each bin of a box
    max_roi_pool  the largest value among the pixels that a bin touches

Boxes are x1, y1, x2, y2 in image coordinates; `spatial_scale` maps them to pixels of x.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dtype import i64
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import refuse
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, takes_wanted
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


def infer_align(
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


def check_images(indices: Array, count: int) -> None:
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


@dataclass(frozen=True)
class Points:
    """The sampling points of one box: pixels and weights [2, n] along both axes."""

    ys: Array
    y_weights: Array
    xs: Array
    x_weights: Array
    bins: tuple[int, int, int, int]
    """Output rows, points in a row of bins, output columns, points in a column."""

    @property
    def corners(self) -> list[tuple[Array, Array, Array]]:
        """Rows, columns and weights of the four pixels around each point."""
        return [
            (self.ys[i][:, None], self.xs[j], self.y_weights[i][:, None] * self.x_weights[j])
            for i in (0, 1)
            for j in (0, 1)
        ]


def sampling_points(
    sizes: tuple[int, ...],
    rois: Array,
    output_height: int,
    output_width: int,
    sampling_ratio: int,
    spatial_scale: float,
    coordinate_mode: str,
    **_: Any,
) -> Iterator[Points | None]:
    """The points of each box on images of these sizes; None for a box without points."""
    half_pixel = coordinate_mode == "half_pixel"
    for left, top, right, bottom in wide(rois) * spatial_scale - (0.5 if half_pixel else 0.0):
        height, width = bottom - top, right - left
        if not half_pixel:  # a box without area covers one pixel
            height, width = max(height, 1.0), max(width, 1.0)
        rows = sampling_ratio or max(math.ceil(height / output_height), 0)
        columns = sampling_ratio or max(math.ceil(width / output_width), 0)
        if not rows or not columns:
            yield None
            continue
        ys, y_weights = _neighbours(_grid(top, height, output_height, rows), sizes[0])
        xs, x_weights = _neighbours(_grid(left, width, output_width, columns), sizes[1])
        bins = (output_height, rows, output_width, columns)
        yield Points(ys, y_weights, xs, x_weights, bins)


def _align(x: Array, rois: Array, batch_indices: Array, **attrs: Any) -> Array:
    check_shape("batch_indices", batch_indices.shape, rois.shape[:1])
    check_images(batch_indices, len(x))
    result = np.zeros((len(rois), x.shape[1], attrs["output_height"], attrs["output_width"]))
    for number, points in enumerate(sampling_points(x.shape[2:], rois, **attrs)):
        if points is None:
            continue
        image = wide(x[batch_indices[number]])
        corners = [image[:, ys, xs] * weights for ys, xs, weights in points.corners]
        bins = (x.shape[1], *points.bins)
        if attrs["mode"] == "avg":
            result[number] = np.sum(corners, axis=0).reshape(bins).mean(axis=(2, 4))
        else:  # ONNX takes the largest weighted corner, not the sum of the corners
            result[number] = np.max(corners, axis=0).reshape(bins).max(axis=(2, 4))
    return result


def infer_max(
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


def pixel_boxes(rois: Array, spatial_scale: float) -> Array:
    """The corners in whole pixels, halves rounded away from zero."""
    scaled = wide(rois)[:, 1:] * spatial_scale
    return np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).astype(np.int64)


def roi_bins(
    x: Array, rois: Array, pooled_shape: Sequence[int], spatial_scale: float
) -> Iterator[tuple[int, int, int, slice, slice]]:
    """Box, output row, output column and the pixels of each bin that has pixels."""
    height, width = pooled_shape
    for number, box in enumerate(pixel_boxes(rois, spatial_scale).tolist()):
        left, top, right, bottom = box
        columns = _bins(left, right, width, x.shape[3])
        for row, rows in enumerate(_bins(top, bottom, height, x.shape[2])):
            for column, cells in enumerate(columns):
                if rows.start < rows.stop and cells.start < cells.stop:
                    yield number, row, column, rows, cells


def _max_pool(x: Array, rois: Array, pooled_shape: Sequence[int], spatial_scale: float) -> Array:
    images = wide(rois)[:, 0].astype(np.int64)
    check_images(images, len(x))
    values, result = wide(x), np.zeros((len(rois), x.shape[1], *pooled_shape))
    for number, row, column, rows, cells in roi_bins(x, rois, pooled_shape, spatial_scale):
        result[number, :, row, column] = values[images[number], :, rows, cells].max(axis=(1, 2))
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


ALIGN_ATTRS = {
    "mode": Attr("str", "avg", ("avg", "max")),
    "output_height": Attr("int", 1),
    "output_width": Attr("int", 1),
    "sampling_ratio": Attr("int", 0),
    "spatial_scale": Attr("float", 1.0),
    "coordinate_mode": Attr("str", "half_pixel", ("half_pixel", "output_half_pixel")),
}
MAX_ATTRS = {"pooled_shape": Attr("ints"), "spatial_scale": Attr("float", 1.0)}


@takes_wanted
def _grad_align(b: Builder, node: Node, dys: list[Any], wanted: list[bool]) -> Gradients:
    refuse(node, wanted, 1, "boxes are not differentiated, as in torchvision")
    return [b.roi_align_backward(dys[0], *node.operands, **node.attrs)]


def _grad_max(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """Boxes are rounded to pixels, so their gradient is zero."""
    return [b.max_roi_pool_backward(dys[0], *node.operands, **node.attrs)]


OPDEFS = [
    OpDef(
        "roi_align",
        Kind.REDUCTION,
        "x, rois, batch_indices",
        infer=infer_align,
        reference=_align,
        samples=_align_samples,
        grad=_grad_align,
        attrs=ALIGN_ATTRS,
        doc="Each box rois[R, 4] of its image, averaged over interpolated points of each bin.",
        keeps=("rois",),
    ),
    OpDef(
        "max_roi_pool",
        Kind.MOVEMENT,
        "x, rois",
        infer=infer_max,
        reference=_max_pool,
        samples=_max_samples,
        grad=_grad_max,
        attrs=MAX_ATTRS,
        doc="The largest value in each bin of each box rois[R, 5] (image, then corners).",
        keeps=("rois",),
    ),
]
