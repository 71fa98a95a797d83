"""Arithmetic, comparisons, activations and casts."""

from __future__ import annotations

from functools import partial

import numpy as np
from onnx import TensorProto

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.table import imports_table
from bitwright.frontend.onnx.tensor import element_type
from bitwright.ir import DType, Value
from bitwright.ops.core.registry import get

BINARY = ("add", "sub", "mul", "div", "and", "or", "xor", "eq", "gt", "lt")
CHAINS = {"Sum": "add", "Max": "maximum", "Min": "minimum"}

imports_table(
    {
        "Elu": ("elu", {"alpha": 1.0}),
        "Celu": ("celu", {"alpha": 1.0}),
        "LeakyRelu": ("leaky_relu", {"alpha": 0.01}),
        "ThresholdedRelu": ("thresholded_relu", {"alpha": 1.0}),
        "Swish": ("swish", {"alpha": 1.0}),
        "HardSigmoid": ("hard_sigmoid", {"alpha": 0.2, "beta": 0.5}),
        "Shrink": ("shrink", {"lambd": 0.5, "bias": 0.0}),
        "Gelu": ("gelu", {"approximate": "none"}),
        "IsInf": ("is_inf", {"detect_positive": True, "detect_negative": True}),
        "Mod": ("mod", {"fmod": False}),
    }
)


def aligned(ctx: Context, node: OnnxNode, x: Value, y: Value) -> Value:
    """The second operand for opsets below 7, where its axes align with `axis` of the first."""
    axis = node.integer("axis")
    if node.version >= 7 or not node.flag("broadcast") or axis is None:
        return y
    trailing = x.rank - axis % max(x.rank, 1) - y.rank
    return ctx.reshape(y, [*y.shape, *([1] * trailing)]) if trailing > 0 else y


def _binary(op: str, ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, y = inputs
    return ctx.b.op(op, x, aligned(ctx, node, x, y))


for _op in BINARY:
    imports(get(_op).onnx)(partial(_binary, _op))


@imports("Pow")
def pow_(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, y = inputs
    y = aligned(ctx, node, x, y)
    if x.dtype.is_integer and y.dtype.is_float:
        return ctx.cast(ctx.b.pow(ctx.cast(x, "f64"), ctx.cast(y, "f64")), x.dtype)
    return ctx.b.pow(x, ctx.cast(y, x.dtype))


def _chain(op: str, ctx: Context, node: OnnxNode, inputs: Inputs) -> Value:
    total: Value = inputs[0]
    for x in inputs[1:]:
        total = ctx.b.op(op, total, x)
    return total


for _onnx_name, _op in CHAINS.items():
    imports(_onnx_name)(partial(_chain, _op))


@imports("Mean")
def mean(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    total = _chain("add", ctx, node, inputs)
    return ctx.b.div(total, ctx.like(total, len(inputs)))


@imports("Identity")
def identity(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return [inputs[0]]


@imports("Dropout")
def dropout(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, ratio, training = inputs[0], inputs[1], inputs[2]
    if node.version >= 12 and training is not None:
        mode, rate = ctx.array(training), ctx.array(ratio)
        drops = 0.5 if ratio is None else rate
        if mode is None or (mode.any() and (drops is None or np.any(drops != 0))):
            raise UnmappedError("dropout in training mode is random")
    mask = None
    if node.has_output(1):
        mask = ctx.full_like(x, 1, "bool" if node.version >= 10 else x.dtype)
    return [x, mask]


@imports("Clip")
def clip(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, low, high = inputs[0], inputs[1], inputs[2]
    if node.version < 11:
        bounds = (node.number("min"), node.number("max"))
        low, high = (None if bound is None else ctx.like(x, bound) for bound in bounds)
    return x if low is None and high is None else ctx.b.clip(x, low, high)


@imports("PRelu")
def prelu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, slope = inputs
    if node.version < 7 and slope.rank == 1 and slope.shape != (1,) and x.rank > 2:
        slope = ctx.reshape(slope, [*slope.shape, *([1] * (x.rank - 2))])
    return ctx.b.prelu(x, slope)


@imports("Selu")
def selu(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    old = node.version < 6
    alpha = node.number("alpha", 1.6732 if old else 1.67326319217681884765625)
    gamma = node.number("gamma", 1.0507 if old else 1.05070102214813232421875)
    return ctx.b.selu(inputs[0], alpha=alpha, gamma=gamma)


@imports("BitShift")
def bit_shift(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    direction = node.require("direction")
    if direction not in ("LEFT", "RIGHT"):
        raise ImportModelError(
            "has an unknown direction", where=node.where, expected="LEFT or RIGHT", found=direction
        )
    return ctx.b.op("shift_left" if direction == "LEFT" else "shift_right", *inputs)


@imports("Cast")
def cast(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _cast(ctx, node, inputs[0], _target(node, node.require("to")))


@imports("CastLike")
def cast_like(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return _cast(ctx, node, inputs[0], inputs[1].dtype)


def _cast(ctx: Context, node: OnnxNode, x: Value, target: DType) -> Results:
    if x.dtype == target:
        return x
    saturate, round_mode = node.flag("saturate", 1), node.text("round_mode", "up")
    return ctx.b.cast(x, to=target, saturate=saturate, round_mode=round_mode)


def _target(node: OnnxNode, to: int | str) -> DType:
    """The element type of `to`, which is a name in opsets below 6."""
    if isinstance(to, str):
        names = dict(TensorProto.DataType.items())
        if to.upper() not in names:
            raise ImportModelError(f"no element type is named {to!r}", where=node.where)
        return element_type(names[to.upper()], node.where)
    return element_type(to, node.where)


@imports("BitCast")
def bit_cast(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.bitcast(inputs[0], to=_target(node, node.require("to")))
