"""Complex numbers from and to their parts.

These ops have no scalar forms, because the scalar interface has real numbers only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dtype import DType, c64, c128, f32, f64
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import sum_to
from bitwright.ops.core.inference import broadcast
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients

_PART: dict[DType, DType] = {c64: f32, c128: f64}
_WHOLE: dict[DType, DType] = {part: whole for whole, part in _PART.items()}


def _same_complex(x: TensorType) -> TensorType:
    expect.dtype("the operand", x, lambda d: d.is_complex, "a complex type")
    return x


def _part(x: TensorType) -> TensorType:
    return x.with_dtype(_PART[_same_complex(x).dtype])


def _infer_complex(real: TensorType, imag: TensorType) -> TensorType:
    parts = broadcast(real, imag)
    if parts.dtype not in _WHOLE:
        raise InferenceError(
            "no complex type has parts of this type", expected="f32 or f64", found=parts
        )
    return parts.with_dtype(_WHOLE[parts.dtype])


def _join(real: Array, imag: Array) -> Array:
    real, imag = np.broadcast_arrays(wide(real), wide(imag))
    joined = np.empty(real.shape, np.complex128)
    # real + 1j * imag is NaN for an infinite part
    joined.real, joined.imag = real, imag
    return joined


def _squared_norm(x: Array) -> Array:
    norm: Array = x.real**2 + x.imag**2
    return norm


def _samples() -> list[Sample]:
    return [
        sample(draw(3, 5, dtype="c64")),
        sample(draw(2, 7, dtype="c128")),
        sample(draw(dtype="c64")),
        sample(draw(0, 3, dtype="c128")),
    ]


def _op(
    name: str, infer: Callable[..., Any], reference: Callable[..., Any], grad: Any, doc: str
) -> OpDef:
    return OpDef(
        name,
        Kind.ELEMENTWISE,
        "x",
        infer=infer,
        reference=lambda x: reference(wide(x)),
        samples=_samples,
        grad=grad,
        doc=doc,
    )


# Gradients are dL/d(re) + i dL/d(im), as in PyTorch.


def _grad_conj(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.conj(dys[0])]


def _grad_real(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.complex(dys[0], 0.0)]


def _grad_imag(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.complex(0.0, dys[0])]


def _grad_squared_norm(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    return [b.mul(b.complex(b.mul(dys[0], 2.0), 0.0), node.inputs[0])]


def _grad_complex(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    real, imag = node.operands
    return [sum_to(b, b.real(dys[0]), real), sum_to(b, b.imag(dys[0]), imag)]


OPDEFS = [
    _op("conj", _same_complex, np.conj, _grad_conj, "re - i im"),
    _op("real", _part, lambda x: x.real, _grad_real, "the real part"),
    _op("imag", _part, lambda x: x.imag, _grad_imag, "the imaginary part"),
    _op("squared_norm", _part, _squared_norm, _grad_squared_norm, "re² + im²"),
    OpDef(
        "complex",
        Kind.ELEMENTWISE,
        "real, imag",
        infer=_infer_complex,
        reference=_join,
        grad=_grad_complex,
        samples=lambda: [
            sample(draw(3, 5), draw(3, 5, seed=1)),
            sample(draw(4, 1, dtype="f64"), draw(3, dtype="f64", seed=1)),
            sample(draw(), draw(0, 3)),
        ],
        doc="real + i imag",
    ),
]
