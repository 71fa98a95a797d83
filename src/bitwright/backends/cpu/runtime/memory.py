"""Where the buffers of a schedule really lie during a run.

`Planned` places arena buffers by a memory plan, for sizes that the inputs fix. `Grown` gives each
buffer memory of its own when it is first touched, for schedules whose sizes the data decides.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitwright.ir.allocation import no_memory, require_bytes
from bitwright.ir.dim import evaluate
from bitwright.lir.buffer import Buffer, Storage, View
from bitwright.lir.plan import Plan, byte_size

Array = np.ndarray[Any, Any]
ALIGN = 64
LARGE = 1 << 16
"""Bytes from which on an array is worth an alignment that numpy does not promise."""


def new_array(shape: tuple[int, ...], element: Any) -> Array:
    """A new array of a shape that there may be (`require_room`); a large one begins at a cache
    line, which whole vectors then fill."""
    nbytes = math.prod(shape) * np.dtype(element).itemsize
    if nbytes < LARGE:
        return np.empty(shape, element)
    made: Array = _aligned(nbytes, "a result").view(element).reshape(shape)
    return made


def allocate(nbytes: int) -> Array:
    """Bytes at a 64-byte boundary; too many are an error, not a crash."""
    what = "a run"
    require_bytes(nbytes, what)
    return _aligned(nbytes, what)


def _aligned(nbytes: int, what: str) -> Array:
    try:
        room = np.empty(nbytes + ALIGN, np.uint8)
    except (MemoryError, ValueError):  # ValueError: more than an array can hold
        raise no_memory(nbytes, what) from None
    start = -room.ctypes.data % ALIGN
    return room[start : start + nbytes]


def address_of(array: Array) -> int:
    """Where an array's elements begin."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


class Memory:
    """Buffers as byte arrays; inputs, outputs and states are set for each run."""

    def __init__(self, bindings: dict[str, int]) -> None:
        self.bindings = bindings
        self._given: dict[Buffer, Array] = {}

    def give(self, buffer: Buffer, array: Array) -> None:
        """This array is the buffer for the next run."""
        self._given[buffer] = array

    def raw(self, buffer: Buffer) -> Array:
        """The array that holds a buffer, of any shape."""
        if buffer.storage is Storage.CONSTANT and buffer.array is not None:
            return buffer.array
        return self._given[buffer]

    def array(self, view: View) -> Array:
        """A view as a numpy array that shares its memory."""
        element = view.dtype.numpy
        flat = self.raw(view.buffer).reshape(-1).view(element)
        shape = tuple(evaluate(size, self.bindings) for size in view.shape)
        strides = tuple(evaluate(size, self.bindings) * element.itemsize for size in view.strides)
        if 0 in shape:
            return np.empty(shape, element)
        start = evaluate(view.offset, self.bindings) * element.itemsize
        return np.ndarray(shape, element, flat, start, strides)

    def range(self, buffer: Buffer) -> tuple[int, int]:
        """The addresses where a buffer begins and ends."""
        raw = self.raw(buffer)
        start = address_of(raw)
        return start, start + raw.nbytes


class Planned(Memory):
    """Arena buffers at the offsets of a plan, in one array."""

    def __init__(self, bindings: dict[str, int], plan: Plan, arena: Array) -> None:
        super().__init__(bindings)
        self.plan, self.arena = plan, arena
        self._start = address_of(arena)

    def raw(self, buffer: Buffer) -> Array:
        if buffer.storage is not Storage.ARENA:
            return super().raw(buffer)
        start = self.plan.offsets[buffer]
        return self.arena[start : start + self.plan.nbytes[buffer]]

    def range(self, buffer: Buffer) -> tuple[int, int]:
        if buffer.storage is not Storage.ARENA:
            return super().range(buffer)
        start = self._start + self.plan.offsets[buffer]
        return start, start + self.plan.nbytes[buffer]


class Grown(Memory):
    """Every arena buffer in memory of its own, made when it is first asked for."""

    def raw(self, buffer: Buffer) -> Array:
        if buffer.storage is Storage.ARENA and buffer not in self._given:
            self._given[buffer] = allocate(byte_size(buffer, self.bindings))
        return super().raw(buffer)
