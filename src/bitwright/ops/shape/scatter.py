"""Scatter ops: a copy of x with updates written at the positions in index tensors.

`reduction` combines updates of one position with each other and with x; without it the last update
is written. `tensor_scatter` writes consecutive rows into a key-value cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import zeros_like
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.core.symbolic import movement
from bitwright.ops.shape.gather import (
    check_shape,
    element_places,
    require_element_indices,
    require_indices,
    require_vector_indices,
    vector_places,
)
from bitwright.ops.shape.movement import slice_axis
from bitwright.ops.shape.scatter_gradients import scatter_rule

REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
_REDUCTION = Attr("str", "none", ("none", *REDUCTIONS))


def _write(x: Array, places: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    outer = np.broadcast_shapes(*(place.shape for place in places))
    check_shape("updates", updates.shape, outer + x.shape[len(places) :])
    if reduction == "none":
        result = x.copy()
        result[places] = updates
        return result
    result = wide(x)
    REDUCTIONS[reduction].at(result, places, wide(updates))
    return result


def _infer_elements(
    x: TensorType, indices: TensorType, updates: TensorType, axis: int, reduction: str
) -> TensorType:
    expect.same_dtype(x, updates)
    require_element_indices(x, indices, axis)
    expect.shape("updates", updates, indices.shape)
    return x


def _scatter_elements(x: Array, indices: Array, updates: Array, axis: int, reduction: str) -> Array:
    return _write(x, element_places(indices, x.shape, axis), updates, reduction)


def _elements_samples() -> list[Sample]:
    twice = np.array([[0, 0, 2], [0, -1, 2]])
    return [
        sample(draw(3, 3), np.array([[1, 0, 2], [0, 2, -2]]), draw(2, 3, seed=1), axis=0),
        sample(draw(3, 4), np.array([[3], [0]], np.int32), draw(2, 1, seed=1), axis=-1),
        sample(draw(3, 3), twice, draw(2, 3, seed=1), axis=0, reduction="add"),
        sample(draw(3, 3), twice, draw(2, 3, seed=1), axis=0, reduction="mul"),
        sample(draw(3, 3), twice, draw(2, 3, seed=1), axis=0, reduction="max"),
        sample(draw(3, 3, dtype="i32"), twice, draw(2, 3, dtype="i32", seed=1), reduction="min"),
        sample(draw(2, 2), np.zeros((0, 2), np.int64), draw(0, 2)),
        sample(draw(2, dtype="bf16"), np.array([1]), draw(1, dtype="bf16"), reduction="add"),
    ]


def _infer_nd(
    x: TensorType, indices: TensorType, updates: TensorType, reduction: str
) -> TensorType:
    expect.same_dtype(x, updates)
    count = require_vector_indices(x, indices)
    expect.shape("updates", updates, (*indices.shape[:-1], *x.shape[count:]))
    return x


def _scatter_nd(x: Array, indices: Array, updates: Array, reduction: str) -> Array:
    return _write(x, vector_places(indices, x.shape), updates, reduction)


def _nd_samples() -> list[Sample]:
    return [
        sample(draw(8), np.array([[4], [-5], [1]]), draw(3, seed=1)),
        sample(draw(4, 2, 3), np.array([[0], [2]]), draw(2, 2, 3, seed=1)),
        sample(draw(4, 3), np.array([[0, 1], [0, 1]], np.int32), draw(2, seed=1), reduction="add"),
        sample(draw(4, 3), np.array([[[1]], [[1]]]), draw(2, 1, 3, seed=1), reduction="max"),
        sample(draw(4, dtype="i64"), np.zeros((0, 1), np.int64), draw(0, dtype="i64")),
    ]


def _infer_cache(
    past: TensorType, update: TensorType, write_indices: TensorType | None, axis: int, mode: str
) -> TensorType:
    expect.same_dtype(past, update)
    axis = normalize_axis(axis, past.rank)
    if axis == 0:
        raise InferenceError("axis 0 is the batch", expected="another axis to write along")
    expected = [
        size if at == axis else past.shape[at] for at, size in enumerate(update.shape[: past.rank])
    ]
    expect.shape("update", update, tuple(expected))
    if write_indices is not None:
        require_indices(write_indices)
        expect.rank("write_indices", write_indices, 1)
        expect.size("write_indices", write_indices.shape[0], past.shape[0])
    return past


def _tensor_scatter(
    past: Array, update: Array, write_indices: Array | None, axis: int, mode: str
) -> Array:
    present = past.copy()
    rows, new = np.moveaxis(present, axis, 1), np.moveaxis(update, axis, 1)
    batch, room, count = rows.shape[0], rows.shape[1], new.shape[1]
    check_shape("update", new.shape, (batch, count, *rows.shape[2:]))
    starts = np.zeros(batch, np.int64) if write_indices is None else write_indices.astype(np.int64)
    check_shape("write_indices", starts.shape, (batch,))
    wrong = (starts < 0) | (count > room)
    if mode == "linear":
        wrong |= starts + count > room
    if wrong.any():
        raise RunError(
            f"{count} rows do not fit at index {starts[wrong][0]} of axis {axis}",
            expected=f"at most {room} rows",
        )
    places = (starts[:, None] + np.arange(count)) % max(room, 1)
    rows[np.arange(batch)[:, None], places] = new
    return present


def _cache_samples() -> list[Sample]:
    return [
        sample(draw(2, 3, 5, 4), draw(2, 3, 1, 4, seed=1), np.array([1, 4])),
        sample(draw(2, 3, 5, 4), draw(2, 3, 2, 4, seed=1)),
        sample(draw(2, 5, 4), draw(2, 3, 4, seed=1), np.array([4, 12]), mode="circular"),
        sample(draw(2, 3, 6, dtype="f16"), draw(2, 3, 2, dtype="f16", seed=1), axis=-1),
        sample(draw(1, 2, 3), draw(1, 0, 3, seed=1), np.array([2], np.int64)),
    ]


def _grad_cache(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """past loses dy where update was written, and update reads it there."""
    past, update, starts = (*node.inputs, None)[:3]
    assert past is not None and update is not None
    dpast = b.tensor_scatter(dys[0], zeros_like(b, update), starts, **node.attrs)
    axis = normalize_axis(node.attrs["axis"], past.rank)
    room, count = past.shape[axis], update.shape[axis]
    if starts is None:
        return [dpast, slice_axis(b, dys[0], axis, 0, count)]
    aligned = [count if at == axis else 1 for at in range(past.rank)]
    steps = b.reshape(b.iota(length=count, dtype=starts.dtype), shape=aligned)
    first = b.reshape(starts, shape=[starts.shape[0], *[1] * (past.rank - 1)])
    size = b.cast(b.sizes(values=(room,), shape=()), to=starts.dtype)
    places = b.expand(b.mod(b.add(first, steps), size), shape=update.shape)
    return [dpast, b.gather_elements(dys[0], places, axis=axis)]


OPDEFS = [
    movement(
        "scatter_elements",
        "x, indices, updates",
        _infer_elements,
        _scatter_elements,
        _elements_samples,
        grad=scatter_rule("elements"),
        attrs={"axis": Attr("int", 0), "reduction": _REDUCTION},
        doc="A copy of x with y[indices[i, j], j] = updates[i, j] for axis 0, and so on.",
    ),
    movement(
        "scatter_nd",
        "x, indices, updates",
        _infer_nd,
        _scatter_nd,
        _nd_samples,
        grad=scatter_rule("nd"),
        attrs={"reduction": _REDUCTION},
        doc="A copy of x with y[indices[i]] = updates[i], the last axis of indices a coordinate.",
    ),
    OpDef(
        "tensor_scatter",
        Kind.MOVEMENT,
        "past, update, write_indices?",
        _infer_cache,
        _tensor_scatter,
        _cache_samples,
        grad=_grad_cache,
        attrs={"axis": Attr("int", -2), "mode": Attr("str", "linear", ("linear", "circular"))},
        doc="past with update written along an axis from write_indices[batch] on (from 0 if "
        "absent), wrapping at the end in circular mode.",
    ),
]
