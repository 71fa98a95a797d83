"""Linear algebra on the last two axes: a x = b, and determinants."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.types import TensorType, broadcast_shapes
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Kind, OpDef, Sample, draw, sample


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


OPDEFS = [
    OpDef(
        "solve",
        Kind.COMPUTE,
        "a, b",
        infer=_infer_solve,
        reference=_solve,
        samples=_solve_samples,
        doc="The x with a @ x = b, for square matrices a[..., n, n] and columns b[..., n, k].",
    ),
    OpDef(
        "det",
        Kind.COMPUTE,
        "x",
        infer=_infer_det,
        reference=lambda x: np.linalg.det(wide(x)),
        samples=lambda: [
            sample(draw(3, 3)),
            sample(draw(2, 4, 5, 5)),
            sample(draw(0, 0)),
            sample(draw(2, 2, dtype="bf16"), tolerance=2e-2),
        ],
        onnx="Det",
        doc="The determinant of each matrix of the last two axes.",
    ),
]
