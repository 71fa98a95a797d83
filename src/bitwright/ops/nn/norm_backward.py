"""Gradients of normalizations over trailing axes.

With g = dy * scale, x̂ the normalized x and r = 1 / sqrt(var + eps) (mean of squares for rms_norm),
means over the axes from `axis` on and sums over the axes before it:

    layer_norm_backward  dx = r * (g - mean(g) - x̂ * mean(g * x̂))
    rms_norm_backward    dx = r * (g - x̂ * mean(g * x̂)),   x̂ = x * r
    both                 dscale = sum(dy * x̂),   dbias = sum(dy)
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number, sum_to
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, composed

ATTRS = {"axis": Attr("int", -1), "eps": Attr("float", 1e-5)}


def _infer(
    dy: TensorType, x: TensorType, scale: TensorType | None, axis: int, eps: float
) -> tuple[TensorType, ...]:
    expect.floating("x", x)
    expect.same_dtype(dy, x, scale)
    expect.rank("dy", dy, x.rank)
    for at, (size, whole) in enumerate(zip(dy.shape, x.shape, strict=True)):
        expect.size(f"axis {at} of dy", size, whole)
    trailing = x.shape[normalize_axis(axis, x.rank) :]
    if scale is not None:
        expect.rank("scale", scale, *range(len(trailing) + 1))
        for at, size in enumerate(reversed(scale.shape), start=1):
            if size != 1:
                expect.size(f"axis -{at} of scale", size, trailing[-at])
    return x, x.with_shape(trailing), x.with_shape(trailing)


def _backward(
    dy: Array, x: Array, scale: Array | None, axis: int, eps: float, centred: bool
) -> tuple[Array, ...]:
    first = normalize_axis(axis, x.ndim)
    mean = partial(np.mean, axis=tuple(range(first, x.ndim)), keepdims=True)
    values, dy = wide(x), wide(dy)
    if centred:
        values = values - mean(values)
    r = 1 / np.sqrt(mean(values**2) + eps)
    normal = values * r
    g = dy if scale is None else dy * wide(scale)
    dx = g - normal * mean(g * normal)
    if centred:
        dx = dx - mean(g)
    before = tuple(range(first))
    return dx * r, np.sum(dy * normal, axis=before), np.sum(dy, axis=before)


def _normalized(
    b: Builder, x: Value, axis: int, eps: float, centred: bool
) -> tuple[Value, Value, tuple[int, ...]]:
    """x̂, r and the axes of the means, as primitive ops."""
    axes = tuple(range(normalize_axis(axis, x.rank), x.rank))
    if centred:
        x = b.sub(x, b.reduce_mean(x, axes=axes))
    r = b.rsqrt(b.add(b.reduce_mean(b.mul(x, x), axes=axes), number(b, eps, x)))
    return b.mul(x, r), r, axes


def _compose(
    b: Builder,
    x: Value,
    scale: Value | None,
    bias: Value | None,
    axis: int,
    eps: float,
    centred: bool,
) -> Value:
    """The normalization itself, as primitive ops."""
    y = _normalized(b, x, axis, eps, centred)[0]
    if scale is not None:
        y = b.mul(y, scale)
    return y if bias is None else b.add(y, bias)


def _compose_backward(
    b: Builder,
    dy: Value,
    x: Value,
    scale: Value | None,
    axis: int,
    eps: float,
    centred: bool,
) -> tuple[Value, ...]:
    normal, r, axes = _normalized(b, x, axis, eps, centred)
    g = dy if scale is None else b.mul(dy, scale)
    inner = b.sub(g, b.mul(normal, b.reduce_mean(b.mul(g, normal), axes=axes)))
    if centred:
        inner = b.sub(inner, b.reduce_mean(g, axes=axes))
    before = tuple(range(axes[0]))
    dscale = b.reduce_sum(b.mul(dy, normal), axes=before, keepdims=False)
    return b.mul(inner, r), dscale, b.reduce_sum(dy, axes=before, keepdims=False)


def norm_gradient(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    """The rule of layer_norm and rms_norm.

    A scale or bias that varies over the axes before `axis` has no place in the backward op; then
    the formula is differentiated.
    """
    x, scale, bias = (*node.inputs, None, None)[:3]
    dy = dys[0]
    assert x is not None and dy is not None
    normalized = x.rank - normalize_axis(node.attrs["axis"], x.rank)
    if any(v is not None and v.rank > normalized for v in (scale, bias)):
        centred = node.op == "layer_norm"
        return composed(partial(_compose, centred=centred))(b, node, dys)
    dx, dscale, dbias = b.op(f"{node.op}_backward", dy, x, scale, **node.attrs)
    return [dx] + [
        None if v is None else sum_to(b, dv, v)
        for v, dv in zip(node.inputs[1:], (dscale, dbias), strict=False)
    ]


def _samples() -> list[Sample]:
    x, dy, scale = draw(2, 3, 4), draw(2, 3, 4, seed=5), draw(4, seed=1)
    return [
        sample(dy, x),
        sample(dy, x, scale),
        sample(dy, x * 0.1, scale, eps=1e-3),
        sample(dy, x * 5, draw(3, 4, seed=1), axis=1, eps=0.1),
        sample(dy, x, draw(3, 1, seed=1), axis=-2),
        sample(dy, x, draw(2, 3, 4, seed=1), axis=0),
        sample(draw(0, 4), draw(0, 4), scale),
        sample(draw(7, 17, seed=5), draw(7, 17), draw(17, seed=1)),
        sample(
            draw(2, 4, dtype="bf16", seed=5),
            draw(2, 4, dtype="bf16"),
            draw(4, dtype="bf16", seed=1),
            tolerance=2e-2,
        ),
    ]


def _op(name: str, centred: bool, doc: str) -> OpDef:
    return OpDef(
        name,
        Kind.REDUCTION,
        "dy, x, scale?",
        infer=_infer,
        reference=partial(_backward, centred=centred),
        grad=composed(partial(_compose_backward, centred=centred)),
        samples=_samples,
        attrs=ATTRS,
        doc=doc,
    )


OPDEFS = [
    _op("layer_norm_backward", True, "The gradients dx, dscale, dbias of layer_norm."),
    _op("rms_norm_backward", False, "The gradients dx, dscale, dbias of rms_norm."),
]
