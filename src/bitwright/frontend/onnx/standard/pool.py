"""Pooling, over windows and over whole images."""

from __future__ import annotations

from typing import Any

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, UnmappedError, imports
from bitwright.frontend.onnx.windows import kernel_of, window_attrs
from bitwright.ir import Value


def _attrs(node: OnnxNode, x: Value) -> dict[str, Any]:
    kernel = kernel_of(node, x.rank - 2)
    return {
        "kernel": kernel,
        **window_attrs(node, x.shape[2:], kernel),
        "ceil": node.flag("ceil_mode"),
    }


@imports("MaxPool")
def max_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    if not node.has_output(1):
        return ctx.b.max_pool(x, **_attrs(node, x))
    order = node.integer("storage_order", 0)
    return list(ctx.b.max_pool_indices(x, storage_order=order, **_attrs(node, x)))


@imports("AveragePool")
def average_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    return ctx.b.avg_pool(x, count_include_pad=node.flag("count_include_pad"), **_attrs(node, x))


@imports("LpPool")
def lp_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    p = int(node.get("p", 2))
    return ctx.b.lp_pool(x, p=p, **_attrs(node, x))


@imports("MaxUnpool")
def max_unpool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, indices, target = inputs[0], inputs[1], inputs[2]
    kernel = kernel_of(node, x.rank - 2)
    attrs = window_attrs(node, x.shape[2:], kernel)
    rank = len(kernel)
    natural = [
        (size - 1) * attrs["strides"][axis]
        - attrs["pads"][axis]
        - attrs["pads"][axis + rank]
        + kernel[axis]
        for axis, size in enumerate(x.shape[2:])
    ]
    y = ctx.b.max_unpool(x, indices, shape=(*x.shape[:2], *natural))
    if target is None:
        return y
    sizes = ctx.sizes(target, x)
    if sizes is None:
        raise UnmappedError(f"the output shape {target} is computed from data")
    # indices are relative to the natural shape; a larger output is padded with zeros
    ends = [wanted - size for wanted, size in zip(sizes, y.shape, strict=True)]
    return ctx.b.pad(y, pads=(*[0] * y.rank, *ends))


def _spatial(node: OnnxNode, x: Value) -> list[int]:
    if x.rank < 2:
        raise ImportModelError("has no spatial axes", where=node.where, found=x.type)
    return list(range(2, x.rank))


@imports("GlobalAveragePool")
def global_average_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.reduce_mean(inputs[0], axes=_spatial(node, inputs[0]), keepdims=True)


@imports("GlobalMaxPool")
def global_max_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.reduce_max(inputs[0], axes=_spatial(node, inputs[0]), keepdims=True)


@imports("GlobalLpPool")
def global_lp_pool(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, p = inputs[0], float(node.get("p", 2))
    axes = _spatial(node, x)
    if p in (1.0, 2.0):
        return ctx.b.op("reduce_l1" if p == 1 else "reduce_l2", x, axes=axes, keepdims=True)
    powers = ctx.b.pow(ctx.b.abs(x), ctx.like(x, p))
    total = ctx.b.reduce_sum(powers, axes=axes, keepdims=True)
    return ctx.b.pow(total, ctx.like(x, 1 / p))
