"""Gather, scatter, selection and ranges."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, imports
from bitwright.frontend.onnx.runtime_axes import with_runtime_axes
from bitwright.frontend.onnx.table import imports_table
from bitwright.ir import Size, Value
from bitwright.ir.dim import max_size
from bitwright.ir.types import normalize_axis

_ARG_DEFAULTS = {"axis": 0, "keepdims": True, "select_last_index": False}
imports_table(
    {
        "Gather": ("gather", {"axis": 0}),
        "GatherElements": ("gather_elements", {"axis": 0}),
        "Scatter": ("scatter_elements", {"axis": 0, "reduction": "none"}),
        "ScatterElements": ("scatter_elements", {"axis": 0, "reduction": "none"}),
        "TensorScatter": ("tensor_scatter", {"axis": -2, "mode": "linear"}),
        "Compress": ("compress", {"axis": None}),
        "Unique": ("unique", {"axis": None, "sorted": True}),
        "ReverseSequence": ("reverse_sequence", {"batch_axis": 1, "time_axis": 0}),
        "ArgMax": ("argmax", _ARG_DEFAULTS),
        "ArgMin": ("argmin", _ARG_DEFAULTS),
    }
)


@imports("GatherND")
def gather_nd(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    ctx.length(inputs[1], -1)
    return ctx.b.gather_nd(*inputs, batch_dims=node.integer("batch_dims", 0))


@imports("ScatterND")
def scatter_nd(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    ctx.length(inputs[1], -1)
    return ctx.b.scatter_nd(*inputs, reduction=node.text("reduction", "none"))


@imports("TopK")
def top_k(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, k = inputs[0], inputs[1]
    attrs = {
        "axis": node.integer("axis", -1),
        "largest": node.flag("largest", 1),
        "sorted": node.flag("sorted", 1),
    }
    if node.version < 10:
        return list(ctx.b.top_k(x, k=node.require("k"), **attrs))
    sizes = ctx.sizes(k, x)
    if sizes is not None:
        return list(ctx.b.top_k(x, k=sizes[0], **attrs))
    return list(ctx.b.top_k(x, ctx.reshape(k, []), **attrs))


@imports("OneHot")
def one_hot(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    indices, depth, values = inputs
    axis = node.integer("axis", -1)
    indices = ctx.cast(indices, "i64")
    count = ctx.cast(depth, "i64")
    sizes = ctx.sizes(count, indices)
    if sizes is not None:
        return ctx.b.one_hot(indices, values, depth=sizes[0], axis=axis)
    return ctx.b.one_hot(indices, values, ctx.reshape(count, []), axis=axis)


@imports("CumSum", "CumProd")
def cumulative(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, axis = inputs
    how: dict[str, Any] = {"exclusive": node.flag("exclusive"), "reverse": node.flag("reverse")}

    def make(inner: Context, x: Value, places: list[int]) -> Value:
        (place,) = places
        axis = normalize_axis(place, x.rank)
        return inner.b.op(node.op_type.lower(), x, axis=axis, **how)

    return with_runtime_axes(ctx, x, axis, x.rank, make)


@imports("Range")
def range_(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    start, limit, delta = (ctx.reshape(x, []) for x in inputs)
    if start.dtype.is_integer:
        known = [sizes[0] for x in (start, limit, delta) if (sizes := ctx.sizes(x)) is not None]
        if len(known) == 3 and isinstance(known[2], int):
            return _integer_range(ctx, start, known[0], known[1], known[2])
    arrays = [a for x in (start, limit, delta) if (a := ctx.array(x)) is not None]
    if len(arrays) == 3 and not start.dtype.is_integer:
        first, last, step = (Fraction(float(array)) for array in arrays)
        count = max(-((first - last) // step), 0) if step else 0
        return _float_range(ctx, inputs, int(count))
    return ctx.b.range(start, limit, delta)


def _integer_range(ctx: Context, start: Value, first: Size, last: Size, step: int) -> Value:
    if step == 0:
        raise ImportModelError("its step is 0")
    span = last - first if step > 0 else first - last
    length = max_size((span + abs(step) - 1) // abs(step), 0)
    steps = ctx.b.iota(length=length, dtype=start.dtype)
    if step != 1:
        steps = ctx.b.mul(steps, ctx.like(steps, step))
    return steps if first == 0 else ctx.b.add(steps, start)


def _float_range(ctx: Context, inputs: Inputs, count: int) -> Value:
    start, _, delta = (ctx.reshape(x, []) for x in inputs)
    steps = ctx.cast(ctx.b.iota(length=count, dtype="i64"), start.dtype)
    return ctx.b.add(ctx.b.mul(steps, delta), start)


def counting(ctx: Context, count: Value) -> Value:
    """0, 1, … below a scalar, in i64."""
    sizes = ctx.sizes(count)
    if sizes is not None:
        return ctx.b.iota(length=sizes[0], dtype="i64")
    return ctx.b.range(ctx.const(0), ctx.cast(count, "i64"), ctx.const(1))


@imports("NonMaxSuppression")
def non_max_suppression(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    boxes, scores, *limits = inputs
    scalars = [None if x is None else ctx.reshape(x, []) for x in limits]
    centered = node.flag("center_point_box")
    return ctx.b.non_max_suppression(boxes, scores, *scalars, center_point_box=centered)
