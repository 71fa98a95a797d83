"""Linear algebra on the last two axes: a x = b, and determinants."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType, broadcast_shapes
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import conjugate, eye
from bitwright.ops.core.gradients import sum_to
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, composed


def _require_square(what: str, x: TensorType) -> None:
    expect.dtype(what, x, lambda d: d.is_float or d.is_complex, "a floating type")
    if x.rank < 2:
        raise InferenceError(f"{what} has the wrong rank", expected="rank 2 or more", found=x)
    expect.size(f"the last axis of {what}", x.shape[-1], x.shape[-2])


def _infer_solve(a: TensorType, b: TensorType) -> TensorType:
    _require_square("a", a)
    element = expect.same_dtype(a, b)
    if b.rank < 2:
        raise InferenceError("b has the wrong rank", expected="rank 2 or more", found=b)
    expect.size("axis -2 of b", b.shape[-2], a.shape[-1])
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return TensorType(element, (*batch, *b.shape[-2:]))


def _solve(a: Array, b: Array) -> Any:
    try:
        return np.linalg.solve(wide(a), wide(b))
    except np.linalg.LinAlgError:
        raise RunError("a has no inverse", hint="A matrix of its batch is singular.") from None


def _infer_det(x: TensorType) -> TensorType:
    _require_square("x", x)
    return x.with_shape(x.shape[:-2])


def _solve_samples() -> list[Sample]:
    a = draw(2, 3, 3) + 4 * np.eye(3, dtype=np.float32)
    return [
        sample(a[0], draw(3, 2, seed=1)),
        sample(a, draw(2, 3, 4, seed=1)),
        sample(a, draw(5, 1, 3, 1, seed=1)),
        sample(draw(0, 0), draw(0, 2)),
    ]


def _adjoint(b: Builder, x: Value) -> Any:
    """The conjugate transpose of each matrix."""
    axes = range(x.rank)
    return conjugate(b, b.transpose(x, perm=(*axes[:-2], x.rank - 1, x.rank - 2)))


def _grad_solve(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """With a x = y: dy = a^-H dx, da = -dy x^H."""
    (matrix, right), x = node.operands, node.outputs[0]
    dright = b.solve(_adjoint(b, matrix), dys[0])
    dmatrix = b.neg(b.matmul(dright, _adjoint(b, x)))
    return [sum_to(b, dmatrix, matrix), sum_to(b, dright, right)]


def _grad_det(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    (x,) = node.operands
    dy = b.reshape(dys[0], shape=(*x.shape[:-2], 1, 1))
    return [b.mul(dy, conjugate(b, b.cofactors(x)))]


def _cofactors(x: Array) -> Array:
    """det(x) x^-T, by singular values: it exists for singular matrices too."""
    values = wide(x)
    if not values.shape[-1]:
        return values
    left, sizes, right = np.linalg.svd(values)
    others = np.stack(
        [np.prod(np.delete(sizes, i, axis=-1), axis=-1) for i in range(sizes.shape[-1])], axis=-1
    )
    sign = np.linalg.det(left) * np.linalg.det(right)
    adjugate: Array = (left.conj() * others[..., None, :]) @ right.conj()
    return np.asarray(adjugate * sign[..., None, None])


def _compose_cofactors(b: Builder, x: Value) -> Any:
    """det(x) x^-T, which has a gradient where x has an inverse."""
    axes = range(x.rank)
    turned = b.transpose(x, perm=(*axes[:-2], x.rank - 1, x.rank - 2))
    unit = b.expand(eye(b, x.shape[-1], x), shape=x.shape)
    return b.mul(b.reshape(b.det(x), shape=(*x.shape[:-2], 1, 1)), b.solve(turned, unit))


def _infer_cofactors(x: TensorType) -> TensorType:
    _require_square("x", x)
    return x


OPDEFS = [
    OpDef(
        "solve",
        Kind.COMPUTE,
        "a, b",
        infer=_infer_solve,
        reference=_solve,
        grad=_grad_solve,
        samples=_solve_samples,
        doc="The x with a @ x = b, for square matrices a[..., n, n] and columns b[..., n, k].",
    ),
    OpDef(
        "det",
        Kind.COMPUTE,
        "x",
        infer=_infer_det,
        reference=lambda x: np.linalg.det(wide(x)),
        grad=_grad_det,
        samples=lambda: [
            sample(draw(3, 3)),
            sample(draw(2, 4, 5, 5)),
            sample(draw(0, 0)),
            sample(draw(2, 2, dtype="bf16"), tolerance=2e-2),
        ],
        onnx="Det",
        doc="The determinant of each matrix of the last two axes.",
    ),
    OpDef(
        "cofactors",
        Kind.COMPUTE,
        "x",
        infer=_infer_cofactors,
        reference=_cofactors,
        grad=composed(_compose_cofactors),
        samples=lambda: [
            sample(draw(3, 3)),
            sample(draw(2, 4, 5, 5), tolerance=1e-4),
            sample(draw(1, 1)),
            sample(draw(0, 0)),
            sample(draw(2, 2, dtype="bf16"), tolerance=2e-2),
        ],
        doc="The cofactors of each matrix, det(x) x^-T: the gradient of det.",
    ),
]
