"""Normalizations over given axes.

    layer_norm  (x - mean) / sqrt(var + eps) * scale + bias, over the axes from `axis` on
    rms_norm    x / sqrt(mean(x ** 2) + eps) * scale + bias, over the axes from `axis` on
    lp_norm     x / (sum |x| ** p) ** (1 / p) along an axis; 0 where that norm is 0

var is the mean squared deviation.
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.nn.norm_backward import norm_gradient

EPS = Attr("float", 1e-5)


def _require_fits(what: str, type_: TensorType | None, x: TensorType) -> None:
    """Raise unless the operand broadcasts to the shape of x."""
    if type_ is None:
        return
    fits = type_.rank <= x.rank and all(
        size == 1 or not isinstance(size, int) or not isinstance(whole, int) or size == whole
        for size, whole in zip(reversed(type_.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise InferenceError(
            f"{what} does not broadcast to x", expected=f"sizes of {x}, or 1", found=type_
        )


def _infer_trailing(
    x: TensorType, scale: TensorType | None, bias: TensorType | None, axis: int, eps: float
) -> TensorType:
    expect.floating("x", x)
    expect.same_dtype(x, scale, bias)
    normalize_axis(axis, x.rank)
    _require_fits("scale", scale, x)
    _require_fits("bias", bias, x)
    return x


def _affine(x: Array, scale: Array | None, bias: Array | None) -> Array:
    if scale is not None:
        x = x * wide(scale)
    return x if bias is None else x + wide(bias)


def standardize(x: Array, axes: tuple[int, ...], eps: float) -> Array:
    """(x - mean) / sqrt(var + eps) over axes."""
    centred = x - np.mean(x, axis=axes, keepdims=True)
    return np.asarray(centred / np.sqrt(np.mean(centred**2, axis=axes, keepdims=True) + eps))


def _layer_norm(x: Array, scale: Array | None, bias: Array | None, axis: int, eps: float) -> Array:
    return _affine(standardize(wide(x), _trailing(x, axis), eps), scale, bias)


def _rms_norm(x: Array, scale: Array | None, bias: Array | None, axis: int, eps: float) -> Array:
    values = wide(x)
    square = np.mean(values**2, axis=_trailing(x, axis), keepdims=True)
    return _affine(values / np.sqrt(square + eps), scale, bias)


def _trailing(x: Array, axis: int) -> tuple[int, ...]:
    return tuple(range(normalize_axis(axis, x.ndim), x.ndim))


def _infer_lp_norm(x: TensorType, axis: int, p: int) -> TensorType:
    expect.floating("x", x)
    normalize_axis(axis, x.rank)
    if p < 1:
        raise InferenceError("p is too small", expected="at least 1", found=p)
    return x


def _lp_norm(x: Array, axis: int, p: int) -> Array:
    values = wide(x)
    norm = np.sum(np.abs(values) ** p, axis=axis, keepdims=True) ** (1 / p)
    return np.asarray(np.where(norm == 0, 0, values / norm))


def _grad_lp_norm(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    """dx = (dy - sign(y) * |y| ** (p - 1) * sum(dy * y)) / norm; 0 where the norm is 0."""
    (x,) = node.operands
    axes, p = (node.attrs["axis"],), node.attrs["p"]
    dy, y = dys[0], node.outputs[0]
    sums = b.reduce_sum(b.pow(b.abs(x), number(b, p, x)), axes=axes)
    is_zero = b.eq(sums, number(b, 0.0, x))
    safe = b.where(is_zero, number(b, 1.0, x), sums)
    norm = b.pow(safe, number(b, 1 / p, x))
    slope = b.sign(y) if p == 1 else y
    if p > 2:
        slope = b.mul(b.sign(y), b.pow(b.abs(y), number(b, p - 1, x)))
    dx = b.div(b.sub(dy, b.mul(slope, b.reduce_sum(b.mul(dy, y), axes=axes))), norm)
    return [b.where(is_zero, number(b, 0.0, x), dx)]


def _trailing_samples() -> list[Sample]:
    x = draw(2, 3, 4)
    scale, bias = draw(4, seed=1), draw(4, seed=2)
    return [
        sample(x),
        sample(x, scale, bias),
        sample(x, draw(3, 4, seed=1), None, axis=1, eps=0.1),
        sample(x, None, draw(3, 1, seed=1), axis=-2),
        sample(x, draw(2, 3, 4, seed=1), axis=0),
        sample(draw(0, 4), scale, bias),
        sample(draw(2, 4, dtype="bf16"), draw(4, dtype="bf16", seed=1), tolerance=2e-2),
    ]


OPDEFS = [
    *(
        OpDef(
            name,
            Kind.REDUCTION,
            "x, scale?, bias?",
            infer=_infer_trailing,
            reference=reference,
            takes_epilogue=True,
            takes_prologue=True,
            quantizes_rows=True,
            grad=norm_gradient,
            samples=_trailing_samples,
            attrs={"axis": Attr("int", -1), "eps": EPS},
            doc=f"{formula} * scale + bias over the axes from axis on.",
        )
        for name, reference, formula in (
            ("layer_norm", _layer_norm, "(x - mean) / sqrt(var + eps)"),
            ("rms_norm", _rms_norm, "x / sqrt(mean(x ** 2) + eps)"),
        )
    ),
    OpDef(
        "lp_norm",
        Kind.REDUCTION,
        "x",
        infer=_infer_lp_norm,
        reference=_lp_norm,
        grad=_grad_lp_norm,
        samples=lambda: [
            sample(draw(3, 4)),
            sample(draw(3, 4), axis=0, p=1),
            sample(np.zeros((2, 3), np.float32)),
            sample(draw(2, 7), p=3),
            sample(draw(2, 0)),
        ],
        attrs={"axis": Attr("int", -1), "p": Attr("int", 2)},
        doc="x divided by its p-norm along an axis; 0 where the norm is 0.",
    ),
]
