"""Elementwise functions of 8-bit integers as 256-entry tables.

    lookup_table    y = table[bits of x]

The entries are in the order of the bits: 0 … 127 and then, for i8, -128 … -1.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.opdef import ROUNDS, Array, Kind, OpDef, Sample, draw, sample

ENTRIES = 256


def _infer(x: TensorType, table: TensorType) -> TensorType:
    for name, type_ in (("x", x), ("table", table)):
        expect.dtype(name, type_, lambda d: d.is_integer and d.bits == 8, "i8 or u8")
    expect.rank("table", table, 1)
    expect.size("the number of entries", table.shape[0], ENTRIES)
    return x.with_dtype(table.dtype)


def _lookup_table(x: Array, table: Array) -> Array:
    return np.asarray(table[np.ascontiguousarray(x).view(np.uint8)])


def _samples() -> list[Sample]:
    unsigned = draw(ENTRIES, dtype="u8", seed=3, low=0, high=255)
    signed = draw(ENTRIES, dtype="i8", seed=4, low=-128, high=127)
    x = draw(3, 5, dtype="u8", low=0, high=255)
    return [
        sample(x, unsigned),
        sample(draw(2, 3, 7, dtype="i8", low=-128, high=127), signed),
        sample(np.arange(-128, 128).astype(np.int8), unsigned),
        sample(draw(0, 3, dtype="u8"), signed),
    ]


OPDEFS = [
    OpDef(
        "lookup_table",
        Kind.MOVEMENT,
        "x, table",
        infer=_infer,
        reference=_lookup_table,
        grad=ROUNDS,
        samples=_samples,
        doc="table[x] for 8-bit integers x; the 256 entries are in the order of the bits of x.",
    )
]
