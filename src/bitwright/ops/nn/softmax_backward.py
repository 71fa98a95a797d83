"""Gradients of softmax and log_softmax, from their results y.

softmax_backward      dx = y * (dy - sum(dy * y))
log_softmax_backward  dx = dy - exp(y) * sum(dy)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, composed


def _infer(dy: TensorType, y: TensorType, axis: int) -> TensorType:
    expect.floating("y", y)
    expect.same_dtype(dy, y)
    expect.rank("dy", dy, y.rank)
    for at, (size, whole) in enumerate(zip(dy.shape, y.shape, strict=True)):
        expect.size(f"axis {at} of dy", size, whole)
    normalize_axis(axis, y.rank)
    return y


def _softmax_backward(dy: Array, y: Array, axis: int) -> Array:
    dy, y = wide(dy), wide(y)
    return np.asarray(y * (dy - np.sum(dy * y, axis=axis, keepdims=True)))


def _log_softmax_backward(dy: Array, y: Array, axis: int) -> Array:
    dy = wide(dy)
    return np.asarray(dy - np.exp(wide(y)) * np.sum(dy, axis=axis, keepdims=True))


def _compose_softmax(b: Builder, dy: Value, y: Value, axis: int) -> Any:
    return b.mul(y, b.sub(dy, b.reduce_sum(b.mul(dy, y), axes=(axis,))))


def _compose_log_softmax(b: Builder, dy: Value, y: Value, axis: int) -> Any:
    return b.sub(dy, b.mul(b.exp(y), b.reduce_sum(dy, axes=(axis,))))


def softmax_gradient(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    """The rule of softmax and log_softmax."""
    return [b.op(f"{node.op}_backward", dys[0], node.outputs[0], axis=node.attrs["axis"])]


def _samples() -> list[Sample]:
    dy, y = draw(3, 4, 5, seed=5), draw(3, 4, 5, low=-2, high=0.5)
    return [
        sample(dy, y),
        sample(dy, y, axis=0),
        sample(dy, y, axis=1),
        sample(draw(17, seed=5), draw(17)),
        sample(draw(2, 0), draw(2, 0)),
        sample(draw(0, 3), draw(0, 3)),
        sample(draw(2, 6, dtype="f64", seed=5), draw(2, 6, dtype="f64")),
        sample(draw(2, 6, dtype="bf16", seed=5), draw(2, 6, dtype="bf16"), tolerance=2e-2),
    ]


def _op(name: str, reference: Callable[..., Any], compose: Callable[..., Any], doc: str) -> OpDef:
    return OpDef(
        name,
        Kind.REDUCTION,
        "dy, y",
        infer=_infer,
        reference=reference,
        grad=composed(compose),
        samples=_samples,
        takes_epilogue=True,
        attrs={"axis": Attr("int", -1)},
        doc=doc,
    )


OPDEFS = [
    _op(
        "softmax_backward",
        _softmax_backward,
        _compose_softmax,
        "The gradient of softmax from its result y: y * (dy - sum(dy * y)).",
    ),
    _op(
        "log_softmax_backward",
        _log_softmax_backward,
        _compose_log_softmax,
        "The gradient of log_softmax from its result y: dy - exp(y) * sum(dy).",
    ),
]
