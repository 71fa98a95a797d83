"""Products of float8 values, summed in f32.

    f8_matmul   x @ w

Q/DQ graphs are lowered to it where the target multiplies float8 (`passes.lower_integer.lower_f8`):

    matmul(dequantize(x, s), dequantize(w, t))  ->  f8_matmul(x, w) * (s * t)

A kernel sums in f32, at most 128 terms of which may be summed with fewer bits (tensor cores).
"""

from __future__ import annotations

from bitwright.ir.dtype import f8e4m3fn, f8e5m2, f32
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.opdef import ROUNDS, Kind, OpDef, Sample, draw, sample
from bitwright.ops.math.matmul import infer_matmul, multiply

DTYPES = (f8e4m3fn, f8e5m2)


def _infer(x: TensorType, w: TensorType) -> TensorType:
    for name, type_ in (("x", x), ("w", w)):
        expect.dtype(name, type_, lambda d: d in DTYPES, "f8e4m3fn or f8e5m2")
    return infer_matmul(x.with_dtype(f32), w.with_dtype(f32))


def _samples() -> list[Sample]:
    x, w = draw(3, 7, low=-9, high=9), draw(7, 5, seed=1, low=-9, high=9)
    four, five = f8e4m3fn.numpy, f8e5m2.numpy
    return [
        sample(x.astype(four), w.astype(four), tolerance=1e-5),
        sample(x.astype(five), w.astype(four), tolerance=1e-5),
        sample(draw(2, 3, 17).astype(four), draw(17, 1, seed=1).astype(four), tolerance=1e-5),
        sample(draw(1, 33).astype(four), draw(33, 16, seed=1).astype(four), tolerance=1e-5),
        sample(draw(0, 7).astype(four), w.astype(four)),
        sample(draw(3, 0).astype(four), draw(0, 5).astype(four)),
    ]


OPDEFS = [
    OpDef(
        "f8_matmul",
        Kind.COMPUTE,
        "x, w",
        infer=_infer,
        reference=multiply,
        takes_epilogue=True,
        fixed_types=True,
        grad=ROUNDS,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1],
        samples=_samples,
        doc="x @ w of float8 values, summed in f32.",
    )
]
