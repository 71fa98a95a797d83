"""Gradients of the pooling of regions of interest, by the images.

    roi_align_backward      each pixel of dy, divided among the pixels around its points; in max
                            mode to the largest weighted corner
    max_roi_pool_backward   each pixel of dy to the largest pixel of its bin

The first of equal pixels wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import refuse
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, takes_wanted
from bitwright.ops.shape.gather import check_shape
from bitwright.ops.vision.roi import (
    ALIGN_ATTRS,
    MAX_ATTRS,
    Points,
    check_images,
    infer_align,
    infer_max,
    roi_bins,
    sampling_points,
)


def _infer_align(
    dy: TensorType, x: TensorType, rois: TensorType, batch_indices: TensorType, **attrs: Any
) -> TensorType:
    expect.shape("dy", dy, infer_align(x, rois, batch_indices, **attrs).shape)
    expect.same_dtype(dy, x)
    return x


def _align(dy: Array, x: Array, rois: Array, batch_indices: Array, **attrs: Any) -> Array:
    check_shape("batch_indices", batch_indices.shape, rois.shape[:1])
    check_images(batch_indices, len(x))
    result, gradients = np.zeros(x.shape), wide(dy)
    for number, points in enumerate(sampling_points(x.shape[2:], rois, **attrs)):
        if points is None:
            continue
        image = result[batch_indices[number]]
        if attrs["mode"] == "avg":
            _spread(image, gradients[number], points)
        else:
            _to_largest(image, wide(x[batch_indices[number]]), gradients[number], points)
    return result


def _spread(image: Array, dy: Array, points: Points) -> None:
    """Add dy to the corners of all points of its bin."""
    _, rows, _, columns = points.bins
    share = dy.repeat(rows, axis=1).repeat(columns, axis=2) / (rows * columns)
    for ys, xs, weights in points.corners:
        index: Any = (slice(None), ys, xs)
        np.add.at(image, index, share * weights)


def _to_largest(image: Array, x: Array, dy: Array, points: Points) -> None:
    """Add dy to the largest weighted corner of its bin."""
    height, rows, width, columns = points.bins
    shape = (-1, height, rows, width, columns)
    values = np.stack([x[:, ys, xs] * weights for ys, xs, weights in points.corners])
    flat = np.moveaxis(values.reshape(4, *shape), (0, 3, 5), (3, 4, 5)).reshape(
        len(x), height, width, -1
    )
    corner, row, column = np.unravel_index(flat.argmax(axis=-1), (4, rows, columns))
    ys = np.arange(height)[:, None] * rows + row
    xs = np.arange(width) * columns + column
    i, j = corner // 2, corner % 2
    weights = points.y_weights[i, ys] * points.x_weights[j, xs]
    channels = np.arange(len(x))[:, None, None]
    np.add.at(image, (channels, points.ys[i, ys], points.xs[j, xs]), dy * weights)


@takes_wanted
def _grad_align(b: Builder, node: Node, dys: list[Any], wanted: list[bool]) -> Gradients:
    """In avg mode the op is linear in dy and does not depend on x; its transpose is roi_align."""
    refuse(node, wanted, 2, "boxes are not differentiated, as in torchvision")
    if node.attrs["mode"] == "max":
        refuse(node, wanted, 0, "second derivatives of the largest value are not supported")
    return [b.roi_align(dys[0], *node.inputs[2:], **node.attrs)]


def _infer_max(dy: TensorType, x: TensorType, rois: TensorType, **attrs: Any) -> TensorType:
    expect.shape("dy", dy, infer_max(x, rois, **attrs).shape)
    expect.same_dtype(dy, x)
    return x


def _max_pool(dy: Array, x: Array, rois: Array, **attrs: Any) -> Array:
    images = wide(rois)[:, 0].astype(np.int64)
    check_images(images, len(x))
    values, gradients, result = wide(x), wide(dy), np.zeros(x.shape)
    channels = np.arange(x.shape[1])
    for number, row, column, rows, cells in roi_bins(x, rois, **attrs):
        window = values[images[number], :, rows, cells]
        largest = window.reshape(len(channels), -1).argmax(axis=1)
        ys, xs = np.unravel_index(largest, window.shape[1:])
        place = (images[number], channels, rows.start + ys, cells.start + xs)
        np.add.at(result, place, gradients[number, :, row, column])
    return result


@takes_wanted
def _grad_max(b: Builder, node: Node, dys: list[Any], wanted: list[bool]) -> Gradients:
    refuse(node, wanted, 0, "second derivatives of the largest value are not supported")
    return ()


def _align_samples() -> list[Sample]:
    x = draw(2, 3, 8, 9)
    rois = np.array([[0, 0, 6, 5], [2, 1, 3, 7], [-4, -4, 20, 20]], np.float32)
    batch, dy = np.array([0, 1, 1]), draw(3, 3, 2, 4, seed=1)
    size = {"output_height": 2, "output_width": 4}
    return [
        sample(dy, x, rois, batch, **size),
        sample(dy, x, rois, batch, coordinate_mode="output_half_pixel", spatial_scale=0.5, **size),
        sample(draw(0, 3, 1, 1), x, rois[:0], batch[:0]),
    ]


def _max_samples() -> list[Sample]:
    rois = np.array([[0, 0, 0, 6, 5], [1, 2, 1, 3, 7], [1, 6, 5, 30, 20]], np.float32)
    return [
        sample(draw(3, 3, 2, 4, seed=1), draw(2, 3, 8, 9), rois, pooled_shape=(2, 4)),
        sample(draw(0, 3, 1, 1), draw(2, 3, 8, 9), rois[:0], pooled_shape=(1, 1)),
    ]


OPDEFS = [
    OpDef(
        "roi_align_backward",
        Kind.REDUCTION,
        "dy, x, rois, batch_indices",
        infer=_infer_align,
        reference=_align,
        samples=_align_samples,
        grad=_grad_align,
        attrs=ALIGN_ATTRS,
        doc="The gradient of roi_align by x.",
        keeps=("rois",),
    ),
    OpDef(
        "max_roi_pool_backward",
        Kind.REDUCTION,
        "dy, x, rois",
        infer=_infer_max,
        reference=_max_pool,
        samples=_max_samples,
        grad=_grad_max,
        attrs=MAX_ATTRS,
        doc="The gradient of max_roi_pool by x.",
        keeps=("rois",),
    ),
]
