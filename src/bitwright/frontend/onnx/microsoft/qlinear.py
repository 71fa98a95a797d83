"""Quantized ops of the QOperator format of ONNX Runtime's quantizer.

Each becomes quantize(op(dequantize(x), ...)), which later passes lower to integers. ONNX Runtime
computes several of them with tables or merged scales, so a value that is halfway between two
quantized values may round the other way.
"""

from __future__ import annotations

from collections.abc import Callable

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, required, scalar, single, standard
from bitwright.frontend.onnx.microsoft.nn import channels_first, channels_last
from bitwright.ir import DType, Value

Function = Callable[[Value], Value]


def dequantize(ctx: Context, x: Value, scale: Value, zero: Value | None) -> Value:
    """The dequantized value, with one scale."""
    if zero is not None and zero.dtype != x.dtype:
        raise ImportModelError(
            "the quantized values and their zero point have different types",
            found=(x.type, zero.type),
        )
    return ctx.b.dequantize(x, scalar(ctx, scale), scalar(ctx, zero))


def quantize(ctx: Context, y: Value, scale: Value, zero: Value | None, element: DType) -> Value:
    return ctx.b.quantize(y, scalar(ctx, scale), scalar(ctx, zero), to=element)


def _apply_unary(ctx: Context, inputs: Inputs, function: Function) -> Value:
    """A unary function; `inputs` are x, its scale and zero point, then those of the result."""
    x, x_scale, x_zero, y_scale, y_zero = (inputs[i] for i in range(5))
    if y_scale is None:
        raise ImportModelError("the scale of the result is missing")
    return quantize(ctx, function(dequantize(ctx, x, x_scale, x_zero)), y_scale, y_zero, x.dtype)


@microsoft("QLinearAdd", "QLinearMul", needs=2)
def qlinear_binary(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero = (inputs[i] for i in range(8))
    if b is None or b_scale is None or c_scale is None:
        raise ImportModelError("an operand or its scale is missing")
    op = "add" if node.op_type == "QLinearAdd" else "mul"
    y = ctx.b.op(op, dequantize(ctx, a, a_scale, a_zero), dequantize(ctx, b, b_scale, b_zero))
    return quantize(ctx, y, c_scale, c_zero, a.dtype)


@microsoft("QLinearSigmoid", needs=2)
def qlinear_sigmoid(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _apply_unary(ctx, inputs, ctx.b.sigmoid)


@microsoft("QLinearLeakyRelu", needs=2)
def qlinear_leaky_relu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    alpha = node.number("alpha", 0.01)
    return _apply_unary(ctx, inputs, lambda x: ctx.b.leaky_relu(x, alpha=alpha))


@microsoft("QLinearSoftmax", needs=2)
def qlinear_softmax(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    version, axis = required(node, "opset"), node.integer("axis", -1)
    x, x_scale, x_zero, y_scale, y_zero = (inputs[i] for i in range(5))
    if y_scale is None:
        raise ImportModelError("the scale of the result is missing")
    wide = dequantize(ctx, x, x_scale, x_zero)
    y = single(standard(ctx, node, "Softmax", [wide], version, axis=axis))
    scaled, one = _scaled_softmax(ctx, y, ctx.reshape(y_scale, []))
    return quantize(ctx, scaled, one, y_zero, x.dtype)


@microsoft("QLinearReduceMean", needs=2)
def qlinear_reduce_mean(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _apply_unary(ctx, inputs, lambda x: single(standard(ctx, node, "ReduceMean", [x], 13)))


@microsoft("QLinearAveragePool", needs=2)
def qlinear_average_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _pool(ctx, node, inputs, "AveragePool", 11)


@microsoft("QLinearGlobalAveragePool", needs=2)
def qlinear_global_average_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _pool(ctx, node, inputs, "GlobalAveragePool", 1)


def _pool(ctx: Context, node: OnnxNode, inputs: Inputs, op_type: str, version: int) -> Value:
    x, *rest = inputs
    last = node.flag("channels_last")
    first = Inputs([channels_first(ctx, x) if last else x, *rest])
    y = _apply_unary(ctx, first, lambda x: single(standard(ctx, node, op_type, [x], version)))
    return channels_last(ctx, y) if last else y


@microsoft("QLinearConcat", needs=5)
def qlinear_concat(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    y_scale, y_zero, *rest = inputs
    if len(rest) % 3 or None in rest:
        raise ImportModelError("the number of its operands is no multiple of 3", where=node.where)
    triples = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    parts = [dequantize(ctx, x, scale, zero) for x, scale, zero in triples]
    return quantize(
        ctx, ctx.b.concat(*parts, axis=required(node, "axis")), y_scale, y_zero, y_zero.dtype
    )


@microsoft("QLinearWhere", needs=9, most=9)
def qlinear_where(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero = inputs
    left, right = dequantize(ctx, x, x_scale, x_zero), dequantize(ctx, y, y_scale, y_zero)
    return quantize(ctx, ctx.b.where(condition, left, right), z_scale, z_zero, x.dtype)


@microsoft("QLinearConv", needs=8)
def qlinear_conv(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, *rest = inputs
    last = node.flag("channels_last")
    y = standard(
        ctx, node, "QLinearConv", [channels_first(ctx, x) if last else x, *rest], version=10
    )
    return channels_last(ctx, single(y)) if last else y


@microsoft("QuantizeLinear", "DequantizeLinear", needs=2)
def qdq(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return standard(ctx, node, node.op_type, inputs, version=21)


def _scaled_softmax(ctx: Context, y: Value, scale: Value) -> tuple[Value, Value]:
    """A softmax in units of its scale, and that unit: 1.

    ONNX Runtime scales by floor(1 / scale), which is 254 for the scale 1 / 255 rounded to f32. Its
    quantized values differ by at most 1 from the exact ones.
    """
    one = ctx.const(1, "f32")
    return ctx.b.mul(y, ctx.b.floor(ctx.b.div(one, scale))), one
