"""The bits of a tensor read as another element type of the same width."""

from __future__ import annotations

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.dtype import DType, Family, dtype, string
from bitwright.ir.types import TensorType
from bitwright.ops.core.numeric import Array
from bitwright.ops.core.opdef import Attr, Kind, NonDifferentiable, OpDef, Sample, draw, sample


def _infer(x: TensorType, to: DType) -> TensorType:
    if string in (x.dtype, to) or x.dtype.bits != to.bits:
        raise InferenceError(
            "the bits cannot be read as another type",
            expected=f"a type of {x.dtype.bits} bits",
            found=to,
        )
    return x.with_dtype(to)


def _bitcast(x: Array, to: DType) -> Array:
    bits = to.bits
    if bits >= 8:
        raw = np.ascontiguousarray(x).reshape(-1)
        return (
            raw.view(np.uint8) != 0 if to.family is Family.BOOL else raw.view(to.numpy)
        ).reshape(x.shape)
    raw_bits: Array = (
        x.view(np.uint8) if dtype(x.dtype).is_float else x.astype(np.int8).view(np.uint8)
    )
    raw_bits = np.asarray(raw_bits & ((1 << bits) - 1), np.uint8)
    if to.is_float:
        return raw_bits.view(to.numpy)
    half = 1 << (bits - 1) if to.is_signed else 0
    return ((raw_bits.astype(np.int8) ^ half) - half).astype(to.numpy)


def _samples() -> list[Sample]:
    return [
        sample(draw(3, 4), to="i32"),
        sample(draw(3, 4, dtype="i64"), to="f64"),
        sample(draw(5, dtype="bf16"), to="u16"),
        sample(draw(2, 3, dtype="i8"), to="f8e4m3fn"),
        sample(draw(6, dtype="i4", low=-8, high=7), to="u4"),
        sample(draw(6, dtype="u4", low=0, high=15), to="f4e2m1"),
        sample(draw(6, dtype="f4e2m1"), to="i4"),
        sample(draw(0, 2), to="u32"),
    ]


OPDEFS = [
    OpDef(
        "bitcast",
        Kind.MOVEMENT,
        "x",
        infer=_infer,
        reference=_bitcast,
        fixed_types=True,
        grad=NonDifferentiable("bits are not numbers"),
        samples=_samples,
        attrs={"to": Attr("dtype")},
        doc="The bits of x as values of another type of the same width.",
    )
]
