"""Step tables: what the native runner reads, one row per kernel call.

    row    address of the kernel, address of its slots, flags: see `runtime`
    slots  addresses and sizes, eight bytes each, in the order of the kernel's signature

A `Stretch` is what the tables of the same steps have in common for all sizes: the slots that are
constant, and what the others hold by numbers of sizes and of buffers. A `StepTable` is a stretch
for one set of sizes, in the memory that was planned for them.

Threads meet behind a step only where a later one touches memory that it, or a step since the last
meeting, has written (or would overwrite what one of them reads). Steps that touch so few bytes that
a meeting costs more than sharing them out saves are done by one thread; as many as follow each
other need no meeting in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.signature import SLOT_BYTES, Signature
from bitwright.backends.cpu.runtime.memory import Memory, address_of
from bitwright.backends.cpu.runtime.shared_block import ALONE, BARRIER_AFTER, step_table
from bitwright.ir.dim import Dim, Size
from bitwright.ir.size_list import SizeList
from bitwright.lir.buffer import Buffer, Storage, View
from bitwright.lir.schedule import KernelStep, PythonStep, Schedule

Array = np.ndarray[Any, Any]
ROW = 3
_BITS = (1 << 64) - 1
_HELD = (Storage.ARENA, Storage.CONSTANT)
"""Memory that stays where it is from run to run."""
Range = tuple[int, int]


class KernelSegment:
    """Kernel calls behind each other, and what holds of their table for all sizes."""

    def __init__(
        self,
        steps: Sequence[KernelStep],
        addresses: Mapping[str, int],
        signatures: Mapping[str, Signature],
    ) -> None:
        self.steps = steps
        self.sizes = SizeList()
        self._numbers: dict[Buffer, int] = {}
        sized: list[tuple[int, int]] = []
        placed: list[tuple[int, int, int, int]] = []
        shapes: dict[tuple[Size, ...], int] = {}
        self.moving: list[tuple[int, Buffer, int, int]] = []
        """Slots that each run sets: position, buffer, number of the offset, bytes an element."""
        rows, slots = [], list[int]()
        for step in steps:
            rows.append((addresses[step.kernel], SLOT_BYTES * len(slots), 0))
            for slot in signatures[step.kernel].slots:
                at, value = len(slots), 0
                view = step.pointers.get(slot.name)
                if view is None:
                    size = step.sizes[slot.name]
                    if isinstance(size, Dim):
                        sized.append((at, self.sizes.add(size)))
                    else:
                        value = int(size) & _BITS
                elif view.buffer.array is not None and not isinstance(view.offset, Dim):
                    value = address_of(view.buffer.array) + view.offset * view.dtype.numpy.itemsize
                elif view.buffer.storage in _HELD:
                    placed.append((at, self.buffer(view.buffer), *self._offset(view)))
                else:
                    self.moving.append((at, view.buffer, *self._offset(view)))
                slots.append(value)
        self.rows, self.slots = step_table(rows), np.array(slots, np.uint64)
        self.sized = np.array(sized, np.intp).reshape(-1, 2).T
        """Slots that hold a size: position, number of the size."""
        self.placed = np.array(placed, np.intp).reshape(-1, 4).T
        """Slots that hold an address: position, numbers of buffer and offset, bytes an element."""
        self.reads = [
            [self.buffer(b) for b in step.reads if b.storage is not Storage.CONSTANT]
            for step in steps
        ]
        self.writes = [[self.buffer(buffer) for buffer in step.writes] for step in steps]
        self.touched = [
            [
                (shapes.setdefault(view.shape, len(shapes)), view.dtype.numpy.itemsize)
                for view in step.pointers.values()
            ]
            for step in steps
        ]
        """For each step: number of the shape and bytes an element of all that it touches."""
        self.shapes = [[self.sizes.add(size) for size in shape] for shape in shapes]

    def buffer(self, buffer: Buffer) -> int:
        """The number of a buffer."""
        return self._numbers.setdefault(buffer, len(self._numbers))

    def _offset(self, view: View) -> tuple[int, int]:
        return self.sizes.add(view.offset), view.dtype.numpy.itemsize

    def ranges(self, memory: Memory) -> list[Range]:
        """The bytes of every buffer; those that each run sets get a place of their own."""
        return [
            memory.range(buffer) if buffer.storage in _HELD else (-number - 1, -number)
            for buffer, number in self._numbers.items()
        ]


def segments_of(schedule: Schedule) -> Iterator[PythonStep | list[KernelStep]]:
    """Runs of kernel calls, and the other steps between them."""
    steps: list[KernelStep] = []
    for step in schedule.steps:
        if isinstance(step, KernelStep):
            steps.append(step)
            continue
        if steps:
            yield steps
            steps = []
        yield step
    if steps:
        yield steps


class StepTable:
    """A stretch of kernel calls, ready to run."""

    def __init__(self, segment: KernelSegment, memory: Memory, small: int = 0) -> None:
        """A step that touches `small` bytes or fewer is not shared out."""
        self.steps, self.memory = segment.steps, memory
        self.count = len(segment.steps)
        values = segment.sizes.values(memory.bindings)
        ranges = segment.ranges(memory)
        self.slots = segment.slots.copy()
        bits = np.array([value & _BITS for value in values], np.uint64)
        starts = np.array([start & _BITS for start, _ in ranges], np.uint64)
        position, size = segment.sized
        self.slots[position] = bits[size]
        position, buffer, offset, element = segment.placed
        self.slots[position] = starts[buffer] + bits[offset] * element.astype(np.uint64)
        self._moving: dict[Buffer, list[tuple[int, int]]] = {}
        for at, moved, number, nbytes in segment.moving:
            self._moving.setdefault(moved, []).append((at, values[number] * nbytes))
        table = segment.rows.copy()
        table[:, 1] += np.uint64(address_of(self.slots))
        table[:, 2] = _flags(segment, ranges, _alone(segment, values, small))
        self.rows = table.reshape(-1)
        self.address = address_of(self.rows)
        self.is_alone = bool(np.all(table[:, 2] & ALONE))
        """Whether no step is worth sharing out."""

    def set_addresses(self) -> None:
        """Fill in where inputs, outputs and states lie this time."""
        slots, raw = self.slots, self.memory.raw
        for buffer, places in self._moving.items():
            address = address_of(raw(buffer))
            for position, offset in places:
                slots[position] = address + offset


def _alone(segment: KernelSegment, values: Sequence[int], small: int) -> list[int]:
    """Which steps touch so few bytes at most that one thread does them, as flags."""
    if not small:
        return [0] * len(segment.steps)
    counts = [math.prod([values[size] for size in shape]) for shape in segment.shapes]
    return [
        ALONE if sum([counts[shape] * element for shape, element in views]) <= small else 0
        for views in segment.touched
    ]


def _flags(segment: KernelSegment, ranges: Sequence[Range], alone: Sequence[int]) -> list[int]:
    """Who does each step, and behind which of them threads meet."""
    flags = list(alone)
    read: list[Range] = []
    written: list[Range] = []
    for number, (reading, writing) in enumerate(zip(segment.reads, segment.writes, strict=True)):
        reads, writes = [ranges[b] for b in reading], [ranges[b] for b in writing]
        changes = number > 0 and alone[number - 1] != alone[number]
        depends = not alone[number] and (
            _overlap(reads, written) or _overlap(writes, read) or _overlap(writes, written)
        )
        if changes or depends:
            flags[number - 1] |= BARRIER_AFTER
            read, written = [], []
        read += reads
        written += writes
    return flags


def _overlap(some: list[Range], others: list[Range]) -> bool:
    for begin, end in some:
        for other_begin, other_end in others:
            if begin < other_end and other_begin < end:
                return True
    return False
