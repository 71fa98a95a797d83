"""Gather, scatter and other indexing ops, and tensors made from sizes."""

from __future__ import annotations

from typing import Any

from bitwright.export.onnx.forms import as_scalar, counting, slice_axis, squeeze, unsqueeze
from bitwright.export.onnx.mapping import Ref, Scope, exports, exports_table
from bitwright.export.onnx.sizes import size_scalar, size_vector, sizes_tensor
from bitwright.ir.dim import Size
from bitwright.ir.dtype import bool_, i32, i64
from bitwright.ir.types import Shape, normalize_axis


def index(e: Scope, indices: Ref) -> Ref:
    """Indices in a type that ONNX supports."""
    return indices if indices.element in (i32, i64) else e.cast(indices, i64)


exports_table(
    {
        "gather": lambda e, x, indices, axis: e.Gather(x, index(e, indices), axis=axis),
        "compress": lambda e, x, condition, axis: e.Compress(x, condition, axis=axis),
        "iota": lambda e, length, dtype: e.cast(counting(e, length), dtype),
        "shape_of": lambda e, x: e.Shape(x),
    },
    widens=False,
)


@exports("gather_elements", widens=False)
def gather_elements(e: Scope, x: Ref, indices: Ref, axis: int) -> Ref:
    return e.GatherElements(x, index(e, indices), axis=axis)


@exports("gather_nd", widens=False)
def gather_nd(e: Scope, x: Ref, indices: Ref, batch_dims: int) -> Ref:
    return e.GatherND(x, e.cast(indices, i64), batch_dims=batch_dims)


@exports("scatter_elements", "scatter_nd", widens=False)
def scatter(
    e: Scope, x: Ref, indices: Ref, updates: Ref, reduction: str, axis: int | None = None
) -> Ref:
    if reduction in ("max", "min"):
        e.needs(18, f"ONNX scatters have no reduction {reduction!r} before")
    attrs: dict[str, Any] = {"reduction": None if reduction == "none" else reduction}
    if axis is None:
        return e.ScatterND(x, e.cast(indices, i64), updates, **attrs)
    return e.ScatterElements(x, index(e, indices), updates, axis=axis, **attrs)


@exports("tensor_scatter", widens=False)
def tensor_scatter(
    e: Scope, past: Ref, update: Ref, write_indices: Ref | None, axis: int, mode: str
) -> Ref:
    """TensorScatter; before opset 24 a scatter of the rows of each batch entry."""
    starts = None if write_indices is None else e.cast(write_indices, i64)
    if e.fits("TensorScatter", [past, update, starts]):
        return e.TensorScatter(past, update, starts, axis=axis, mode=mode)
    at = normalize_axis(axis, past.rank)
    places = counting(e, update.shape[at])
    if starts is not None:
        places = e.Add(e.Unsqueeze(starts, e.ints([1])), places)
    if mode == "circular":
        places = e.Mod(places, size_vector(e, past.shape[at]))
    batch = 1 if starts is None else 0
    aligned = [batch if i == 0 else -1 if i == at else 1 for i in range(past.rank)]
    rows = e.Expand(e.Reshape(places, e.ints(aligned)), sizes_tensor(e, update.shape))
    return e.ScatterElements(past, rows, update, axis=at)


@exports("reverse_sequence", widens=False)
def reverse_sequence(e: Scope, x: Ref, lengths: Ref, batch_axis: int, time_axis: int) -> Ref:
    batch, time = normalize_axis(batch_axis, x.rank), normalize_axis(time_axis, x.rank)
    counts = e.cast(lengths, i64)
    if {batch, time} == {0, 1}:
        return e.ReverseSequence(x, counts, batch_axis=batch, time_axis=time)
    order = [time, batch, *(axis for axis in range(x.rank) if axis not in (batch, time))]
    back = [order.index(axis) for axis in range(x.rank)]
    y = e.ReverseSequence(e.Transpose(x, perm=order), counts, batch_axis=1, time_axis=0)
    return e.Transpose(y, perm=back)


@exports("nonzero")
def nonzero(e: Scope, x: Ref) -> Ref:
    if x.rank:
        return e.NonZero(x)
    found = e.NonZero(unsqueeze(e, x, 0))  # a scalar has no coordinates
    return slice_axis(e, found, 0, 0, 0)


@exports("unique")
def unique(e: Scope, x: Ref, axis: int | None, sorted: bool) -> tuple[Ref, ...]:
    return e.emit("Unique", [x], {"axis": axis, "sorted": sorted}, results=4)


@exports("one_hot", widens=False)
def one_hot(
    e: Scope, indices: Ref, values: Ref, count: Ref | None, depth: Size | None, axis: int
) -> Ref:
    if count is None:
        assert depth is not None
        number = size_scalar(e, depth)
    else:
        number = as_scalar(e, count)
    if not indices.rank:
        return squeeze(e, _one_hot(e, unsqueeze(e, indices, 0), number, values, -1), 0)
    return _one_hot(e, indices, number, values, axis)


def _one_hot(e: Scope, indices: Ref, depth: Ref, values: Ref, axis: int) -> Ref:
    if values.dtype == bool_:  # runtimes support only numbers
        numbers = e.OneHot(indices, depth, e.cast(values, i64), axis=axis)
        return e.cast(numbers, bool_)
    return e.OneHot(indices, depth, values, axis=axis)


# tensors made from sizes


@exports("range")
def write_range(e: Scope, start: Ref, limit: Ref, delta: Ref) -> Ref:
    return e.Range(*(as_scalar(e, x) for x in (start, limit, delta)))


@exports("sizes", widens=False)
def sizes(e: Scope, values: Shape, shape: tuple[int, ...]) -> Ref:
    flat = sizes_tensor(e, values)
    if not shape:
        return size_scalar(e, values[0])
    return flat if len(shape) == 1 else e.Reshape(flat, e.ints(shape))
