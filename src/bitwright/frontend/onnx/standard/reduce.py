"""Reductions over axes that are an attribute in older opsets and an operand in newer ones."""

from __future__ import annotations

from functools import partial

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, imports
from bitwright.frontend.onnx.runtime_axes import with_runtime_axes
from bitwright.ir import Value
from bitwright.ir.dim import product
from bitwright.ir.types import normalize_axis

_KINDS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2")
REDUCTIONS = {f"Reduce{kind}": f"reduce_{kind.lower()}" for kind in _KINDS}
REDUCTIONS |= {"ReduceSumSquare": "reduce_sum", "ReduceLogSum": "reduce_sum"}
REDUCTIONS |= {"ReduceLogSumExp": "reduce_log_sum_exp"}
SOFTMAXES = {"Softmax": "softmax", "LogSoftmax": "log_softmax", "Hardmax": "hardmax"}


@imports(*REDUCTIONS)
def reduce(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]

    def make(inner: Context, x: Value, axes: list[int]) -> Value:
        if not axes:
            if node.flag("noop_with_empty_axes"):
                return _without_axes(inner, node, x)
            axes = list(range(x.rank))
        axes = [normalize_axis(axis, x.rank) for axis in axes]
        x = inner.b.mul(x, x) if node.op_type == "ReduceSumSquare" else x
        keepdims = node.flag("keepdims", 1)
        y = inner.b.op(REDUCTIONS[node.op_type], x, axes=axes, keepdims=keepdims)
        return inner.b.log(y) if node.op_type == "ReduceLogSum" else y

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


def _softmax_like(op: str, ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    if node.version >= 13:
        return ctx.b.op(op, x, axis=node.integer("axis", -1))
    axis = normalize_axis(node.integer("axis", 1), max(x.rank, 1))
    if axis == x.rank - 1:
        return ctx.b.op(op, x, axis=-1)
    flat = ctx.reshape(x, [product(x.shape[:axis]), product(x.shape[axis:])])
    return ctx.reshape(ctx.b.op(op, flat, axis=-1), x.shape)


for _onnx_name, _op in SOFTMAXES.items():
    imports(_onnx_name)(partial(_softmax_like, _op))
