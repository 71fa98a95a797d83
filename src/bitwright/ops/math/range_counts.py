"""Counts of values between edges, with minimum and maximum, of a whole tensor.

    y[k]     for k = 0 ... E: the number of values with edges[k - 1] < x <= edges[k]
    y[E + 1] the number of NaN
    y[E + 2] the minimum of the other values, inf if there are none
    y[E + 3] the maximum, -inf if there are none

Edges ascend. The result is f64, so that counts up to 2**53 are exact.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.dtype import f32, f64
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.opdef import Array, Kind, NonDifferentiable, OpDef, Sample, draw, sample

EXTRA = 4
"""Numbers in the result beyond one per edge: the last bin, NaN, minimum and maximum."""


def _infer(x: TensorType, edges: TensorType) -> TensorType:
    expect.floating("x", x)
    expect.rank("edges", edges, 1)
    expect.element("edges", edges, f64 if x.dtype == f64 else f32)
    return TensorType(f64, (edges.shape[0] + EXTRA,))


def _reference(x: Array, edges: Array) -> Array:
    values = x.astype(edges.dtype).reshape(-1)
    values = values[~np.isnan(values)]
    bins = np.bincount(np.searchsorted(edges, values, side="left"), minlength=len(edges) + 1)
    low, high = values.min(initial=np.inf), values.max(initial=-np.inf)
    return np.concatenate([bins, [x.size - values.size, low, high]]).astype(np.float64)


def _samples() -> list[Sample]:
    edges = np.array([-1.5, -0.5, 0, 0.25, 1], np.float32)
    x = draw(7, 33)
    x[0, :3] = np.nan, np.inf, 0.25
    return [
        sample(x, edges),
        sample(draw(3, 5, 4, 2, dtype="f16"), edges[:2]),
        sample(draw(1, dtype="bf16"), edges[:0]),
        sample(draw(17, dtype="f64"), edges.astype(np.float64)),
        sample(draw(0, 3), edges),
        sample(draw(), edges),
    ]


OPDEFS = [
    OpDef(
        "range_counts",
        Kind.REDUCTION,
        "x, edges",
        infer=_infer,
        reference=_reference,
        grad=NonDifferentiable("counts are piecewise constant in x"),
        keeps=("x", "edges"),
        fixed_types=True,
        samples=_samples,
        doc="Counts of values between ascending edges, then those of NaN, minimum and maximum.",
    )
]
