"""The memory of a schedule's buffers during a run.

`PlannedMemory` puts arena buffers at the offsets of a memory plan. `DynamicMemory` allocates each
buffer on first use, for schedules with data-dependent sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.allocation import no_memory, require_bytes
from bitwright.ir.dim import evaluate
from bitwright.lir.buffer import Buffer, Storage, View
from bitwright.lir.plan import Plan, byte_size

Array = np.ndarray[Any, Any]
ALIGN = 64
LARGE = 1 << 16
"""Arrays of at least this many bytes are aligned, which numpy does not guarantee."""


def new_array(shape: tuple[int, ...], element: Any) -> Array:
    """A new array; large ones are aligned to a cache line. Check its size with `require_room`."""
    nbytes = math.prod(shape) * np.dtype(element).itemsize
    if nbytes < LARGE:
        return np.empty(shape, element)
    made: Array = _aligned(nbytes, "a result").view(element).reshape(shape)
    return made


def new_zeros(shape: tuple[int, ...], element: Any) -> Array:
    """As `new_array` with zeros; pages of large arrays take memory when they are first written."""
    nbytes = math.prod(shape) * np.dtype(element).itemsize
    if nbytes < LARGE or np.dtype(element) == object:
        return np.zeros(shape, element)
    made: Array = _aligned(nbytes, "a state", np.zeros).view(element).reshape(shape)
    return made


def allocate(nbytes: int) -> Array:
    """An aligned byte array; raises a `RunError` above the memory limit."""
    what = "a run"
    require_bytes(nbytes, what)
    return _aligned(nbytes, what)


def _aligned(nbytes: int, what: str, make: Callable[..., Array] = np.empty) -> Array:
    try:
        room = make(nbytes + ALIGN, np.uint8)
    except (MemoryError, ValueError):  # ValueError: above numpy's limit
        raise no_memory(nbytes, what) from None
    start = -room.ctypes.data % ALIGN
    return room[start : start + nbytes]


def address_of(array: Array) -> int:
    """The address of an array's first element."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


class Memory:
    """Buffers as arrays; inputs, outputs and states are set for each run."""

    def __init__(self, bindings: dict[str, int]) -> None:
        self.bindings = bindings
        self.given: dict[Buffer, Array] = {}
        """The arrays that are set for each run."""
        self.states_token: object = None
        """Identifies the arrays of states (`runtime.states`)."""
        self.small: dict[Buffer, Array] = {}
        """Copies of small inputs, which stay at their place from run to run."""

    def give(self, buffer: Buffer, array: Array) -> None:
        """Set the array of a buffer for the next run."""
        self.given[buffer] = array

    def give_small(self, buffer: Buffer, array: Array) -> None:
        """`give` for an input that is copied, so that its address stays."""
        copy = self.small.get(buffer)
        if copy is None or copy.dtype != array.dtype or copy.shape != array.shape:
            copy = self.small[buffer] = np.empty(array.shape, array.dtype)
        copy[...] = array
        self.given[buffer] = copy

    def raw(self, buffer: Buffer) -> Array:
        """The array of a buffer, of any shape."""
        if buffer.storage is Storage.CONSTANT and buffer.array is not None:
            return buffer.array
        return self.given[buffer]

    def array(self, view: View) -> Array:
        """A view as a numpy array, without a copy."""
        element = view.dtype.numpy
        flat = self.raw(view.buffer).reshape(-1).view(element)
        shape = tuple(evaluate(size, self.bindings) for size in view.shape)
        strides = tuple(evaluate(size, self.bindings) * element.itemsize for size in view.strides)
        if 0 in shape:
            return np.empty(shape, element)
        start = evaluate(view.offset, self.bindings) * element.itemsize
        return np.ndarray(shape, element, flat, start, strides)

    def range(self, buffer: Buffer) -> tuple[int, int]:
        """The begin and end addresses of a buffer."""
        raw = self.raw(buffer)
        start = address_of(raw)
        return start, start + raw.nbytes


class PlannedMemory(Memory):
    """Arena buffers in one array, at the offsets of a plan."""

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


class DynamicMemory(Memory):
    """A separate array for each arena buffer, allocated on first use."""

    def raw(self, buffer: Buffer) -> Array:
        if buffer.storage is Storage.ARENA and buffer not in self.given:
            self.given[buffer] = allocate(byte_size(buffer, self.bindings))
        return super().raw(buffer)
