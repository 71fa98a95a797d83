"""Pooling over sliding windows, and the partial inverse of max pooling.

    max_pool   max over the window, ignoring padding; NaN propagates
    avg_pool   sum / count; count includes padding only with count_include_pad, and never pixels
               beyond the padding
    lp_pool    (sum of |x| ** p) ** (1 / p)

Indices of maxima are flat indices into the whole tensor (for storage_order 1, with the first
spatial axis fastest). The first of equal values is taken, as in ONNX and PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, cast

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dim import Size, max_size, product
from bitwright.ir.dtype import dtype, i64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.nn.windows import WINDOW_ATTRS, Windows, make_windows
from bitwright.ops.shape.gather import check_shape

POOL_ATTRS = {"kernel": Attr("ints"), **WINDOW_ATTRS, "ceil": Attr("bool", False)}


def infer_pool(x: TensorType, ceil: bool, **window: Any) -> TensorType:
    if x.rank < 3:
        raise InferenceError(
            "x has the wrong rank", expected="batch, channels and spatial axes", found=x
        )
    windows = make_windows(x.rank - 2, **window)
    return x.with_shape((*x.shape[:2], *windows.counts(x.shape[2:], ceil)))


def _infer_max(x: TensorType, **attrs: Any) -> TensorType:
    expect.real("x", x)
    return infer_pool(x, **attrs)


def _infer_float(x: TensorType, **attrs: Any) -> TensorType:
    expect.floating("x", x)
    attrs.pop("count_include_pad", None)
    if attrs.pop("p", 1) < 1:
        raise InferenceError("p is too small", expected="at least 1")
    return infer_pool(x, **attrs)


def _infer_indices(
    x: TensorType, storage_order: int, **attrs: Any
) -> tuple[TensorType, TensorType]:
    if storage_order not in (0, 1):
        raise InferenceError("storage_order is unknown", expected="0 or 1", found=storage_order)
    y = _infer_max(x, **attrs)
    return y, y.with_dtype(i64)


def arrange(shape: Sequence[int], ceil: bool, **window: Any) -> tuple[Windows, tuple[Any, ...]]:
    """The windows over an image of this shape, and their number along each axis."""
    windows = make_windows(len(shape) - 2, **window)
    return windows, windows.counts(shape[2:], ceil)


def _lowest(x: Array) -> float | int:
    """The padding value of a maximum: the lowest value of x's type."""
    element = dtype(x.dtype)
    return -np.inf if element.is_float else element.min


def _max_pool(x: Array, **attrs: Any) -> Array:
    windows, counts = arrange(x.shape, **attrs)
    return windows.reduce(windows.pad(wide(x), counts, _lowest(x)), counts, np.maximum)


def max_pool_indices(x: Array, storage_order: int, **attrs: Any) -> tuple[Array, Array]:
    windows, counts = arrange(x.shape, **attrs)
    padded = windows.pad(wide(x), counts, _lowest(x))
    places = windows.pad(_flat_places(x.shape, storage_order), counts, -1)
    best = np.full((*x.shape[:2], *counts), _lowest(x), padded.dtype)
    index = np.full(best.shape, -1, np.int64)
    for offsets in np.ndindex(*windows.kernel):
        value = windows.tap(padded, offsets, counts)
        place = windows.tap(places, offsets, counts)
        # the last NaN is taken, as in PyTorch; if all are -inf, the first pixel is taken
        wins = (value > best) | np.isnan(value) | (index < 0)
        wins &= place >= 0
        best = np.where(wins, value, best)
        index = np.where(wins, place, index)
    return best, index


def _flat_places(shape: tuple[int, ...], storage_order: int) -> Array:
    """The flat index of each element."""
    if storage_order == 0:
        return np.arange(int(np.prod(shape))).reshape(shape)
    reverse = np.arange(int(np.prod(shape))).reshape(*shape[:2], *shape[:1:-1])
    return np.transpose(reverse, (0, 1, *range(len(shape) - 1, 1, -1)))


def _avg_pool(x: Array, count_include_pad: bool, **attrs: Any) -> Array:
    windows, counts = arrange(x.shape, **attrs)
    total = windows.reduce(windows.pad(wide(x), counts, 0), counts, np.add)
    pixels = pixel_counts(windows, counts, x.shape[2:], count_include_pad)
    return np.asarray(np.where(pixels > 0, total / np.maximum(pixels, 1), 0))


def pixel_counts(
    windows: Windows, counts: Sequence[int], sizes: Sequence[int], include_pad: bool
) -> Array:
    """The number of pixels that each window averages: a product of counts per axis."""
    per_axis = []
    for axis, size in enumerate(sizes):
        begin, end = windows.begins[axis], windows.ends[axis]
        first, stop = (0, begin + size + end) if include_pad else (begin, begin + size)
        starts = np.arange(counts[axis])[:, None] * windows.strides[axis]
        taps = starts + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        per_axis.append(((taps >= first) & (taps < stop)).sum(axis=1))
    return np.asarray(reduce(np.multiply.outer, per_axis))


def _lp_pool(x: Array, p: int, **attrs: Any) -> Array:
    windows, counts = arrange(x.shape, **attrs)
    powers = np.abs(wide(x)) ** p
    return np.asarray(windows.reduce(windows.pad(powers, counts, 0), counts, np.add) ** (1 / p))


def _infer_unpool(x: TensorType, indices: TensorType, shape: Sequence[Size]) -> TensorType:
    expect.element("indices", indices, i64)
    expect.shape("indices", indices, x.shape)
    if len(shape) != x.rank:
        raise InferenceError("shape has the wrong rank", expected=x.rank, found=list(shape))
    return x.with_shape(shape)


def _unpool(x: Array, indices: Array, shape: Sequence[int]) -> Array:
    check_shape("indices", indices.shape, x.shape)
    result = np.zeros(int(np.prod(shape)), x.dtype)
    outside = (indices < 0) | (indices >= result.size)
    if outside.any():
        raise RunError(
            "an index is outside the result",
            expected=f"0 to {result.size - 1}",
            found=int(indices[outside][0]),
        )
    result[indices.reshape(-1)] = x.reshape(-1)
    return result.reshape(shape)


def _grad_max(b: Builder, node: Node, dys: list[Any]) -> list[Value]:
    """Of max_pool and max_pool_indices, whose indices are integers."""
    attrs = {name: value for name, value in node.attrs.items() if name in POOL_ATTRS}
    return [b.max_pool_backward(dys[0], node.inputs[0], **attrs)]


def _grad_avg(b: Builder, node: Node, dys: list[Any]) -> list[Value]:
    (x,) = node.operands
    return [b.avg_pool_backward(dys[0], shape=x.shape, **node.attrs)]


def _compose_lp(b: Builder, x: Value, p: int, ceil: bool, **window: Any) -> Value:
    """The p-th root of a sum over windows, which is a convolution with ones."""
    windows = make_windows(x.rank - 2, **window)
    counts = windows.counts(x.shape[2:], ceil)
    ends = windows.ends
    if ceil:  # the padding that the last window needs
        ends = tuple(
            max_size((count - 1) * stride + extent - size - begin, 0)
            for count, stride, extent, size, begin in zip(
                counts, windows.strides, windows.extents, x.shape[2:], windows.begins, strict=True
            )
        )
    ones = b.constant(np.ones((1, 1, *windows.kernel)), x.dtype)
    powers = b.reshape(b.pow(b.abs(x), float(p)), shape=(x.shape[0] * x.shape[1], 1, *x.shape[2:]))
    sums = b.conv(
        powers,
        ones,
        strides=windows.strides,
        pads=(*windows.begins, *ends),
        dilations=windows.dilations,
    )
    sums = b.reshape(sums, shape=(*x.shape[:2], *counts))
    is_zero = b.eq(sums, 0.0)
    root = b.pow(b.where(is_zero, 1.0, sums), 1 / p)
    return cast(Value, b.where(is_zero, 0.0, root))


def gather_flat(b: Builder, x: Value, indices: Value) -> Value:
    """The elements of x at flat indices."""
    return cast(Value, b.gather(b.reshape(x, shape=(product(x.shape),)), indices, axis=0))


def _samples(**more: Any) -> Callable[[], list[Sample]]:
    def make() -> list[Sample]:
        x = draw(2, 3, 7, 8)
        return [
            sample(x, kernel=(2, 3), **more),
            sample(x, kernel=(3, 2), strides=(2, 2), pads=(1, 0, 2, 1), **more),
            sample(x, kernel=(3, 3), strides=(2, 3), pads=(1, 1, 1, 1), ceil=True, **more),
            sample(x, kernel=(2, 2), dilations=(3, 2), strides=(2, 1), **more),
            sample(draw(1, 2, 9), kernel=(2,), strides=(2,), ceil=True, **more),
            sample(draw(1, 2, 4, 5, 4), kernel=(2, 2, 3), **more),
            sample(draw(0, 2, 5), kernel=(2,), **more),
            sample(draw(1, 2, 5, dtype="bf16"), kernel=(2,), tolerance=2e-2, **more),
        ]

    return make


def _max_samples() -> list[Sample]:
    return [
        *_samples()(),
        sample(draw(1, 2, 5, 5, dtype="i8", low=-128), kernel=(3, 3), pads=(1, 1, 1, 1)),
        sample(draw(1, 1, 2, 6, dtype="u8", low=0, high=255), kernel=(2, 2), strides=(2, 2)),
    ]


def _unpool_samples() -> list[Sample]:
    indices = np.array([[[[5, 7], [13, 15]]]])
    return [
        sample(draw(1, 1, 2, 2), indices, shape=(1, 1, 4, 4)),
        sample(draw(0, 1, 2), np.zeros((0, 1, 2), np.int64), shape=(0, 1, 4)),
    ]


OPDEFS = [
    OpDef(
        "max_pool",
        Kind.MOVEMENT,
        "x",
        infer=_infer_max,
        reference=_max_pool,
        grad=_grad_max,
        keeps_nonnegative=True,
        samples=_max_samples,
        attrs=POOL_ATTRS,
        doc="The largest value of each window, ignoring padding; NaN propagates.",
    ),
    OpDef(
        "max_pool_indices",
        Kind.MOVEMENT,
        "x",
        infer=_infer_indices,
        reference=max_pool_indices,
        grad=_grad_max,
        samples=lambda: [*_max_samples(), *_samples(storage_order=1)()],
        attrs={**POOL_ATTRS, "storage_order": Attr("int", 0)},
        doc="max_pool, and the flat index of each maximum.",
    ),
    OpDef(
        "avg_pool",
        Kind.REDUCTION,
        "x",
        infer=_infer_float,
        reference=_avg_pool,
        grad=_grad_avg,
        samples=lambda: [*_samples()(), *_samples(count_include_pad=True)()],
        attrs={**POOL_ATTRS, "count_include_pad": Attr("bool", False)},
        doc="The mean of each window, with or without its padding.",
    ),
    OpDef(
        "lp_pool",
        Kind.REDUCTION,
        "x",
        infer=_infer_float,
        reference=_lp_pool,
        grad=composed(_compose_lp),
        samples=lambda: [*_samples()(), *_samples(p=3)()],
        attrs={**POOL_ATTRS, "p": Attr("int", 2)},
        doc="The p-norm of each window.",
    ),
    OpDef(
        "max_unpool",
        Kind.MOVEMENT,
        "x, indices",
        infer=_infer_unpool,
        reference=_unpool,
        grad=lambda b, node, dys: [gather_flat(b, dys[0], node.inputs[1])],
        samples=_unpool_samples,
        attrs={"shape": Attr("sizes")},
        doc="Zeros of the given shape with each x at its flat index.",
    ),
]
