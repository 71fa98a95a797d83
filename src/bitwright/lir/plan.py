"""The memory plan: arena offsets from live ranges, for one set of sizes.

A buffer is live from its first write to its last read. Buffers with intersecting live ranges never
overlap. Large buffers are placed first, each at the lowest free offset. The lower bound is the
maximum number of live bytes.

Live ranges do not depend on sizes: a `Planner` computes them once.
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
class LiveRange:
    """The first and last step that use a buffer; outputs are live to the end."""

    buffer: Buffer
    first: int
    last: int

    def intersects(self, other: LiveRange) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Plan:
    offsets: Mapping[Buffer, int]
    nbytes: Mapping[Buffer, int]
    total: int
    lower_bound: int


def byte_size(buffer: Buffer, bindings: Mapping[str, int]) -> int:
    """The bytes of a buffer; elements narrower than a byte take a whole byte."""
    return _checked(buffer, evaluate(buffer.count, bindings) * _element_bytes(buffer))


def _checked(buffer: Buffer, nbytes: int) -> int:
    if nbytes < 0:
        raise RunError(f"{buffer.name!r} has a negative size")
    return nbytes


def _element_bytes(buffer: Buffer) -> int:
    return max(buffer.dtype.bits, 8) // 8


def live_ranges(schedule: Schedule) -> list[LiveRange]:
    """The live ranges of arena buffers."""
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
    return [LiveRange(b, first[b], last[b]) for b in first if b.storage is Storage.ARENA]


def plan(schedule: Schedule, bindings: Mapping[str, int]) -> Plan:
    """The memory plan of a schedule."""
    return Planner(schedule).plan(bindings)


class Planner:
    """Plans the arena of one schedule for any sizes."""

    def __init__(self, schedule: Schedule, align: int = ALIGN) -> None:
        self.align = align
        self.ranges = live_ranges(schedule)
        self._sizes = SizeList()
        self._counts = [self._sizes.add(live.buffer.count) for live in self.ranges]
        self._element_bytes = [_element_bytes(live.buffer) for live in self.ranges]
        pairs = zip(self._counts, self._element_bytes, strict=True)
        self._distinct = {pair: live.buffer for pair, live in zip(pairs, self.ranges, strict=True)}
        """A buffer of each count and element width."""

    def fits(self, plan: Plan, bindings: Mapping[str, int]) -> bool:
        """Whether the buffers of a plan hold what these sizes need."""
        sizes = self._sizes.values(bindings)
        return all(
            0 <= sizes[count] * element <= plan.nbytes[buffer]
            for (count, element), buffer in self._distinct.items()
        )

    def plan(self, bindings: Mapping[str, int]) -> Plan:
        sizes = self._sizes.values(bindings)
        rows = zip(self.ranges, self._counts, self._element_bytes, strict=True)
        nbytes = [_checked(live.buffer, sizes[count] * element) for live, count, element in rows]
        begins = [0] * len(nbytes)
        taken: list[tuple[int, int, int, int]] = []
        """Begin, aligned end, first and last step of placed buffers, sorted by begin."""
        for number in sorted(range(len(nbytes)), key=lambda n: (-nbytes[n], self.ranges[n].first)):
            live, needed, offset = self.ranges[number], nbytes[number], 0
            first, last = live.first, live.last
            for begin, end, from_, to in taken:
                if begin >= offset + needed:
                    break
                if end > offset and from_ <= last and first <= to:
                    offset = end
            begins[number] = offset
            insort(taken, (offset, _aligned(offset + needed, self.align), first, last))
        self._verify(begins, nbytes)
        buffers = [live.buffer for live in self.ranges]
        return Plan(
            dict(zip(buffers, begins, strict=True)),
            dict(zip(buffers, nbytes, strict=True)),
            max((end for _, end, *_ in taken), default=0),
            self._lower_bound(nbytes),
        )

    def _lower_bound(self, nbytes: Sequence[int]) -> int:
        changes: dict[int, int] = {}
        for live, size in zip(self.ranges, nbytes, strict=True):
            changes[live.first] = changes.get(live.first, 0) + size
            changes[live.last + 1] = changes.get(live.last + 1, 0) - size
        current = most = 0
        for step in sorted(changes):
            current += changes[step]
            most = max(most, current)
        return most

    def _verify(self, begins: Sequence[int], nbytes: Sequence[int]) -> None:
        """Raise a `GraphError` if two live buffers overlap."""
        order = sorted(range(len(begins)), key=begins.__getitem__)
        for index, number in enumerate(order):
            end = begins[number] + nbytes[number]
            for other in order[index + 1 :]:
                if begins[other] >= end:
                    break
                one, two = self.ranges[number], self.ranges[other]
                if nbytes[number] and nbytes[other] and one.intersects(two):
                    raise GraphError(
                        f"in the memory plan {one.buffer.name} overlaps {two.buffer.name}"
                    )


def _aligned(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
