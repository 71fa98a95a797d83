"""The index of the extreme value along an axis; NaN counts as the extreme, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dtype import i64
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.inference import reduced_shape
from bitwright.ops.core.numeric import Array, wide
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample
from bitwright.ops.math.reduce import is_ordered


def _infer(x: TensorType, axis: int, keepdims: bool, select_last: bool) -> TensorType:
    expect.dtype("x", x, is_ordered, "a real number type or bool")
    if x.shape[normalize_axis(axis, x.rank)] == 0:
        raise InferenceError(f"axis {axis} is empty", expected="at least one value", found=x)
    return TensorType(i64, reduced_shape(x.shape, [axis], keepdims))


def _reference(find: Callable[..., Any]) -> Callable[..., Any]:
    def compute(x: Array, axis: int, keepdims: bool, select_last: bool) -> Any:
        values = wide(x)
        if not select_last:
            return find(values, axis=axis, keepdims=keepdims)
        return x.shape[axis] - 1 - find(np.flip(values, axis), axis=axis, keepdims=keepdims)

    return compute


def _samples() -> list[Sample]:
    x = draw(3, 4, 5)
    ties = np.array([[2, 1, 2], [0, 0, -1]], np.int32)
    return [
        sample(x, axis=1),
        sample(x, axis=-1, keepdims=False),
        sample(ties, axis=1, select_last=True),
        sample(ties, axis=0),
        sample(draw(0, 3), axis=1),
        sample(draw(2, 3, dtype="bf16"), axis=1),
        sample(draw(2, 3, dtype="u8", low=0, high=9), axis=1, keepdims=False, select_last=True),
    ]


def _op(name: str, find: Callable[..., Any], doc: str) -> OpDef:
    return OpDef(
        name,
        Kind.REDUCTION,
        "x",
        infer=_infer,
        reference=_reference(find),
        grad=NonDifferentiable("an index is piecewise constant in x"),
        samples=_samples,
        attrs={
            "axis": Attr("int"),
            "keepdims": Attr("bool", True),
            "select_last": Attr("bool", False),
        },
        doc=doc,
    )


OPDEFS = [
    _op(
        "argmax", np.argmax, "The index of the largest value along an axis, first or last of ties."
    ),
    _op(
        "argmin", np.argmin, "The index of the smallest value along an axis, first or last of ties."
    ),
]
