"""The gradient of `gather`: rows of dy, added up in a zeroed table.

    dtable[..., indices[i], ...] += dy[..., i, ...]      i in ascending order

The order of the sums is that of the indices, so the result does not depend on the number of
threads. Negative indices count from the end; one outside the table is an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dim import Size
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.shape.gather import check_shape, checked_indices


def _infer(dy: TensorType, indices: TensorType, axis: int, size: Size) -> TensorType:
    expect.number("dy", dy)
    expect.integer("the index operand", indices)
    rank = dy.rank - indices.rank + 1
    if rank < 1:
        raise InferenceError("dy has fewer axes than the indices", expected=indices, found=dy)
    at = normalize_axis(axis, rank)
    after = at + indices.rank
    for number, count in enumerate(indices.shape):
        expect.size(f"axis {at + number} of dy", dy.shape[at + number], count)
    return dy.with_shape((*dy.shape[:at], size, *dy.shape[after:]))


def _gather_backward(dy: Array, indices: Array, axis: int, size: int) -> Array:
    at = normalize_axis(axis, dy.ndim - indices.ndim + 1)
    after = at + indices.ndim
    check_shape("dy", dy.shape[at:after], indices.shape)
    rows = wide(dy).reshape(*dy.shape[:at], indices.size, *dy.shape[after:])
    table = np.zeros((size, *dy.shape[:at], *dy.shape[after:]), rows.dtype)
    np.add.at(table, checked_indices(indices, size, at).reshape(-1), np.moveaxis(rows, at, 0))
    return np.moveaxis(table, 0, at)


def _grad(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """The op is linear in dy, and its transpose is gather."""
    return [b.gather(dys[0], node.inputs[1], axis=node.attrs["axis"])]


def _samples() -> list[Sample]:
    return [
        sample(draw(4, 3), np.array([2, 0, 2, -1]), size=5),
        sample(draw(2, 2, 3), np.array([[0, 4], [-1, 0]], np.int32), size=5),
        sample(draw(2, 2, 3, 4), np.array([[1, 1, 1], [0, 2, -3]]), axis=1, size=3),
        sample(draw(2), np.array(3), axis=-1, size=4),
        sample(draw(0, 3), np.zeros(0, np.int64), size=2),
        sample(draw(2, 0), np.array([1, 1]), size=3),
        sample(draw(7, 17, dtype="f64"), np.arange(7) % 3, size=3),
        sample(draw(6, 2, dtype="bf16"), np.array([1, 1, 0, 1, 0, 0]), size=2, tolerance=2e-2),
    ]


OPDEFS = [
    OpDef(
        "gather_backward",
        Kind.REDUCTION,
        "dy, indices",
        infer=_infer,
        reference=_gather_backward,
        grad=_grad,
        samples=_samples,
        attrs={"axis": Attr("int", 0), "size": Attr("size")},
        doc="The gradient of gather's table: slices of dy along an axis, added up by index into "
        "`size` zeroed slices.",
    )
]
