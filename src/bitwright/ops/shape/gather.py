"""Gather ops: read elements at the positions in index tensors.

Negative indices count from the end. An index outside its axis is an error at run time that names
the index and the size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dim import UNKNOWN, Size, bounds
from bitwright.ir.dtype import bool_
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import zeros_like
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.core.symbolic import movement
from bitwright.ops.shape.slice_gradients import unslice


def checked_indices(indices: Array, size: int, axis: int) -> Array:
    """The indices counted from the front; a `RunError` names an index that is out of range."""
    places = indices.astype(np.int64)
    outside = (places < -size) | (places >= size)
    if outside.any():
        raise RunError(
            f"index {places[outside][0]} is outside axis {axis} of size {size}",
            expected=f"{-size} to {size - 1}" if size else "no index",
        )
    return np.where(places < 0, places + size, places)


def check_shape(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise unless shapes are equal; inference does not check symbolic sizes, numpy broadcasts."""
    if found != expected:
        raise RunError(f"{what} has the wrong shape", expected=list(expected), found=list(found))


def element_places(indices: Array, shape: tuple[int, ...], axis: int) -> tuple[Array, ...]:
    """Positions that `gather_elements` reads: each index replaces the coordinate of one axis."""
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = checked_indices(indices, shape[axis], axis)
    return tuple(places)


def vector_places(indices: Array, shape: tuple[int, ...], batch_dims: int = 0) -> tuple[Array, ...]:
    """The positions that `gather_nd` reads: the last axis of the indices is a coordinate vector."""
    outer = indices.shape[:-1]
    places: list[Array] = list(np.indices(outer, sparse=True))[:batch_dims]
    for position in range(indices.shape[-1]):
        axis = batch_dims + position
        places.append(checked_indices(indices[..., position], shape[axis], axis))
    return tuple(places)


def require_indices(indices: TensorType) -> None:
    expect.index("the index operand", indices)


# gather


def _infer_gather(x: TensorType, indices: TensorType, axis: int) -> TensorType:
    expect.integer("the index operand", indices)
    axis = normalize_axis(axis, x.rank)
    return x.with_shape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def _gather(x: Array, indices: Array, axis: int) -> Array:
    return np.take(x, checked_indices(indices, x.shape[axis], axis), axis)


def _gather_samples() -> list[Sample]:
    return [
        sample(draw(5, 3), np.array([[0, 4], [-1, 2]])),
        sample(draw(2, 5, 3), np.array([1, -5], np.int32), axis=1),
        sample(draw(2, 5, dtype="i64"), np.array(3), axis=-1),
        sample(draw(5, 0), np.array([1, 1, 1])),
        sample(draw(4, 2, dtype="bf16"), np.zeros((0, 3), np.int64)),
        sample(np.array(["a", "b"], object), np.array([1, 0, 1])),
    ]


def constant_range(indices: Value, size: Size) -> tuple[Size, int] | None:
    """The first index, counted from the front, and the step of constant indices that form a range.

    None if they are not constant, not a scalar or a vector, or not evenly spaced.
    """
    found = constant_value(indices)
    if found is None or found.ndim > 1 or not found.size:
        return None
    places = found.reshape(-1).astype(np.int64)
    if isinstance(size, int):
        places = np.where(places < 0, places + size, places)
    steps = np.diff(places)
    step = int(steps[0]) if steps.size else 1
    first, last = int(places[0]), int(places[-1])
    if step == 0 or (steps != step).any() or (first < 0) != (last < 0):
        return None
    if isinstance(size, int) and not (min(first, last) >= 0 and max(first, last) < size):
        return None
    return (first if first >= 0 else size + first), step


def _grad_gather(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """Sums by index; a constant range of indices is a slice, whose gradient is a pad."""
    x, indices = node.operands
    axis = normalize_axis(node.attrs["axis"], x.rank)
    size = x.shape[axis]
    found = constant_range(indices, size)
    if found is None:
        return [b.gather_backward(dys[0], indices, axis=axis, size=size)]
    dy = dys[0]
    if not indices.rank:
        dy = b.reshape(dy, shape=(*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return [unslice(b, dy, axis, size, *found)]


# gather_elements


def require_element_indices(x: TensorType, indices: TensorType, axis: int) -> None:
    require_indices(indices)
    expect.rank("the index operand", indices, x.rank)
    axis = normalize_axis(axis, x.rank)
    for at, (size, count) in enumerate(zip(x.shape, indices.shape, strict=True)):
        if at != axis and bounds(size - count)[1] < 0:
            raise InferenceError(
                f"there are more indices than elements on axis {at}", expected=size, found=count
            )


def _infer_gather_elements(x: TensorType, indices: TensorType, axis: int) -> TensorType:
    require_element_indices(x, indices, axis)
    return x.with_shape(indices.shape)


def _gather_elements(x: Array, indices: Array, axis: int) -> Array:
    return x[element_places(indices, x.shape, axis)]


def _gather_elements_samples() -> list[Sample]:
    return [
        sample(draw(3, 4), np.array([[0, -1, 2, 1], [1, 1, 0, 0]]), axis=0),
        sample(draw(3, 4), np.array([[0], [3], [-4]], np.int32), axis=1),
        sample(draw(3, 4, dtype="i8"), np.array([[2, 0]]), axis=-2),
        sample(draw(2, 3), np.zeros((2, 0), np.int64), axis=1),
    ]


def _grad_gather_elements(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    x, indices = node.operands
    zeros, axis = zeros_like(b, x), node.attrs["axis"]
    return [b.scatter_elements(zeros, indices, dys[0], axis=axis, reduction="add")]


# gather_nd


def require_vector_indices(x: TensorType, indices: TensorType, batch_dims: int = 0) -> int:
    """The length of the coordinate vectors, checked."""
    require_indices(indices)
    count = indices.shape[-1] if indices.rank else 0
    if not isinstance(count, int) or not 1 <= count <= x.rank - batch_dims:
        raise InferenceError(
            "the last axis of the indices has the wrong size",
            expected=f"1 to {x.rank - batch_dims}",
            found=count,
        )
    return count


def _infer_gather_nd(x: TensorType, indices: TensorType, batch_dims: int) -> TensorType:
    if not 0 <= batch_dims < min(x.rank, indices.rank):
        raise InferenceError(
            "batch_dims is out of range",
            expected=f"0 to {min(x.rank, indices.rank) - 1}",
            found=batch_dims,
        )
    count = require_vector_indices(x, indices, batch_dims)
    for axis in range(batch_dims):
        expect.size(f"batch axis {axis} of the indices", indices.shape[axis], x.shape[axis])
    return x.with_shape((*indices.shape[:-1], *x.shape[batch_dims + count :]))


def _gather_nd(x: Array, indices: Array, batch_dims: int) -> Array:
    check_shape("the batch of the indices", indices.shape[:batch_dims], x.shape[:batch_dims])
    return x[vector_places(indices, x.shape, batch_dims)]


def _gather_nd_samples() -> list[Sample]:
    return [
        sample(draw(3, 4), np.array([[0, 1], [-1, 3]])),
        sample(draw(3, 4, 2), np.array([[[1]], [[2]]])),
        sample(draw(2, 3, 4), np.array([[1], [0]]), batch_dims=1),
        sample(draw(2, 3, 4), np.array([[[1], [0]], [[2], [2]]]), batch_dims=1),
        sample(draw(2, 2, dtype="i64"), np.zeros((0, 2), np.int64)),
    ]


def _grad_gather_nd(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy added up at the coordinates; those of the batch axes are counted."""
    x, indices = node.operands
    outer = indices.shape[:-1]
    coordinates = []
    for axis in range(node.attrs["batch_dims"]):
        counter = b.iota(length=outer[axis], dtype=indices.dtype)
        aligned = [outer[axis] if at == axis else 1 for at in range(indices.rank)]
        coordinates.append(b.expand(b.reshape(counter, shape=aligned), shape=(*outer, 1)))
    if coordinates:
        indices = b.concat(*coordinates, indices, axis=-1)
    return [b.scatter_nd(zeros_like(b, x), indices, dys[0], reduction="add")]


# reverse_sequence


def _infer_reverse(
    x: TensorType, lengths: TensorType, batch_axis: int, time_axis: int
) -> TensorType:
    require_indices(lengths)
    expect.rank("lengths", lengths, 1)
    batch, time = normalize_axis(batch_axis, x.rank), normalize_axis(time_axis, x.rank)
    if batch == time:
        raise InferenceError("batch and time are one axis", expected="two axes", found=batch)
    expect.size("lengths", lengths.shape[0], x.shape[batch])
    return x


def _reverse(x: Array, lengths: Array, batch_axis: int, time_axis: int) -> Array:
    rows = np.moveaxis(x, (batch_axis, time_axis), (0, 1))
    count = rows.shape[1]
    check_shape("lengths", lengths.shape, rows.shape[:1])
    ends = lengths.astype(np.int64)[:, None]
    if ((ends < 0) | (ends > count)).any():
        wrong = ends[(ends < 0) | (ends > count)][0]
        raise RunError(f"length {wrong} is outside axis {time_axis} of size {count}")
    steps = np.arange(count)[None, :]
    places = np.where(steps < ends, ends - 1 - steps, steps)
    transposed = rows[np.arange(rows.shape[0])[:, None], places]
    return np.moveaxis(transposed, (0, 1), (batch_axis, time_axis))


def _reverse_samples() -> list[Sample]:
    return [
        sample(draw(4, 3), np.array([4, 2, 0])),
        sample(draw(2, 5, 3, dtype="i32"), np.array([1, 5]), batch_axis=0, time_axis=1),
        sample(draw(2, 0), np.array([], np.int64)),
    ]


# compress


def _infer_compress(x: TensorType, condition: TensorType, axis: int | None) -> TensorType:
    expect.element("the condition", condition, bool_)
    expect.rank("the condition", condition, 1)
    if axis is None:
        return x.with_shape((UNKNOWN,))
    axis = normalize_axis(axis, x.rank)
    return x.with_shape((*x.shape[:axis], UNKNOWN, *x.shape[axis + 1 :]))


def _compress(x: Array, condition: Array, axis: int | None) -> Array:
    whole, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    (kept,) = np.nonzero(condition)
    return np.take(whole, checked_indices(kept, whole.shape[along], along), along)


def _compress_samples() -> list[Sample]:
    return [
        sample(draw(3, 2), np.array([True, False, True]), axis=0),
        sample(draw(3, 2), np.array([False, True]), axis=-1),
        sample(draw(3, 2, dtype="u8", low=0), np.array([False, True, False, True])),
        sample(draw(3, 2), np.array([], bool)),
    ]


def _grad_reverse(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.reverse_sequence(dys[0], node.inputs[1], **node.attrs)]


def _grad_compress(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy at the kept places, whose indices are a compressed counter."""
    x, condition = node.operands
    axis = node.attrs.get("axis")
    size = x.tensor.count if axis is None else x.shape[axis]
    kept = b.compress(b.iota(length=size), condition, axis=0)
    dx = b.gather_backward(dys[0], kept, axis=axis or 0, size=size)
    return [b.reshape(dx, shape=x.shape) if axis is None else dx]


OPDEFS = [
    movement(
        "gather",
        "x, indices",
        _infer_gather,
        _gather,
        _gather_samples,
        grad=_grad_gather,
        attrs={"axis": Attr("int", 0)},
        doc="Slices of x along an axis, one for each index.",
    ),
    movement(
        "gather_elements",
        "x, indices",
        _infer_gather_elements,
        _gather_elements,
        _gather_elements_samples,
        grad=_grad_gather_elements,
        attrs={"axis": Attr("int", 0)},
        doc="y[i, j] = x[indices[i, j], j] for axis 0, and so on.",
    ),
    movement(
        "gather_nd",
        "x, indices",
        _infer_gather_nd,
        _gather_nd,
        _gather_nd_samples,
        grad=_grad_gather_nd,
        attrs={"batch_dims": Attr("int", 0)},
        doc="y[i] = x[indices[i]], where the last axis of the indices holds coordinates; the "
        "first `batch_dims` axes run in step.",
    ),
    OpDef(
        "reverse_sequence",
        Kind.MOVEMENT,
        "x, lengths",
        _infer_reverse,
        _reverse,
        _reverse_samples,
        grad=_grad_reverse,
        attrs={"batch_axis": Attr("int", 1), "time_axis": Attr("int", 0)},
        doc="The first lengths[b] steps of each sequence in reverse order, the rest as it is.",
    ),
    OpDef(
        "compress",
        Kind.MOVEMENT,
        "x, condition",
        _infer_compress,
        _compress,
        _compress_samples,
        grad=_grad_compress,
        attrs={"axis": Attr("int", None)},
        doc="The slices along an axis (or the elements of x, flat) whose condition holds.",
    ),
]
