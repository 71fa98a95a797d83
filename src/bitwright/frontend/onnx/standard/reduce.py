"""Reductions over axes that are an attribute in older opsets and an operand in newer ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bitwright.frontend.onnx.mapping import Context, Inputs, OnnxNode, Results, imports
from bitwright.frontend.onnx.runtime_axes import with_runtime_axes
from bitwright.ir import Value
from bitwright.ir.dim import product
from bitwright.ir.types import normalize_axis

DIRECT = {
    "ReduceSum": "reduce_sum",
    "ReduceMean": "reduce_mean",
    "ReduceMax": "reduce_max",
    "ReduceMin": "reduce_min",
    "ReduceProd": "reduce_prod",
    "ReduceL1": "reduce_l1",
    "ReduceL2": "reduce_l2",
    "ReduceLogSumExp": "reduce_log_sum_exp",
}


def _reduce(op: str, ctx: Context, node: OnnxNode, x: Value, axes: list[int]) -> Value:
    return ctx.b.op(op, x, axes=axes, keepdims=node.flag("keepdims", 1))


def _sum_square(ctx: Context, node: OnnxNode, x: Value, axes: list[int]) -> Value:
    return _reduce("reduce_sum", ctx, node, ctx.b.mul(x, x), axes)


def _log_sum(ctx: Context, node: OnnxNode, x: Value, axes: list[int]) -> Value:
    return ctx.b.log(_reduce("reduce_sum", ctx, node, x, axes))


Reduce = Callable[[Context, OnnxNode, Value, list[int]], Value]


def _mapped(reduce: Reduce, ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]

    def make(inner: Context, x: Value, axes: list[int]) -> Value:
        if not axes:
            if node.flag("noop_with_empty_axes"):
                return _without_axes(inner, node, x)
            axes = list(range(x.rank))
        return reduce(inner, node, x, [normalize_axis(axis, x.rank) for axis in axes])

    if inputs[1] is None:
        return make(ctx, x, list(node.items("axes") or ()))
    return with_runtime_axes(ctx, x, inputs[1], x.rank, make)


def _without_axes(ctx: Context, node: OnnxNode, x: Value) -> Value:
    """A reduction over no axes, which applies the op's function to each element."""
    if node.op_type == "ReduceSumSquare":
        return ctx.b.mul(x, x)
    if node.op_type == "ReduceLogSum":
        return ctx.b.log(x)
    if node.op_type in ("ReduceL1", "ReduceL2"):
        return ctx.b.abs(x)
    return x


for _onnx_name, _op in DIRECT.items():
    imports(_onnx_name)(partial(_mapped, partial(_reduce, _op)))
imports("ReduceSumSquare")(partial(_mapped, _sum_square))
imports("ReduceLogSum")(partial(_mapped, _log_sum))


def _softmax_like(op: str, ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    if node.version >= 13:
        return ctx.b.op(op, x, axis=node.integer("axis", -1))
    axis = normalize_axis(node.integer("axis", 1), max(x.rank, 1))
    if axis == x.rank - 1:
        return ctx.b.op(op, x, axis=-1)
    flat = ctx.reshape(x, [product(x.shape[:axis]), product(x.shape[axis:])])
    return ctx.reshape(ctx.b.op(op, flat, axis=-1), x.shape)


for _onnx_name, _op in (
    ("Softmax", "softmax"),
    ("LogSoftmax", "log_softmax"),
    ("Hardmax", "hardmax"),
):
    imports(_onnx_name)(partial(_softmax_like, _op))
