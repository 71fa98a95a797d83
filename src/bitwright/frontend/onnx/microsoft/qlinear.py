"""Ops on codes, as ONNX Runtime's quantizer writes them in its operator form.

Each is quantize(op(dequantize(x), ...)): the real op between, so that optimization sees it. ONNX
Runtime computes several of them by tables or by merged scales; where a value lies on the border
between two codes, its answer may be the neighbour of ours.
"""

from __future__ import annotations

from collections.abc import Callable

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.context import Context, Inputs
from bitwright.frontend.onnx.microsoft.base import microsoft, required, scalar, standard
from bitwright.frontend.onnx.microsoft.nn import channels_first, channels_last
from bitwright.frontend.onnx.node import OnnxNode
from bitwright.frontend.onnx.registry import Results
from bitwright.ir import DType, Value

Function = Callable[[Value], Value]


def real(ctx: Context, x: Value, scale: Value, zero: Value | None) -> Value:
    """The numbers that codes stand for, with one scale for all of them."""
    if zero is not None and zero.dtype != x.dtype:
        raise ImportModelError("codes and zero point have two types", found=(x.type, zero.type))
    return ctx.b.dequantize(x, scalar(ctx, scale), scalar(ctx, zero))


def match_dequantize(
    ctx: Context, y: Value, scale: Value, zero: Value | None, element: DType
) -> Value:
    return ctx.b.quantize(y, scalar(ctx, scale), scalar(ctx, zero), to=element)


def _through(ctx: Context, inputs: Inputs, function: Function) -> Value:
    """A function of one operand: codes, scale and zero point, then those of the result."""
    x, x_scale, x_zero, y_scale, y_zero = (inputs[i] for i in range(5))
    if y_scale is None:
        raise ImportModelError("the scale of the result is left out")
    return match_dequantize(ctx, function(real(ctx, x, x_scale, x_zero)), y_scale, y_zero, x.dtype)


@microsoft("QLinearAdd", "QLinearMul", needs=2)
def qlinear_binary(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero = (inputs[i] for i in range(8))
    if b is None or b_scale is None or c_scale is None:
        raise ImportModelError("an operand or its scale is left out")
    op = "add" if node.op_type == "QLinearAdd" else "mul"
    y = ctx.b.op(op, real(ctx, a, a_scale, a_zero), real(ctx, b, b_scale, b_zero))
    return match_dequantize(ctx, y, c_scale, c_zero, a.dtype)


@microsoft("QLinearSigmoid", needs=2)
def qlinear_sigmoid(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _through(ctx, inputs, ctx.b.sigmoid)


@microsoft("QLinearLeakyRelu", needs=2)
def qlinear_leaky_relu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    alpha = node.number("alpha", 0.01)
    return _through(ctx, inputs, lambda x: ctx.b.leaky_relu(x, alpha=alpha))


@microsoft("QLinearSoftmax", needs=2)
def qlinear_softmax(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    version, axis = required(node, "opset"), node.integer("axis", -1)
    x, x_scale, x_zero, y_scale, y_zero = (inputs[i] for i in range(5))
    if y_scale is None:
        raise ImportModelError("the scale of the result is left out")
    y = standard(ctx, node, "Softmax", [real(ctx, x, x_scale, x_zero)], version, axis=axis)
    steps, one = _softmax_steps(ctx, y, scalar(ctx, y_scale))
    return match_dequantize(ctx, steps, one, y_zero, x.dtype)


@microsoft("QLinearReduceMean", needs=2)
def qlinear_reduce_mean(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _through(ctx, inputs, lambda x: standard(ctx, node, "ReduceMean", [x], 13))


@microsoft("QLinearAveragePool", needs=2)
def qlinear_average_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _pooled(ctx, node, inputs, "AveragePool", 11)


@microsoft("QLinearGlobalAveragePool", needs=2)
def qlinear_global_average_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _pooled(ctx, node, inputs, "GlobalAveragePool", 1)


def _pooled(ctx: Context, node: OnnxNode, inputs: Inputs, op_type: str, version: int) -> Value:
    x, *rest = inputs
    last = node.flag("channels_last")
    first = Inputs([channels_first(ctx, x) if last else x, *rest])
    y = _through(ctx, first, lambda x: standard(ctx, node, op_type, [x], version))
    return channels_last(ctx, y) if last else y


@microsoft("QLinearConcat", needs=5)
def qlinear_concat(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    y_scale, y_zero, *rest = inputs
    if len(rest) % 3 or None in rest:
        raise ImportModelError("its operands are not in threes", where=node.where)
    triples = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    parts = [real(ctx, x, scale, zero) for x, scale, zero in triples]
    return match_dequantize(
        ctx, ctx.b.concat(*parts, axis=required(node, "axis")), y_scale, y_zero, y_zero.dtype
    )


@microsoft("QLinearWhere", needs=9, most=9)
def qlinear_where(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero = inputs
    left, right = real(ctx, x, x_scale, x_zero), real(ctx, y, y_scale, y_zero)
    return match_dequantize(ctx, ctx.b.where(condition, left, right), z_scale, z_zero, x.dtype)


@microsoft("QLinearConv", needs=8)
def qlinear_conv(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, *rest = inputs
    last = node.flag("channels_last")
    y = standard(
        ctx, node, "QLinearConv", [channels_first(ctx, x) if last else x, *rest], version=10
    )
    return channels_last(ctx, y) if last else y


@microsoft("QuantizeLinear", "DequantizeLinear", needs=2)
def qdq(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return standard(ctx, node, node.op_type, inputs, version=21)


def _softmax_steps(ctx: Context, y: Value, scale: Value) -> tuple[Value, Value]:
    """A softmax in steps of its codes, and what one of them is in these: 1.

    ONNX Runtime takes floor(1 / scale) of them for the whole, so that 1 / 255, which is no f32
    number, makes 254. Its codes are at most one away from those that the scale says.
    """
    one = ctx.const(1, "f32")
    return ctx.b.mul(y, ctx.b.floor(ctx.b.div(one, scale))), one
