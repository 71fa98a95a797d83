"""Int8 `grouped_matmul`: each row is multiplied by the weight of its expert.

    y[r, n] = f32(Σ (x[r, k] - x_zero[r]) w[e, k, n]) * scale[e, 0, n]      e the expert of row r

Rows are sorted by expert: the next counts[e] rows belong to expert e. Sums wrap at 32 bits. A
per-row scale is not part of this op; it multiplies the result.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.dtype import f32, i8
from bitwright.ir.types import TensorType, broadcast_shapes
from bitwright.ops.core import expect
from bitwright.ops.core.opdef import ROUNDS, Array, Kind, OpDef, Sample, draw, sample
from bitwright.ops.math.matmul import multiply_grouped, require_counts


def _infer(
    x: TensorType, w: TensorType, counts: TensorType, scale: TensorType, x_zero: TensorType | None
) -> TensorType:
    expect.dtype("x", x, lambda d: d.is_integer and d.bits == 8, "i8 or u8")
    expect.element("w", w, i8)
    expect.element("scale", scale, f32)
    for name, type_, rank in (("x", x, 2), ("w", w, 3), ("scale", scale, 3)):
        expect.rank(name, type_, rank)
    require_counts(counts, w.shape[0])
    expect.size("axis 1 of w", w.shape[1], x.shape[1])
    for axis, size in enumerate((w.shape[0], 1, w.shape[2])):
        expect.size(f"axis {axis} of the scale", scale.shape[axis], size)
    if x_zero is not None:
        expect.element("x_zero", x_zero, x.dtype)
        rows = (x.shape[0], 1)
        expect.size("x_zero", broadcast_shapes(x_zero.shape, rows)[-1], 1)
    return TensorType(f32, (x.shape[0], w.shape[2]))


def _reference(x: Array, w: Array, counts: Array, scale: Array, x_zero: Array | None) -> Array:
    wide = x.astype(np.int64)
    if x_zero is not None:
        wide = wide - x_zero.astype(np.int64)
    sums = multiply_grouped(wide, w.astype(np.int64), counts).astype(np.int32)
    return sums.astype(np.float32) * np.repeat(scale[:, 0].astype(np.float32), counts, axis=0)


def _samples() -> list[Sample]:
    qvalues = draw(6, 5, dtype="u8", high=255, low=0)
    w = draw(3, 5, 4, dtype="i8", seed=1, low=-127, high=127)
    scale = np.abs(draw(3, 1, 4, seed=2))
    counts = np.array([2, 0, 4])
    points = draw(6, 1, dtype="u8", seed=3, high=255, low=0)
    return [
        sample(qvalues, w, counts, scale),
        sample(qvalues, w, counts, scale, np.uint8(117)),
        sample(qvalues, w, counts, scale, points),
        sample(draw(6, 5, dtype="i8", low=-128, high=127), w, counts, scale, np.int8(-3)),
        sample(qvalues[:0], w, np.array([0, 0, 0]), scale),
    ]


OPDEFS = [
    OpDef(
        "integer_grouped_matmul",
        Kind.COMPUTE,
        "x, w, counts, scale, x_zero?",
        infer=_infer,
        reference=_reference,
        grad=ROUNDS,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1],
        samples=_samples,
        doc="`grouped_matmul` of 8-bit rows and weights, exact in i32, times a scale per expert "
        "and column, in f32.",
    )
]
