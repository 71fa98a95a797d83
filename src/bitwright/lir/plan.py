"""The memory plan: arena offsets from live ranges, for one set of sizes.

A buffer lives from the first step that writes it to the last that reads it. Buffers that live at
the same time never overlap; large ones are placed first, each at the lowest offset that is free for
its whole life. The lower bound is the most bytes that live at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.errors import GraphError
from bitwright.ir.dim import evaluate
from bitwright.lir.buffer import Buffer, Place
from bitwright.lir.schedule import Schedule

ALIGN = 64


@dataclass(frozen=True)
class Life:
    buffer: Buffer
    first: int
    last: int
    nbytes: int

    def meets(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Plan:
    offsets: Mapping[Buffer, int]
    nbytes: Mapping[Buffer, int]
    total: int
    lower_bound: int


def byte_size(buffer: Buffer, bindings: Mapping[str, int]) -> int:
    """Bytes a buffer takes; elements narrower than a byte are held one a byte."""
    return evaluate(buffer.count, bindings) * max(buffer.dtype.bits, 8) // 8


def lives(schedule: Schedule, bindings: Mapping[str, int]) -> list[Life]:
    """The live ranges of arena buffers, in steps; results live to the end."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for number, step in enumerate(schedule.steps):
        for buffer in (*step.writes, *step.reads):
            first.setdefault(buffer, number)
            last[buffer] = number
    end = len(schedule.steps)
    for view in (*schedule.outputs.values(), *schedule.updates.values()):
        first.setdefault(view.buffer, 0)
        last[view.buffer] = end
    return [
        Life(b, first[b], last[b], byte_size(b, bindings)) for b in first if b.place is Place.ARENA
    ]


def plan(schedule: Schedule, bindings: Mapping[str, int]) -> Plan:
    """Offsets for every arena buffer of the schedule."""
    ranges = lives(schedule, bindings)
    placed: list[tuple[Life, int]] = []
    taken: list[tuple[int, int, int, int]] = []
    """First and last step, begin and aligned end of what is placed: plain numbers, since every
    buffer looks at all that were placed before it."""
    for life in sorted(ranges, key=lambda r: (-r.nbytes, r.first)):
        first, last, nbytes, offset = life.first, life.last, life.nbytes, 0
        meeting = [(at, end) for f, t, at, end in taken if f <= last and first <= t]
        for at, end in sorted(meeting):
            if offset + nbytes <= at:
                break
            offset = max(offset, end)
        placed.append((life, offset))
        taken.append((first, last, offset, _aligned(offset + nbytes)))
    result = Plan(
        {life.buffer: offset for life, offset in placed},
        {life.buffer: life.nbytes for life in ranges},
        max((_aligned(offset + life.nbytes) for life, offset in placed), default=0),
        _lower_bound(ranges),
    )
    _verify(placed)
    return result


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _lower_bound(ranges: list[Life]) -> int:
    changes: dict[int, int] = {}
    for life in ranges:
        changes[life.first] = changes.get(life.first, 0) + life.nbytes
        changes[life.last + 1] = changes.get(life.last + 1, 0) - life.nbytes
    live = most = 0
    for step in sorted(changes):
        live += changes[step]
        most = max(most, live)
    return most


def _verify(placed: list[tuple[Life, int]]) -> None:
    """No two buffers that live together overlap."""
    ordered = sorted(placed, key=lambda pair: pair[1])
    for index, (life, offset) in enumerate(ordered):
        for other, at in ordered[index + 1 :]:
            if at >= offset + life.nbytes:
                break
            if life.meets(other) and life.nbytes and other.nbytes:
                raise GraphError(
                    f"the memory plan lays {life.buffer.name} over {other.buffer.name}"
                )
