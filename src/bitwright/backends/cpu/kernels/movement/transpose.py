"""Transposes square tiles in registers.

`transposed(f, rows)` takes n vectors of n lanes and returns the n columns. Within each 16-byte part
of a register, rows are interleaved pairwise, by one element, by two, …, until every part holds a
column; then whole parts are exchanged between registers. Each step is one instruction on x86
(unpack, permute of 128-bit parts) and on NEON (zip).
"""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.backends.cpu.codegen.emit import Function, Value
from bitwright.target import Target

PART_BYTES = 16


def tile_lanes(target: Target, width: int, shortest: int) -> int:
    """The tile side for elements of `width` bytes on an axis of size `shortest`; 0 for none.

    All rows of a tile fit into registers.
    """
    most = 16 if target.vector_registers >= 32 else 8
    lanes = max(2, min(most, target.vector_bytes // width))
    while lanes > shortest:
        lanes //= 2
    return lanes if lanes >= 4 or lanes * width >= PART_BYTES else 0


def transposed(f: Function, rows: Sequence[Value]) -> list[Value]:
    count, width = len(rows), rows[0].type.bytes
    part = min(count, PART_BYTES // width)
    groups = [[row] for row in rows]
    unit = 1
    while unit < part:
        groups = [
            [half for a, b in zip(first, second, strict=True) for half in _zip(f, a, b, part, unit)]
            for first, second in zip(groups[::2], groups[1::2], strict=True)
        ]
        unit *= 2
    columns: list[list[Value]] = [
        _exchange(f, members, part) for members in zip(*groups, strict=True)
    ]
    return [column[number] for number in range(count // part) for column in columns]


def _zip(f: Function, a: Value, b: Value, part: int, unit: int) -> tuple[Value, Value]:
    """The lower and the upper halves of each part of a and b, interleaved in units."""
    lanes = a.type.lanes
    orders: list[list[int]] = [[], []]
    for start in range(0, lanes, part):
        for half, order in enumerate(orders):
            for group in range(part // 2 // unit):
                first = start + half * part // 2 + group * unit
                order += range(first, first + unit)
                order += range(lanes + first, lanes + first + unit)
    return f.shuffle(a, orders[0], b), f.shuffle(a, orders[1], b)


def _exchange(f: Function, members: Sequence[Value], part: int) -> list[Value]:
    """Transpose of parts: vector q, part p becomes vector p, part q."""

    def pick(a: Value, b: Value, *parts: int) -> Value:
        return f.shuffle(a, [p * part + lane for p in parts for lane in range(part)], b)

    if len(members) == 1:
        return list(members)
    if len(members) == 2:
        a, b = members
        return [pick(a, b, 0, 2), pick(a, b, 1, 3)]
    a, b, c, d = members
    first, second = pick(a, b, 0, 1, 4, 5), pick(a, b, 2, 3, 6, 7)
    third, fourth = pick(c, d, 0, 1, 4, 5), pick(c, d, 2, 3, 6, 7)
    return [
        pick(first, third, 0, 2, 4, 6),
        pick(first, third, 1, 3, 5, 7),
        pick(second, fourth, 0, 2, 4, 6),
        pick(second, fourth, 1, 3, 5, 7),
    ]
