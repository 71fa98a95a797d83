"""Saturating narrowing of neighbouring i32 vectors to one vector of 8-bit integers.

x86       pack pairs to 16 bits, pairs of those to 8 bits, then permute 32-bit groups: five
          instructions for four vectors, where separate narrowing takes three per vector
others    one vector at a time
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Function, Value, i32, storage_type
from bitwright.backends.cpu.codegen.instr import packs
from bitwright.ir.dtype import DType

MOST = 4


def narrowed(f: Function, values: Sequence[Value], to: DType) -> list[Value]:
    """Up to `MOST` vectors in 8 bits: packed into one vector where the target has the instructions
    (for three vectors, the last lanes are undefined), else separately."""
    lanes = values[0].type.lanes
    found = packs(f.target, lanes, to.is_signed)
    if found is None or len(values) == 1:
        return [f.saturated(v, storage_type(to), int(to.min), int(to.max)) for v in values]
    to_words, to_bytes = found
    pairs = [
        to_words(f, values[i], values[min(i + 1, len(values) - 1)])
        for i in range(0, len(values), 2)
    ]
    mixed = f.bitcast(to_bytes(f, pairs[0], pairs[-1]), i32.vector(lanes))
    if lanes == MOST:
        ordered = mixed
    else:  # every 16 bytes hold four elements of each vector
        parts = lanes // 4
        ordered = f.shuffle(mixed, [4 * (i % parts) + i // parts for i in range(lanes)])
    packed = f.bitcast(ordered, storage_type(to).vector(4 * lanes))
    return [f.part(packed, 0, 2 * lanes) if len(values) == 2 else packed]
