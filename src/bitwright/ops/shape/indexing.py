"""Ops that make or find indices: counters, shapes as tensors, one-hot vectors, nonzero, unique.

`sizes` returns symbolic sizes as an i64 tensor, `shape_of` the shape of a tensor. Passes write a
`range` over known sizes as `iota`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.allocation import require_room
from bitwright.ir.dim import UNKNOWN, Size, product
from bitwright.ir.dtype import DType, bool_, i64, string
from bitwright.ir.graph import Node
from bitwright.ir.types import Shape, TensorType, ValueType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import Array, wide
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.core.symbolic import on_elements
from bitwright.ops.shape.slicing import slice_size


def _object_array(values: tuple[Size, ...], shape: tuple[int, ...]) -> Array:
    elements = np.empty(len(values), object)
    elements[:] = values
    return elements.reshape(shape)


# counters and shapes


def _infer_range(start: TensorType, limit: TensorType, delta: TensorType) -> TensorType:
    for operand in (start, limit, delta):
        expect.number("an operand", operand)
        expect.size("an operand", operand.count, 1)
    return TensorType(expect.same_dtype(start, limit, delta), (UNKNOWN,))


def _range(start: Array, limit: Array, delta: Array) -> Array:
    first, end, step = (wide(operand).reshape(())[()] for operand in (start, limit, delta))
    if step == 0:
        raise RunError("a range has the step 0")
    if isinstance(first, np.integer):
        first, end, step = int(first), int(end), int(step)
        count = -((first - end) // step)
    else:
        count = int(np.ceil((end - first) / step))
    require_room((max(count, 0),), start.itemsize, "its result")
    return np.asarray(first + np.arange(max(count, 0)) * step)


def _range_sizes(start: Array, limit: Array, delta: Array) -> Array | None:
    first, end, step = (operand.reshape(-1)[0] for operand in (start, limit, delta))
    count = slice_size(first, end, int(step))
    if not isinstance(count, int):
        return None
    return _object_array(tuple(first + i * step for i in range(max(count, 0))), (-1,))


def _range_samples() -> list[Sample]:
    def case(start: float, limit: float, delta: float, dtype: Any) -> Sample:
        return sample(*(np.array(v, dtype) for v in (start, limit, delta)))

    return [
        case(1, 9, 2, np.int64),
        case(10, 4, -2, np.int32),
        case(5, 2, 1, np.int16),
        case(0.5, 2, 0.25, np.float32),
        case(1, -1, -0.5, np.float64),
    ]


def _infer_iota(length: Size, dtype: DType) -> TensorType:
    found = TensorType(dtype, (length,))
    expect.number("the result", found)
    return found


def _infer_sizes(values: Shape, shape: tuple[int, ...]) -> TensorType:
    expect.size("the list of sizes", len(values), product(shape))
    return TensorType(i64, shape)


def _infer_shape_of(x: ValueType) -> TensorType:
    if not isinstance(x, TensorType):
        raise InferenceError("the operand has no known rank", expected="a tensor", found=x)
    return TensorType(i64, (x.rank,))


def _shape_of_sizes(x: Array | TensorType) -> Array:
    return _object_array(tuple(x.shape), (-1,))


# one_hot, nonzero, unique


def _infer_one_hot(
    indices: TensorType, values: TensorType, given: TensorType | None, depth: Any, axis: int
) -> TensorType:
    expect.one_form("depth", depth, given)
    expect.number("the index operand", indices)
    expect.rank("values", values, 1)
    expect.size("values (off, on)", values.shape[0], 2)
    if given is not None:
        expect.number("depth", given)
        expect.size("depth", given.count, 1)
    axis = normalize_axis(axis, indices.rank + 1)
    size = UNKNOWN if depth is None else depth
    return values.with_shape((*indices.shape[:axis], size, *indices.shape[axis:]))


def _one_hot(
    indices: Array, values: Array, given: Array | None, depth: int | None, axis: int
) -> Array:
    count = int(given.reshape(-1)[0]) if given is not None else int(depth or 0)
    if count < 0:
        raise RunError("the depth of one_hot is negative", found=count)
    require_room((indices.size, count), values.itemsize, "its result")
    labels = wide(indices)
    if labels.dtype != np.uint64:
        labels = np.where(labels < 0, labels + count, labels)
    axis = normalize_axis(axis, indices.ndim + 1)
    classes = np.arange(count).reshape([-1, *(1,) * (indices.ndim - axis)])
    hot = np.expand_dims(labels, axis) == classes
    return np.asarray(np.where(hot, values[1], values[0]))


def _one_hot_samples() -> list[Sample]:
    values = np.array([0.5, 2], np.float32)
    return [
        sample(np.array([[0, 2], [-1, 9]]), values, depth=3),
        sample(np.array([[0, 2], [-1, 9]]), values, depth=4, axis=1),
        sample(np.array([1.0, -2.0], np.float32), np.array([0, 1], np.int8), depth=2, axis=0),
        sample(np.array([1, 7], np.uint8), values, np.array(5)),
        sample(np.array(2), values, np.array([3.0], np.float32)),
        sample(np.zeros((0,), np.int64), np.array([False, True]), depth=2),
    ]


def _infer_nonzero(x: TensorType) -> TensorType:
    expect.dtype("x", x, lambda d: expect.is_number(d) or d == bool_, "a number type or bool")
    return TensorType(i64, (x.rank, UNKNOWN))


def _nonzero(x: Array) -> Array:
    if x.ndim == 0:  # a scalar has no coordinates
        return np.zeros((0, int(x != 0)), np.int64)
    return np.stack(np.nonzero(wide(x)))


def _infer_unique(x: TensorType, axis: int | None, sorted: bool) -> tuple[TensorType, ...]:
    found = TensorType(i64, (UNKNOWN,))
    if axis is None:
        return x.with_shape((UNKNOWN,)), found, TensorType(i64, (x.count,)), found
    axis = normalize_axis(axis, x.rank)
    y = x.with_shape((*x.shape[:axis], UNKNOWN, *x.shape[axis + 1 :]))
    return y, found, TensorType(i64, (x.shape[axis],)), found


def _unique(x: Array, axis: int | None, sorted: bool) -> tuple[Array, ...]:
    whole, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    keys: Array = wide(whole) if x.dtype != string.numpy else _ranks(whole)
    if keys.size == 0:
        none = np.zeros(0, np.int64)
        if whole.shape[along] == 0:
            return np.take(whole, none, along), none, none, none
        keys = np.zeros(whole.shape[along])  # empty slices, which are all equal
    key_axis = along if keys.ndim > 1 else None
    _, first, inverse, counts = np.unique(
        keys, return_index=True, return_inverse=True, return_counts=True, axis=key_axis
    )
    inverse = inverse.reshape(-1)
    if not sorted:
        order = np.argsort(first)
        first, counts = first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return np.take(whole, first, along), first, inverse, counts


def _ranks(x: Array) -> Array:
    """The rank of each string in sorted order."""
    _, keys = np.unique(x, return_inverse=True)
    return np.asarray(keys).reshape(x.shape)


def _unique_samples() -> list[Sample]:
    x = np.array([2, 1, 1, 3, 4, 3], np.float32)
    rows = np.array([[1, 0, 0], [1, 0, 0], [2, 3, 4]])
    return [
        sample(x),
        sample(x, sorted=False),
        sample(rows, axis=0),
        sample(rows, axis=-1, sorted=False),
        sample(rows.astype(np.int8)),
        sample(np.array(["b", "a", "b"], object)),
        sample(np.zeros((0, 2), np.float32), axis=0),
        sample(np.zeros((2, 0), np.float32), axis=0),
        sample(np.zeros((0,), np.int64)),
    ]


def _grad_one_hot(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """The sums of dy at the places that are off and on."""
    y = node.outputs[0]
    indices, _, *depth = node.inputs
    sums = []
    for pattern in ([1, 0], [0, 1]):
        values = b.constant(np.array(pattern), y.dtype)
        chosen = b.mul(dys[0], b.one_hot(indices, values, *depth, **node.attrs))
        total = b.reduce_sum(chosen, axes=tuple(range(y.rank)), keepdims=False)
        sums.append(b.reshape(total, shape=(1,)))
    return [None, b.concat(*sums, axis=0)]


_INDICES = NonDifferentiable("its results are indices or sizes")
OPDEFS = [
    OpDef(
        "range",
        Kind.MOVEMENT,
        "start, limit, delta",
        _infer_range,
        _range,
        _range_samples,
        grad=NonDifferentiable("its length depends on the operands"),
        sizes=on_elements(_range_sizes),
        onnx="Range",
        fixed_types=True,
        doc="start, start + delta, ... up to but not including limit.",
    ),
    OpDef(
        "iota",
        Kind.MOVEMENT,
        "",
        _infer_iota,
        lambda length, dtype: np.arange(length),
        lambda: [sample(length=5), sample(length=0), sample(length=4, dtype="bf16")],
        _INDICES,
        attrs={"length": Attr("size"), "dtype": Attr("dtype", i64)},
        sizes=lambda length, dtype: np.arange(length).astype(object),
        fixed_types=True,
        doc="0, 1, ... length - 1",
    ),
    OpDef(
        "sizes",
        Kind.MOVEMENT,
        "",
        _infer_sizes,
        lambda values, shape: np.array(values, np.int64).reshape(shape),
        lambda: [
            sample(values=(2, 3), shape=(2,)),
            sample(values=(7,), shape=()),
            sample(values=(), shape=(0, 2)),
        ],
        _INDICES,
        attrs={"values": Attr("sizes"), "shape": Attr("ints")},
        sizes=_object_array,
        doc="Sizes as an i64 tensor of this shape.",
    ),
    OpDef(
        "shape_of",
        Kind.MOVEMENT,
        "x",
        _infer_shape_of,
        lambda x: np.array(x.shape, np.int64),
        lambda: [sample(draw(2, 3)), sample(draw()), sample(draw(0, 1, dtype="i8"))],
        _INDICES,
        sizes=_shape_of_sizes,
        onnx="Shape",
        doc="The shape of x as an i64 vector.",
    ),
    OpDef(
        "one_hot",
        Kind.MOVEMENT,
        "indices, values, depth?",
        _infer_one_hot,
        _one_hot,
        _one_hot_samples,
        grad=_grad_one_hot,
        attrs={"depth": Attr("size", None), "axis": Attr("int", -1)},
        doc="A new axis of size depth: values[1] at the index, values[0] elsewhere. Negative "
        "indices count from the end; one outside has no place.",
    ),
    OpDef(
        "nonzero",
        Kind.MOVEMENT,
        "x",
        _infer_nonzero,
        _nonzero,
        lambda: [
            sample(np.array([[1, 0], [0, 3]], np.float32)),
            sample(draw(2, 3, dtype="bool")),
            sample(np.array(5)),
            sample(draw(0, 3)),
        ],
        _INDICES,
        onnx="NonZero",
        doc="The coordinates of the elements that are not zero, one row for each axis.",
    ),
    OpDef(
        "unique",
        Kind.MOVEMENT,
        "x",
        _infer_unique,
        _unique,
        _unique_samples,
        grad=NonDifferentiable("which elements are equal depends on the data"),
        attrs={"axis": Attr("int", None), "sorted": Attr("bool", True)},
        doc="The distinct elements (or slices along an axis), sorted or in order, with the "
        "index of their first, for each element where it went, and how many there are.",
    ),
]
