"""Step tables, which the native runner reads: one row per kernel call.

    row    address of the kernel, address of its slots, flags (see `emitted`)
    slots  addresses and sizes, eight bytes each, in the order of the kernel's signature

A `KernelSegment` holds the parts of a table that do not depend on sizes: constant slots, and the
indices of the sizes and buffers of the others. A `StepTable` is a segment for one set of sizes and
one memory.

A barrier follows a step only if a later step depends on a step since the last barrier (read after
write, write after read, write after write). One thread runs steps that touch so few bytes that a
barrier costs more than the other threads save; consecutive ones need no barrier between them.
"""

from __future__ import annotations

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
_STATIC = (Storage.ARENA, Storage.CONSTANT)
"""Storage whose addresses do not change between runs."""
Range = tuple[int, int]


class KernelSegment:
    """Consecutive kernel calls, and the size-independent parts of their table."""

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
        self.per_run: list[tuple[int, Buffer, int, int]] = []
        """Slots set by each run: position, buffer, index of the offset, bytes per element."""
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
                elif view.buffer.storage in _STATIC:
                    placed.append((at, self.buffer(view.buffer), *self._offset(view)))
                else:
                    self.per_run.append((at, view.buffer, *self._offset(view)))
                slots.append(value)
        self.rows, self.slots = step_table(rows), np.array(slots, np.uint64)
        self.sized = np.array(sized, np.intp).reshape(-1, 2).T
        """Slots that hold a size: position, index of the size."""
        *places, widths = np.array(placed, np.intp).reshape(-1, 4).T
        self.placed: tuple[Array, ...] = (*places, widths.astype(np.uint64))
        """Slots that hold an address: position, indices of buffer and offset, bytes per element."""
        self.reads = [
            [self.buffer(b) for b in step.reads if b.storage is not Storage.CONSTANT]
            for step in steps
        ]
        self.writes = [[self.buffer(buffer) for buffer in step.writes] for step in steps]
        touched = [
            tuple(
                (shapes.setdefault(view.shape, len(shapes)), view.dtype.numpy.itemsize)
                for view in step.pointers.values()
            )
            for step in steps
        ]
        patterns = {pattern: number for number, pattern in enumerate(dict.fromkeys(touched))}
        self.weights = np.zeros((len(patterns), len(shapes)))
        """Bytes per element of the views of a step by their shapes; equal rows once."""
        for number, pattern in enumerate(patterns):
            for shape, element in pattern:
                self.weights[number, shape] += element
        self.pattern_of = [patterns[pattern] for pattern in touched]
        self._place_shapes([[self.sizes.add(size) for size in shape] for shape in shapes])
        self._place_runs()

    def _place_shapes(self, shapes: list[list[int]]) -> None:
        """Sizes of each shape by number, filled up with a size that is 1."""
        one, rank = self.sizes.add(1), max(map(len, shapes), default=0)
        filled = [shape + [one] * (rank - len(shape)) for shape in shapes]
        self.shapes = np.array(filled, np.intp).reshape(len(shapes), rank)

    def _place_runs(self) -> None:
        """Lists the slots that a run sets by buffer."""
        places: dict[Buffer, list[tuple[int, int, int]]] = {}
        for at, given, number, nbytes in self.per_run:
            places.setdefault(given, []).append((at, number, nbytes))
        flat = [place for found in places.values() for place in found]
        self.run_slots = np.array(flat, np.intp).reshape(-1, 3).T
        """Slots that a run sets: positions, indices of the offset, bytes per element."""
        self.places: list[tuple[int, Buffer, slice, Array]] = []
        """Inputs and outputs: number, buffer, range in `run_slots`, positions of its slots."""
        self.state_places: list[tuple[int, Buffer, slice, Array]] = []
        """The same for states."""
        start = 0
        for number, (given, found) in enumerate(places.items()):
            part = slice(start, start := start + len(found))
            kind = self.state_places if given.storage is Storage.STATE else self.places
            kind.append((number, given, part, self.run_slots[0][part].copy()))

    def buffer(self, buffer: Buffer) -> int:
        """The index of a buffer."""
        return self._numbers.setdefault(buffer, len(self._numbers))

    def _offset(self, view: View) -> tuple[int, int]:
        return self.sizes.add(view.offset), view.dtype.numpy.itemsize

    def ranges(self, memory: Memory) -> list[Range]:
        """Address ranges of buffers; those set by each run get distinct artificial ranges."""
        return [
            memory.range(buffer) if buffer.storage in _STATIC else (-number - 1, -number)
            for buffer, number in self._numbers.items()
        ]


def segments_of(schedule: Schedule) -> Iterator[PythonStep | list[KernelStep]]:
    """Consecutive kernel calls as lists, and the other steps between them."""
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
    """A segment for one set of sizes, ready to run."""

    def __init__(
        self,
        segment: KernelSegment,
        memory: Memory,
        small: int = 0,
        like: StepTable | None = None,
    ) -> None:
        """One thread runs steps that touch at most `small` bytes.

        `like` is a table of the segment for other sizes in the same memory plan.
        """
        self.steps, self.memory = segment.steps, memory
        self.count = len(segment.steps)
        values = segment.sizes.values(memory.bindings)
        bits = np.array([value & _BITS for value in values], np.uint64)
        if like is None:
            ranges = segment.ranges(memory)
            self.slots = segment.slots.copy()
            self.starts = np.array([start & _BITS for start, _ in ranges], np.uint64)
            self.flags: dict[Any, tuple[Array, bool]] = {}
            """Flags of all steps in this memory plan by the ALONE flags of their patterns, and
            whether one thread runs all."""
        else:
            self.slots, self.starts, self.flags = like.slots.copy(), like.starts, like.flags
        position, size = segment.sized
        self.slots[position] = bits[size]
        position, buffer, offset, element = segment.placed
        self.slots[position] = self.starts[buffer] + bits[offset] * element
        _, numbers, nbytes = segment.run_slots
        self.segment = segment
        self._token: object = None
        self.offsets = bits[numbers] * nbytes.astype(np.uint64)
        self.last: list[Array | None] = [None] * len(segment.places + segment.state_places)
        """The array of each buffer that runs set, in the last run."""
        if like is not None and np.array_equal(self.offsets, like.offsets):
            self.last, self._token = like.last.copy(), like._token
        alone = _alone(segment, values, small)
        if alone not in self.flags:
            flags = _flags(segment, segment.ranges(memory), [alone[p] for p in segment.pattern_of])
            self.flags[alone] = np.array(flags, np.uint64), all(f & ALONE for f in flags)
        table = segment.rows.copy()
        table[:, 1] += np.uint64(address_of(self.slots))
        table[:, 2], self.is_alone = self.flags[alone]
        self.rows = table.reshape(-1)
        self.address = address_of(self.rows)

    def set_addresses(self) -> None:
        """Set the addresses of inputs, outputs and states for the next run, where they changed."""
        memory, segment = self.memory, self.segment
        self._set(segment.places, memory.given)
        if self._token is None or self._token is not memory.states_token:
            self._set(segment.state_places, memory.given)
            self._token = memory.states_token

    def _set(
        self, places: Sequence[tuple[int, Buffer, slice, Array]], given: Mapping[Buffer, Array]
    ) -> None:
        last = self.last
        for number, buffer, part, positions in places:
            array = given[buffer]
            if array is not last[number]:
                self.slots[positions] = self.offsets[part] + np.uint64(address_of(array))
                last[number] = array


def _alone(segment: KernelSegment, values: Sequence[int], small: int) -> bytes:
    """The ALONE flags of patterns of steps; a step that touches at most `small` bytes has one."""
    if not small:
        return bytes(len(segment.weights))
    with np.errstate(over="ignore", invalid="ignore"):  # far beyond `small`, as floats
        counts = np.array(values, np.float64)[segment.shapes].prod(axis=1)
        is_small = segment.weights @ counts <= small
    return np.where(is_small, np.uint8(ALONE), np.uint8(0)).tobytes()


def _flags(segment: KernelSegment, ranges: Sequence[Range], alone: Sequence[int]) -> list[int]:
    """The flags of all steps: ALONE from `alone`, and barriers from dependences."""
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
