"""The k largest or smallest values along an axis, in order, and their indices.

Among equal values the lower index comes first; NaN is larger than every number, as in PyTorch. `k`
is an attribute, or an operand if only the data decides it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.dim import UNKNOWN, Size
from bitwright.ir.dtype import i64
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import zeros_like
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients


def _infer(
    x: TensorType, count: TensorType | None, k: Size | None, axis: int, largest: bool, sorted: bool
) -> tuple[TensorType, TensorType]:
    expect.real("x", x)
    position = normalize_axis(axis, x.rank)
    if (count is None) == (k is None):
        raise InferenceError("k must be given once", expected="an attribute or an operand")
    if count is not None:
        expect.element("k", count, i64)
        expect.rank("k", count, 0, 1)
        expect.size("k", count.count, 1)
    elif isinstance(k, int):
        _require_enough(k, x.shape[position])
    found = UNKNOWN if k is None else k
    values = x.with_shape((*x.shape[:position], found, *x.shape[position + 1 :]))
    return values, values.with_dtype(i64)


def _require_enough(k: int, size: Size) -> None:
    if k < 0 or (isinstance(size, int) and k > size):
        raise InferenceError("k does not fit the axis", expected=f"0 to {size}", found=k)


def _reference(
    x: Array, count: Array | None, k: int | None, axis: int, largest: bool, sorted: bool
) -> tuple[Array, Array]:
    if k is None:
        k = int(np.asarray(count).item())
    if not 0 <= k <= x.shape[axis]:
        raise RunError("k does not fit the axis", expected=f"0 to {x.shape[axis]}", found=k)
    values = np.moveaxis(wide(x), axis, -1)
    if (
        largest
    ):  # descending with ties by ascending index: sort the reversed array and reverse the result
        order = np.argsort(values[..., ::-1], axis=-1, kind="stable")
        order = values.shape[-1] - 1 - order[..., ::-1]
    else:
        order = np.argsort(values, axis=-1, kind="stable")
    order = order[..., :k]
    found = np.take_along_axis(values, order, axis=-1)
    return np.moveaxis(found, -1, axis), np.moveaxis(order, -1, axis)


def _samples() -> list[Sample]:
    x = draw(3, 4, 5)
    ties = np.array([[2, 1, 2, 3], [0, 0, -1, 0]], np.int32)
    cases: list[tuple[Any, dict[str, Any]]] = [
        (x, {"k": 2}),
        (x, {"k": 3, "axis": 1, "largest": False}),
        (x, {"k": 5, "sorted": False}),
        (x, {"k": 0, "axis": 0}),
        (ties, {"k": 3}),
        (ties, {"k": 3, "largest": False}),
        (draw(2, 3, dtype="u64", low=0, high=9), {"k": 2}),
        (draw(2, 3, dtype="bf16"), {"k": 2}),
        (draw(0, 3), {"k": 2}),
    ]
    return [
        *(sample(values, **attrs) for values, attrs in cases),
        sample(x, np.array([2])),
        sample(x, np.array(3), axis=0, largest=False),
    ]


def _grad(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """dy goes to the elements that the indices name."""
    x, indices = node.inputs[0], node.outputs[1]
    assert x is not None
    zeros, axis = zeros_like(b, x), node.attrs["axis"]
    return [b.scatter_elements(zeros, indices, dys[0], axis=axis, reduction="add")]


OPDEFS = [
    OpDef(
        "top_k",
        Kind.MOVEMENT,
        "x, count?",
        infer=_infer,
        reference=_reference,
        grad=_grad,
        samples=_samples,
        attrs={
            "k": Attr("size", None),
            "axis": Attr("int", -1),
            "largest": Attr("bool", True),
            "sorted": Attr("bool", True),
        },
        doc="The k largest (or smallest) values along an axis, in order, and their indices.",
    )
]
