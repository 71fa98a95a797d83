"""Step tables: what the native runner reads, one row per kernel call.

    row    address of the kernel, address of its slots, flags: see `runtime`
    slots  addresses and sizes, eight bytes each, in the order of the kernel's signature

Threads meet behind a step only where a later one touches memory that it, or a step since the last
meeting, has written (or would overwrite what one of them reads). Steps that touch so few bytes that
a meeting costs more than sharing them out saves are done by one thread; as many as follow each
other need no meeting in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.backends.cpu.memory import Memory, address_of
from bitwright.backends.cpu.shared_block import ALONE, BARRIER_AFTER
from bitwright.backends.cpu.signature import Signature
from bitwright.ir.dim import evaluate
from bitwright.lir.buffer import Buffer, Place
from bitwright.lir.schedule import KernelStep

Array = np.ndarray[Any, Any]
ROW = 3
Range = tuple[int, int]


class StepTable:
    """A stretch of kernel calls, ready to run."""

    def __init__(
        self,
        steps: Sequence[KernelStep],
        addresses: Mapping[str, int],
        signatures: Mapping[str, Signature],
        memory: Memory,
        small: int = 0,
    ) -> None:
        """A step that touches `small` bytes or fewer is not shared out."""
        self.steps, self.memory = steps, memory
        self.count = len(steps)
        counts = [len(signatures[step.kernel].slots) for step in steps]
        self.rows = np.zeros(ROW * len(steps), np.uint64)
        self.address = int(self.rows.ctypes.data)
        self.slots = np.zeros(sum(counts), np.uint64)
        self._moving: dict[Buffer, list[tuple[int, int]]] = {}
        self._ranges: dict[Buffer, Range] = {}
        base, at = int(self.slots.ctypes.data), 0
        for number, (step, count) in enumerate(zip(steps, counts, strict=True)):
            self.rows[ROW * number] = addresses[step.kernel]
            self.rows[ROW * number + 1] = base + 8 * at
            self._fill(step, signatures[step.kernel], at)
            at += count
        self._place_barriers(small)
        self.is_alone = bool(np.all(self.rows[ROW - 1 :: ROW] & ALONE))
        """Whether no step is worth sharing out."""

    def _fill(self, step: KernelStep, signature: Signature, at: int) -> None:
        for position, slot in enumerate(signature.slots, at):
            view = step.pointers.get(slot.name)
            if view is None:
                value = evaluate(step.sizes[slot.name], self.memory.bindings)
                self.slots[position] = value & 0xFFFFFFFFFFFFFFFF
            elif view.buffer.place in (Place.ARENA, Place.CONSTANT):
                self.slots[position] = self.memory.address(view)
            else:
                places = self._moving.setdefault(view.buffer, [])
                places.append((position, self.memory.offset(view)))

    def set_addresses(self) -> None:
        """Fill in where inputs, outputs and states lie this time."""
        slots, raw = self.slots, self.memory.raw
        for buffer, places in self._moving.items():
            address = address_of(raw(buffer))
            for position, offset in places:
                slots[position] = address + offset

    def _range(self, buffer: Buffer) -> Range:
        """A buffer's bytes; those outside the arena get a place of their own by identity."""
        if buffer.place is not Place.ARENA:
            return -id(buffer), 1 - id(buffer)
        if buffer not in self._ranges:
            raw = self.memory.raw(buffer)
            start = address_of(raw)
            self._ranges[buffer] = start, start + raw.nbytes
        return self._ranges[buffer]

    def _place_barriers(self, small: int) -> None:
        read: list[Range] = []
        written: list[Range] = []
        flags = self.rows[ROW - 1 :: ROW]
        for number, step in enumerate(self.steps):
            alone = ALONE if small and self._touched(step) <= small else 0
            reads = [self._range(b) for b in step.reads if b.place is not Place.CONSTANT]
            writes = [self._range(b) for b in step.writes]
            changes = number > 0 and flags[number - 1] != alone
            depends = _overlap(reads, written) or _overlap(writes, [*read, *written])
            if changes or (depends and not alone):
                flags[number - 1] |= BARRIER_AFTER
                read, written = [], []
            flags[number] = alone
            read += reads
            written += writes

    def _touched(self, step: KernelStep) -> int:
        """Bytes that a step reads and writes at most."""
        bindings = self.memory.bindings
        return sum(
            math.prod([evaluate(size, bindings) for size in view.shape]) * view.dtype.numpy.itemsize
            for view in step.pointers.values()
        )


def _overlap(some: list[Range], others: list[Range]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)
