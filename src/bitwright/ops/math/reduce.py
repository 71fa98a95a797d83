"""Reductions over axes.

A reduction of no elements gives the identity: sum 0, product 1, max the lowest value (-inf for
floats), min the highest, log-sum-exp -inf. The mean of no elements is an error for integers and NaN
for floats. NaN propagates in max and min.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bitwright.errors import RunError
from bitwright.ir.dim import max_size, min_size, product
from bitwright.ir.dtype import DType, bool_, dtype, f32, f64
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import conjugate, reciprocal_of_size, where_or_zero
from bitwright.ops.core.gradients import axes_of
from bitwright.ops.core.inference import reduced_shape
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.core.symbolic import on_elements
from bitwright.ops.math.arithmetic import divide

Axes = tuple[int, ...]


def is_ordered(element: DType) -> bool:
    return element.is_float or element.is_integer or element == bool_


def _infer(x: TensorType, axes: Sequence[int], keepdims: bool) -> TensorType:
    expect.number("x", x)
    return x.with_shape(reduced_shape(x.shape, axes, keepdims))


def _infer_real(x: TensorType, **attrs: Any) -> TensorType:
    expect.real("x", x)
    return _infer(x, **attrs)


def _infer_extreme(x: TensorType, axes: Sequence[int], keepdims: bool) -> TensorType:
    expect.dtype("x", x, is_ordered, "a real number type or bool")
    return x.with_shape(reduced_shape(x.shape, axes, keepdims))


def _max(x: Array, axes: Axes, keepdims: bool) -> Any:
    element = dtype(x.dtype)
    lowest = -np.inf if element.is_float else element.min
    return np.max(wide(x), axis=axes, keepdims=keepdims, initial=lowest)


def _min(x: Array, axes: Axes, keepdims: bool) -> Any:
    element = dtype(x.dtype)
    highest = np.inf if element.is_float else element.max
    return np.min(wide(x), axis=axes, keepdims=keepdims, initial=highest)


def _mean(x: Array, axes: Axes, keepdims: bool) -> Any:
    total = np.sum(wide(x), axis=axes, keepdims=keepdims)
    count = np.prod([x.shape[axis] for axis in axes], dtype=np.int64)
    if dtype(x.dtype).is_integer:
        if not count:
            raise RunError("the mean of no integers is not defined")
        return divide(total, count.astype(total.dtype))
    return np.divide(total, count)


def _l2(x: Array, axes: Axes, keepdims: bool) -> Any:
    magnitude = np.abs(wide(x)).astype(np.float64)
    return np.sqrt(np.sum(magnitude**2, axis=axes, keepdims=keepdims))


def log_sum_exp(x: Array, axes: Axes, keepdims: bool) -> Array:
    """log(sum(exp(x))) without overflow; infinities give the same result as the formula."""
    values = wide(x).astype(np.float64)
    top = np.max(values, axis=axes, keepdims=True, initial=-np.inf)
    shift = np.where(np.isfinite(top), top, 0)
    total = np.log(np.sum(np.exp(values - shift), axis=axes, keepdims=True)) + shift
    return np.asarray(total if keepdims else np.squeeze(total, axis=tuple(axes)))


def _extreme_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reduction of sizes by `function`, axis by axis."""
    ufunc = np.frompyfunc(function, 2, 1)

    def reduce_sizes(x: Array, axes: Axes, keepdims: bool) -> Any:
        for axis in sorted((normalize_axis(axis, x.ndim) for axis in axes), reverse=True):
            x = np.asarray(ufunc.reduce(x, axis=axis, keepdims=keepdims), dtype=object)
        return x

    return reduce_sizes


def _samples() -> list[Sample]:
    x = draw(3, 4, 5)
    return [
        sample(x, axes=(1,)),
        sample(x, axes=(0, -1), keepdims=False),
        sample(x, axes=(0, 1, 2), keepdims=False),
        sample(x, axes=()),
        sample(draw(), axes=()),
        sample(draw(4, 3, dtype="f64"), axes=(0,)),
        sample(draw(4, 3, dtype="bf16"), axes=(0,), tolerance=2e-2),
        sample(draw(2, 3, dtype="i64", low=-9, high=9), axes=(1,)),
        sample(draw(2, 3, dtype="u8", low=1, high=9), axes=(0,), keepdims=False),
    ]


def _extreme_samples(element: str) -> list[Sample]:
    more = draw(2, 0), draw(2, 0, dtype=element), draw(2, 3, dtype="bool")
    return [*_samples(), *(sample(x, axes=(1,)) for x in more)]


def _op(name: str, reference: Callable[..., Any], **rest: Any) -> OpDef:
    sizes = rest.pop("sizes", None)
    rest.setdefault("infer", _infer)
    rest.setdefault("samples", lambda: [*_samples(), sample(draw(2, 0, 3), axes=(1,))])
    return OpDef(
        name,
        Kind.REDUCTION,
        "x",
        reference=reference,
        attrs={"axes": Attr("ints"), "keepdims": Attr("bool", True)},
        sizes=on_elements(sizes) if sizes else None,
        **rest,
    )


def _wide_op(name: str, function: Callable[..., Any], **rest: Any) -> OpDef:
    def compute(x: Array, axes: Axes, keepdims: bool) -> Any:
        return function(wide(x), axis=axes, keepdims=keepdims)

    def of_sizes(x: Array, axes: Axes, keepdims: bool) -> Any:
        return np.asarray(function(x, axis=axes, keepdims=keepdims), dtype=object)

    return _op(name, compute, sizes=of_sizes, **rest)


def _grad_sum(b: Builder, node: Node, dys: list[Any]) -> list[Any]:
    return [spread(b, node, dys[0])]


def spread(b: Builder, node: Node, dy: Value) -> Value:
    """The gradient of a reduction's result, expanded to the shape of its operand."""
    (x,) = node.operands
    axes = axes_of(x.rank, node.attrs["axes"])
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    if not node.attrs["keepdims"]:
        dy = b.reshape(dy, shape=shape)
    return dy if shape == x.shape else b.expand(dy, shape=x.shape)


def _grad_mean(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    (x,) = node.operands
    axes = axes_of(x.rank, node.attrs["axes"])
    return [spread(b, node, b.mul(dys[0], reciprocal_of_size(b, x, axes)) if axes else dys[0])]


def _grad_prod(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy times the product of the other elements: of those before times of those after."""
    (x,) = node.operands
    axes = axes_of(x.rank, node.attrs["axes"])
    kept = [axis for axis in range(x.rank) if axis not in axes]
    perm = (*kept, *axes)
    turned = b.transpose(x, perm=perm)
    rows = b.reshape(
        turned, shape=(*(x.shape[a] for a in kept), product([x.shape[a] for a in axes]))
    )
    before = b.cumprod(rows, axis=-1, exclusive=True)
    after = b.cumprod(rows, axis=-1, exclusive=True, reverse=True)
    others = b.reshape(b.mul(before, after), shape=turned.shape)
    back = tuple(perm.index(axis) for axis in range(x.rank))
    return [b.mul(spread(b, node, dys[0]), conjugate(b, b.transpose(others, perm=back)))]


def _grad_extreme(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy, divided evenly among equal extremes, as PyTorch's amax and amin."""
    (x,) = node.operands
    is_extreme = b.eq(x, spread(b, node, node.outputs[0]))
    element = f64 if x.dtype.bits >= 64 else f32  # narrow types cannot count
    ties = b.reduce_sum(b.cast(is_extreme, to=element), **node.attrs)
    if element != x.dtype:
        ties = b.cast(ties, to=x.dtype)
    return [where_or_zero(b, is_extreme, spread(b, node, b.div(dys[0], ties)))]


def _grad_l1(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.mul(spread(b, node, dys[0]), b.sign(node.inputs[0]))]


def _grad_l2(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy * x / y, and 0 where y is 0."""
    y = node.outputs[0]
    is_zero = b.eq(y, 0.0)
    ratio = b.div(b.where(is_zero, 0.0, dys[0]), b.where(is_zero, 1.0, y))
    return [b.mul(node.inputs[0], spread(b, node, ratio))]


def _grad_log_sum_exp(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy * exp(x - y); y is -inf for elements that are all -inf, which get 0."""
    y = node.outputs[0]
    finite = b.where(b.eq(y, -math.inf), 0.0, y)
    share = b.exp(b.sub(node.inputs[0], spread(b, node, finite)))
    return [b.mul(spread(b, node, dys[0]), share)]


OPDEFS = [
    _wide_op("reduce_sum", np.sum, grad=_grad_sum, reads_cast=True, doc="The sum over axes."),
    _wide_op("reduce_prod", np.prod, grad=_grad_prod, doc="The product over axes."),
    _op(
        "reduce_mean",
        _mean,
        grad=_grad_mean,
        samples=_samples,
        reads_cast=True,
        keeps_nonnegative=True,
        doc="The mean over axes; of integers, truncated towards zero.",
    ),
    _op(
        "reduce_max",
        _max,
        infer=_infer_extreme,
        sizes=_extreme_sizes(max_size),
        grad=_grad_extreme,
        reads_cast=True,
        keeps_nonnegative=True,
        samples=lambda: _extreme_samples("i32"),
        doc="The largest value over axes; NaN propagates.",
    ),
    _op(
        "reduce_min",
        _min,
        infer=_infer_extreme,
        sizes=_extreme_sizes(min_size),
        grad=_grad_extreme,
        reads_cast=True,
        samples=lambda: _extreme_samples("u64"),
        doc="The smallest value over axes; NaN propagates.",
    ),
    _op(
        "reduce_l1",
        lambda x, axes, keepdims: np.sum(np.abs(wide(x)), axis=axes, keepdims=keepdims),
        infer=_infer_real,
        grad=_grad_l1,
        doc="The sum of magnitudes over axes.",
    ),
    _op(
        "reduce_l2",
        _l2,
        infer=_infer_real,
        grad=_grad_l2,
        doc="The square root of the sum of squares over axes.",
    ),
    _op(
        "reduce_log_sum_exp",
        log_sum_exp,
        infer=_infer_real,
        grad=_grad_log_sum_exp,
        doc="log(sum(exp(x))) over axes, without overflow.",
    ),
]
