"""Softmax along an axis, its logarithm, and its limit.

softmax      exp(x - m) / sum(exp(x - m)), m = max(x)
log_softmax  x - m - log(sum(exp(x - m)))
hardmax      1 at the first maximum, 0 elsewhere
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import Array, wide
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample
from bitwright.ops.nn.softmax_backward import softmax_gradient


def _infer(x: TensorType, axis: int) -> TensorType:
    expect.floating("x", x)
    normalize_axis(axis, x.rank)
    return x


def _below_max(x: Array, axis: int) -> Array:
    values = wide(x)
    return np.asarray(values - np.max(values, axis=axis, keepdims=True, initial=-np.inf))


def softmax(x: Array, axis: int) -> Array:
    powers = np.exp(_below_max(x, axis))
    return np.asarray(powers / np.sum(powers, axis=axis, keepdims=True))


def log_softmax(x: Array, axis: int) -> Array:
    lowered = _below_max(x, axis)
    return np.asarray(lowered - np.log(np.sum(np.exp(lowered), axis=axis, keepdims=True)))


def _hardmax(x: Array, axis: int) -> Array:
    result = np.zeros(x.shape)
    if x.size:
        np.put_along_axis(result, np.argmax(wide(x), axis=axis, keepdims=True), 1, axis=axis)
    return result


def _samples() -> list[Sample]:
    x = draw(3, 4, 5)
    return [
        sample(x),
        sample(x, axis=0),
        sample(x * 1000, axis=1),
        sample(draw(7)),
        sample(draw(2, 0)),
        sample(draw(0, 3)),
        sample(draw(2, 6, dtype="f64")),
        sample(draw(2, 6, dtype="bf16"), tolerance=2e-2),
    ]


def _op(name: str, reference: Callable[..., Any], doc: str, **rest: Any) -> OpDef:
    return OpDef(
        name,
        Kind.REDUCTION,
        "x",
        infer=_infer,
        reference=reference,
        samples=_samples,
        attrs={"axis": Attr("int", -1)},
        doc=doc,
        **rest,
    )


OPDEFS = [
    _op(
        "softmax",
        softmax,
        "exp(x) / sum(exp(x)) along an axis, without overflow.",
        grad=softmax_gradient,
        takes_epilogue=True,
        takes_prologue=True,
        never_negative=True,
    ),
    _op(
        "log_softmax",
        log_softmax,
        "log(softmax(x)) along an axis, without overflow.",
        grad=softmax_gradient,
        takes_epilogue=True,
        takes_prologue=True,
    ),
    _op(
        "hardmax",
        _hardmax,
        "1 at the first largest value along an axis, 0 elsewhere.",
        grad=NonDifferentiable("it is piecewise constant in x"),
    ),
]
