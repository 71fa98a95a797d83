"""The gradient of resize: every pixel of dy is added to the pixels that it was made of.

    dx[index[i, t]] += weight[i, t] * dy[i]

Resize is linear in x, axis by axis, so this is the transpose of each axis in reverse order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Node
from bitwright.ir.types import Shape, TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import refuse
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, takes_wanted
from bitwright.ops.vision.resize import (
    CROP,
    PLACEMENT,
    axis_taps,
    coordinates_on_axis,
    region_of,
    require_floats,
)


def _infer(
    dy: TensorType,
    scales_data: TensorType | None,
    roi_data: TensorType | None,
    shape: Shape,
    **attrs: Any,
) -> TensorType:
    expect.floating("dy", dy)
    expect.size("shape", len(shape), dy.rank)
    if scales_data is not None:
        require_floats("scales", scales_data, dy.rank)
    if roi_data is not None:
        require_floats("roi", roi_data, 2 * dy.rank)
    return dy.with_shape(shape)


def _reference(
    dy: Array,
    scales_data: Array | None,
    roi_data: Array | None,
    shape: tuple[int, ...],
    **attrs: Any,
) -> Array:
    starts, ends = region_of(dy.ndim, roi_data, attrs)
    scales = attrs["scales"] or (None,) * dy.ndim
    if scales_data is not None:
        scales = scales_data.astype(np.float64).tolist()
    result = wide(dy)
    if not result.size:
        return np.zeros(shape)
    rows = list(enumerate(zip(shape, dy.shape, scales, starts, ends, strict=True)))
    places = {axis: coordinates_on_axis(attrs["coordinate_mode"], *row) for axis, row in rows}
    if attrs["coordinate_mode"] == CROP:  # what lies outside x is a constant
        for axis, row in rows:
            inside = (places[axis] >= 0) & (places[axis] <= row[0] - 1)
            result = result * inside.reshape([-1 if at == axis else 1 for at in range(dy.ndim)])
    for axis, row in reversed(rows):
        found = axis_taps(row[0], places[axis], row[2], attrs)
        if found is not None:
            result = _transposed(result, axis, row[0], *found)
    return result


def _transposed(dy: Array, axis: int, size: int, index: Array, weights: Array | None) -> Array:
    """dy times the transposed matrix [positions, size] of the taps."""
    matrix = np.zeros((len(index), size))
    rows = np.arange(len(index))[:, None]
    np.add.at(matrix, (rows, index), 1.0 if weights is None else weights)
    return np.moveaxis(np.tensordot(dy, matrix, axes=(axis, 0)), -1, axis)


@takes_wanted
def _grad(b: Builder, node: Node, dys: list[Any], wanted: list[bool]) -> Gradients:
    """The op is linear in dy, and its transpose is resize with zeros outside."""
    dy, scales, roi = (*node.inputs, None, None)[:3]
    assert dy is not None
    for position in (1, 2):
        refuse(node, wanted, position, "the number of pixels depends on it")
    attrs = {name: value for name, value in node.attrs.items() if name != "shape"}
    if scales is None:
        return [b.resize(dys[0], None, None, roi, sizes=dy.shape, **attrs)]
    return [b.reshape(b.resize(dys[0], None, scales, roi, **attrs), shape=dy.shape)]


def _samples() -> list[Sample]:
    image, shape = draw(1, 2, 4, 5), (1, 2, 3, 7)
    region = (0, 0, 0.4, -0.2, 1, 1, 0.6, 1.3)
    scales = np.array([1, 1, 1.4, 0.72], np.float32)
    return [
        sample(image, shape=shape),
        sample(image, shape=shape, mode="linear"),
        sample(image, shape=shape, mode="cubic", coordinate_mode="align_corners"),
        sample(image, shape=(1, 2, 8, 9), mode="linear", antialias=True, tolerance=1e-4),
        sample(image, shape=shape, mode="cubic", exclude_outside=True),
        sample(image, shape=shape, mode="linear", coordinate_mode=CROP, roi=region),
        sample(image, scales, shape=shape, mode="linear"),
        sample(draw(0, 3), shape=(0, 6), mode="linear"),
        sample(draw(6, dtype="bf16"), shape=(4,), mode="linear", tolerance=1e-2),
    ]


OPDEFS = [
    OpDef(
        "resize_backward",
        Kind.REDUCTION,
        "dy, scales?, roi?",
        infer=_infer,
        reference=_reference,
        grad=_grad,
        samples=_samples,
        attrs={"shape": Attr("sizes"), **PLACEMENT},
        doc="The gradient of resize by x, whose sizes are `shape`.",
        keeps=("scales", "roi"),
    )
]
