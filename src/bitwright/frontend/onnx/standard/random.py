"""Random numbers. Without a seed they differ in every run."""

from __future__ import annotations

from typing import Any

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.tensor import element_type
from bitwright.ir import Value


def _draw(
    ctx: Context, node: OnnxNode, op: str, shape: Any, dtype: Any, low: Any, high: Any
) -> Value:
    if not ctx.usable(shape):
        raise UnmappedError("the shape of random numbers must be known from the inputs")
    names = ("low", "high") if op == "random_uniform" else ("mean", "scale")
    attrs = dict(zip(names, (low, high), strict=True))
    return ctx.b.op(op, shape=tuple(shape), dtype=dtype, seed=node.number("seed"), **attrs)


@imports("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def random(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    number = node.integer("dtype")
    if node.op_type.endswith("Like"):
        shape, element = inputs[0].shape, inputs[0].dtype
    else:
        shape, element = node.require("shape"), element_type(1, node.where)
    if number is not None:
        element = element_type(number, node.where)
    if "Uniform" in node.op_type:
        low, high = node.number("low", 0.0), node.number("high", 1.0)
        return _draw(ctx, node, "random_uniform", shape, element, low, high)
    mean, scale = node.number("mean", 0.0), node.number("scale", 1.0)
    return _draw(ctx, node, "random_normal", shape, element, mean, scale)


@imports("Bernoulli")
def bernoulli(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, number = inputs[0], node.integer("dtype")
    drawn = _draw(ctx, node, "random_uniform", x.shape, x.dtype, 0.0, 1.0)
    element = x.dtype if number is None else element_type(number, node.where)
    return ctx.cast(ctx.b.lt(drawn, x), element)
