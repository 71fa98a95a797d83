"""Activations with their bias, and arithmetic that exporters fuse.

Gelu      x * (1 + erf(x / sqrt 2)) / 2
FastGelu  the same by tanh
QuickGelu x * sigmoid(alpha * x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, refuse, scalar, standard
from bitwright.frontend.onnx.standard.quant import centred
from bitwright.ir import Value
from bitwright.ir.dim import product
from bitwright.ir.types import normalize_axis

Activation = Callable[[Context, Value, Sequence[float]], Value]


def _plain(op: str) -> Activation:
    return lambda ctx, x, numbers: ctx.b.op(op, x)


def _with(op: str, *names: str) -> Activation:
    """An activation whose parameters, if given, are these attributes."""

    def activation(ctx: Context, x: Value, numbers: Sequence[float]) -> Value:
        attrs: dict[str, Any] = dict(zip(names, numbers, strict=False))
        return ctx.b.op(op, x, **attrs)

    return activation


def _clip(ctx: Context, x: Value, numbers: Sequence[float]) -> Value:
    low, high = (*numbers, *(None, None))[:2]
    bounds = [None if bound is None else ctx.like(x, bound) for bound in (low, high)]
    return x if bounds == [None, None] else ctx.b.clip(x, *bounds)


def _scaled_tanh(ctx: Context, x: Value, numbers: Sequence[float]) -> Value:
    """alpha * tanh(beta * x)"""
    alpha, beta = numbers
    return ctx.b.mul(ctx.b.tanh(ctx.b.mul(x, ctx.like(x, beta))), ctx.like(x, alpha))


def _parametric_softplus(ctx: Context, x: Value, numbers: Sequence[float]) -> Value:
    """alpha * log(1 + exp(beta * x))"""
    alpha, beta = numbers
    return ctx.b.mul(ctx.b.softplus(ctx.b.mul(x, ctx.like(x, beta))), ctx.like(x, alpha))


ACTIVATIONS: dict[str, Activation] = {
    "Relu": _plain("relu"),
    "Sigmoid": _plain("sigmoid"),
    "Tanh": _plain("tanh"),
    "Softplus": _plain("softplus"),
    "Softsign": _plain("softsign"),
    "HardSwish": _plain("hard_swish"),
    "Gelu": _plain("gelu"),
    "LeakyRelu": _with("leaky_relu", "alpha"),
    "Elu": _with("elu", "alpha"),
    "ThresholdedRelu": _with("thresholded_relu", "alpha"),
    "Selu": _with("selu", "alpha", "gamma"),
    "HardSigmoid": _with("hard_sigmoid", "alpha", "beta"),
    "Clip": _clip,
    "ScaledTanh": _scaled_tanh,
    "ParametricSoftplus": _parametric_softplus,
}


def activate(ctx: Context, node: OnnxNode, x: Value, name: str, numbers: Sequence[float]) -> Value:
    """The activation of a fused op; x itself if the name is empty."""
    if not name:
        return x
    if name not in ACTIVATIONS:
        raise refuse(node, f"its activation {name!r} is not known")
    return ACTIVATIONS[name](ctx, x, numbers)


@microsoft("Gelu")
def gelu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.gelu(inputs[0])


@microsoft("BiasGelu", needs=2)
def bias_gelu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.gelu(ctx.b.add(inputs[0], inputs[1]))


@microsoft("FastGelu")
def fast_gelu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, bias = inputs[0], inputs[1]
    return ctx.b.gelu(x if bias is None else ctx.b.add(x, bias), approximate="tanh")


@microsoft("QuickGelu")
def quick_gelu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.quick_gelu(inputs[0], alpha=node.number("alpha", 1.702))


@microsoft("ScaledSiLU")
def scaled_silu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, scale = inputs[0], inputs[1]
    if scale is None:
        factor = ctx.like(x, node.number("alpha", 1.0))
    else:
        factor = ctx.reshape(ctx.cast(scale, x.dtype), [])
    return ctx.b.silu(ctx.b.mul(x, factor))


@microsoft("BiasSplitGelu", needs=2)
def bias_split_gelu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """The first half of the features times gelu of the second half."""
    total = ctx.b.add(inputs[0], inputs[1])
    features = total.shape[-1]
    half = features // 2
    left, right = ctx.b.split(total, axis=-1, sizes=(half, features - half))
    return ctx.b.mul(left, ctx.b.gelu(right))


@microsoft("BiasAdd", needs=3, most=3)
def bias_add(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, bias, skip = inputs
    return ctx.b.add(ctx.b.add(x, bias), skip)


@microsoft("GatedAdd", needs=3, most=3)
def gated_add(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, y, gate = inputs
    return ctx.b.add(x, ctx.b.mul(y, gate))


@microsoft("BiasSoftmax", needs=2, most=2)
def bias_softmax(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """softmax(x + bias) over all axes from `axis` on together.

    The bias has all of those axes. Of the axes before, it may omit the first ones (outer
    broadcast) or have size 1 in the last ones (inner broadcast), which its rank distinguishes.
    """
    x, bias = inputs
    axis = normalize_axis(node.integer("axis", 1), x.rank)
    total = ctx.b.add(x, bias)
    if axis == x.rank - 1:
        return ctx.b.softmax(total, axis=-1)
    flat = ctx.reshape(total, [product(x.shape[:axis]), product(x.shape[axis:])])
    return ctx.reshape(ctx.b.softmax(flat, axis=-1), x.shape)


@microsoft("BiasDropout", "BitmaskBiasDropout", needs=2)
def bias_dropout(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, bias, residual = inputs[0], inputs[1], inputs[2]
    _require_inference(ctx, node, inputs[4])
    total = ctx.b.add(x, bias)
    return [total if residual is None else ctx.b.add(total, residual)]


@microsoft("BitmaskDropout")
def bitmask_dropout(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    _require_inference(ctx, node, inputs[2])
    return [inputs[0]]


def _require_inference(ctx: Context, node: OnnxNode, training: Value | None) -> None:
    if node.has_output(1):
        raise refuse(node, "the mask of a dropout is an output")
    if training is not None and ctx.need_array(training, "the training mode").any():
        raise refuse(node, "dropout in training mode is random")


@microsoft("ComplexMul", "ComplexMulConj", needs=2, most=2)
def complex_mul(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """Products of complex numbers; real and imaginary parts are a last axis of size 2."""
    (a, b), (c, d) = (ctx.b.split(x, axis=-1, sizes=(1, 1)) for x in inputs)
    if node.op_type == "ComplexMulConj":
        d = ctx.b.neg(d)
    real = ctx.b.sub(ctx.b.mul(a, c), ctx.b.mul(b, d))
    imaginary = ctx.b.add(ctx.b.mul(a, d), ctx.b.mul(b, c))
    return ctx.b.concat(real, imaginary, axis=-1)


@microsoft("IsAllFinite")
def is_all_finite(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    nan_only, inf_only = node.flag("isnan_only"), node.flag("isinf_only")
    if nan_only and inf_only:
        raise ImportModelError("has both isnan_only and isinf_only", where=node.where)
    answers = []
    for x in inputs:
        if nan_only or inf_only:
            bad = ctx.b.op("is_nan" if nan_only else "is_inf", x)
            good = ctx.b.not_(bad)
        else:
            good = ctx.b.is_finite(x)
        counts = ctx.b.reduce_min(ctx.cast(good, "i32"), axes=range(x.rank), keepdims=False)
        answers.append(ctx.cast(counts, "bool"))
    result = answers[0]
    for answer in answers[1:]:
        result = ctx.b.and_(result, answer)
    return result


@microsoft("MulInteger", needs=3)
def mul_integer(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, x_zero, y, y_zero = (inputs[i] for i in range(4))
    left, right = centred(ctx, x, scalar(ctx, x_zero)), centred(ctx, y, scalar(ctx, y_zero))
    return ctx.b.mul(left, right)


# ops that old versions of ONNX and ONNX Runtime kept in the default domain


@microsoft("Affine", domain="")
def affine(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    scaled = ctx.b.mul(x, ctx.like(x, node.number("alpha", 1.0)))
    return ctx.b.add(scaled, ctx.like(x, node.number("beta", 0.0)))


@microsoft("ScaledTanh", "ParametricSoftplus", domain="")
def two_parameters(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    numbers = node.number("alpha", 1.0), node.number("beta", 1.0)
    return ACTIVATIONS[node.op_type](ctx, inputs[0], numbers)


@microsoft("Scale", domain="")
def scale(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.mul(inputs[0], ctx.like(inputs[0], node.number("scale", 1.0)))


@microsoft("ImageScaler", domain="")
def image_scaler(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """scale * x + bias, the bias for each channel"""
    x, bias = inputs[0], node.items("bias", [])
    y = ctx.b.mul(x, ctx.like(x, node.number("scale", 1.0)))
    if not bias:
        return y
    return ctx.b.add(y, ctx.reshape(ctx.const(bias, x.dtype), [len(bias), 1, 1]))


@microsoft("DynamicSlice", needs=3, domain="")
def dynamic_slice(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return standard(ctx, node, "Slice", inputs, version=10)
