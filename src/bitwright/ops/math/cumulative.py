"""Running sums and products along an axis.

inclusive  y[i] = x[0] + ... + x[i]
exclusive  y[i] = x[0] + ... + x[i - 1], starting with the identity
reverse    the same from the end
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.types import TensorType, normalize_axis
from bitwright.ops.core import expect
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample


def _infer(x: TensorType, axis: int, exclusive: bool, reverse: bool) -> TensorType:
    expect.number("x", x)
    normalize_axis(axis, x.rank)
    return x


def _accumulate(ufunc: np.ufunc, x: Array, axis: int, exclusive: bool, reverse: bool) -> Array:
    values = np.moveaxis(wide(x), axis, -1)
    if reverse:
        values = values[..., ::-1]
    if exclusive:
        first = np.full((*values.shape[:-1], min(values.shape[-1], 1)), ufunc.identity)
        values = np.concatenate([first.astype(values.dtype), values[..., :-1]], axis=-1)
    result = ufunc.accumulate(values, axis=-1)
    if reverse:
        result = result[..., ::-1]
    return np.moveaxis(result, -1, axis)


def _samples() -> list[Sample]:
    x = draw(3, 4, 5)
    return [
        sample(x, axis=1),
        sample(x, axis=-1, exclusive=True),
        sample(x, axis=0, reverse=True),
        sample(x, axis=2, exclusive=True, reverse=True),
        sample(draw(2, 0), axis=1, exclusive=True),
        sample(draw(4, dtype="i32", low=-9, high=9), axis=0),
        sample(draw(4, dtype="bf16"), axis=0, tolerance=2e-2),
    ]


def _op(name: str, ufunc: np.ufunc, doc: str) -> OpDef:
    def compute(x: Array, **attrs: Any) -> Array:
        return _accumulate(ufunc, x, **attrs)

    return OpDef(
        name,
        Kind.REDUCTION,
        "x",
        infer=_infer,
        reference=compute,
        samples=_samples,
        attrs={
            "axis": Attr("int"),
            "exclusive": Attr("bool", False),
            "reverse": Attr("bool", False),
        },
        doc=doc,
    )


OPDEFS = [
    _op("cumsum", np.add, "The running sum along an axis."),
    _op("cumprod", np.multiply, "The running product along an axis."),
]
