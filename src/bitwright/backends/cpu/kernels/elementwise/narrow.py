"""Neighbouring vectors of whole numbers in i32 as one vector of 8-bit codes, saturated.

x86       two by two to 16 bits, again two by two to 8, then 32 bits at a time into order: five
          instructions for four vectors, where narrowing each by itself takes three
others    one by one
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Function, Value, i32, stored
from bitwright.backends.cpu.codegen.instr import packs
from bitwright.ir.dtype import DType

MOST = 4


def narrowed(f: Function, values: Sequence[Value], to: DType) -> list[Value]:
    """The codes of up to `MOST` vectors: together where the target has the instructions, the
    lanes behind the last of three undefined, else each by itself."""
    lanes = values[0].type.lanes
    found = packs(f.target, lanes, to.is_signed)
    if found is None or len(values) == 1:
        return [f.saturated(v, stored(to), int(to.min), int(to.max)) for v in values]
    to_words, to_bytes = found
    pairs = [
        to_words(f, values[i], values[min(i + 1, len(values) - 1)])
        for i in range(0, len(values), 2)
    ]
    mixed = f.bitcast(to_bytes(f, pairs[0], pairs[-1]), i32.vector(lanes))
    if lanes == MOST:
        ordered = mixed
    else:  # every 16 bytes hold four codes of each vector
        parts = lanes // 4
        ordered = f.shuffle(mixed, [4 * (i % parts) + i // parts for i in range(lanes)])
    qvalues = f.bitcast(ordered, stored(to).vector(4 * lanes))
    return [f.part(qvalues, 0, 2 * lanes) if len(values) == 2 else qvalues]
