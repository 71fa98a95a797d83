"""The memory plan: arena offsets from live ranges, for one set of sizes.

A buffer lives from the first step that writes it to the last that reads it. Buffers that live at
the same time never overlap; large ones are placed first, each at the lowest offset that is free for
its whole life. The lower bound is the most bytes that live at once.

When buffers live does not depend on sizes: a `Planner` finds it out once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.errors import GraphError, RunError
from bitwright.ir.dim import evaluate
from bitwright.ir.size_list import SizeList
from bitwright.lir.buffer import Buffer, Storage
from bitwright.lir.schedule import Schedule

ALIGN = 64


@dataclass(frozen=True)
class Life:
    """The steps at which a buffer begins and ends to be needed; results are to the end."""

    buffer: Buffer
    first: int
    last: int

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
    return _checked(buffer, evaluate(buffer.count, bindings) * _element_bytes(buffer))


def _checked(buffer: Buffer, nbytes: int) -> int:
    if nbytes < 0:
        raise RunError(f"{buffer.name!r} would have a negative size")
    return nbytes


def _element_bytes(buffer: Buffer) -> int:
    return max(buffer.dtype.bits, 8) // 8


def lives(schedule: Schedule) -> list[Life]:
    """The live ranges of arena buffers, in steps."""
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
    return [Life(b, first[b], last[b]) for b in first if b.storage is Storage.ARENA]


def plan(schedule: Schedule, bindings: Mapping[str, int]) -> Plan:
    """Offsets for every arena buffer of the schedule."""
    return Planner(schedule).plan(bindings)


class Planner:
    """Plans the arena of one schedule, for any sizes."""

    def __init__(self, schedule: Schedule) -> None:
        self.lives = lives(schedule)
        self._sizes = SizeList()
        self._counts = [self._sizes.add(life.buffer.count) for life in self.lives]
        self._element_bytes = [_element_bytes(life.buffer) for life in self.lives]

    def plan(self, bindings: Mapping[str, int]) -> Plan:
        sizes = self._sizes.values(bindings)
        rows = zip(self.lives, self._counts, self._element_bytes, strict=True)
        nbytes = [_checked(life.buffer, sizes[count] * element) for life, count, element in rows]
        begins = [0] * len(nbytes)
        taken: list[tuple[int, int, int, int]] = []
        """Begin and aligned end, first and last step of what is placed, sorted by where it lies."""
        for number in sorted(range(len(nbytes)), key=lambda n: (-nbytes[n], self.lives[n].first)):
            life, needed, offset = self.lives[number], nbytes[number], 0
            first, last = life.first, life.last
            for begin, end, from_, to in taken:
                if begin >= offset + needed:
                    break
                if end > offset and from_ <= last and first <= to:
                    offset = end
            begins[number] = offset
            insort(taken, (offset, _aligned(offset + needed), first, last))
        self._verify(begins, nbytes)
        buffers = [life.buffer for life in self.lives]
        return Plan(
            dict(zip(buffers, begins, strict=True)),
            dict(zip(buffers, nbytes, strict=True)),
            max((end for _, end, *_ in taken), default=0),
            self._lower_bound(nbytes),
        )

    def _lower_bound(self, nbytes: Sequence[int]) -> int:
        changes: dict[int, int] = {}
        for life, size in zip(self.lives, nbytes, strict=True):
            changes[life.first] = changes.get(life.first, 0) + size
            changes[life.last + 1] = changes.get(life.last + 1, 0) - size
        live = most = 0
        for step in sorted(changes):
            live += changes[step]
            most = max(most, live)
        return most

    def _verify(self, begins: Sequence[int], nbytes: Sequence[int]) -> None:
        """No two buffers that live together overlap."""
        order = sorted(range(len(begins)), key=begins.__getitem__)
        for index, number in enumerate(order):
            end = begins[number] + nbytes[number]
            for other in order[index + 1 :]:
                if begins[other] >= end:
                    break
                one, two = self.lives[number], self.lives[other]
                if nbytes[number] and nbytes[other] and one.meets(two):
                    raise GraphError(
                        f"the memory plan lays {one.buffer.name} over {two.buffer.name}"
                    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
