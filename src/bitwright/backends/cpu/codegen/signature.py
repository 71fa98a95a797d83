"""The arguments of a kernel: named slots of eight bytes each.

    void kernel(ptr args, i64 thread, i64 threads)

`args` is an array of slots: buffer addresses, sizes and strides (i64), and the bits of scalars.
The kernel declares the slots; the planner fills them in the same order:

    signature = Signature(pointers=("x", "y"), sizes=("count",))
    table = signature.pack(x=x.ctypes.data, y=y.ctypes.data, count=x.size)     # uint64[3]
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.errors import CompileError

SLOT_BYTES = 8


@dataclass(frozen=True)
class Slot:
    name: str
    kind: str
    """pointer, size (i64), f32 or f64"""


@dataclass(frozen=True)
class Signature:
    """The order of a kernel's slots: pointers, then sizes, then scalars."""

    slots: tuple[Slot, ...]

    def __init__(
        self,
        pointers: Iterable[str] = (),
        sizes: Iterable[str] = (),
        f32: Iterable[str] = (),
        f64: Iterable[str] = (),
    ) -> None:
        kinds = {"pointer": pointers, "size": sizes, "f32": f32, "f64": f64}
        self._set(Slot(name, kind) for kind, names in kinds.items() for name in names)

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Signature:
        made = cls()
        made._set(slots)
        return made

    def _set(self, given: Iterable[Slot]) -> None:
        slots = tuple(given)
        if len({slot.name for slot in slots}) != len(slots):
            raise CompileError("two slots of a kernel have the same name", found=slots)
        object.__setattr__(self, "slots", slots)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {slot.name: position for position, slot in enumerate(self.slots)}

    def position(self, name: str, kind: str = "") -> int:
        """The slot's index in the table."""
        at = self._positions.get(name)
        if at is None or (kind and self.slots[at].kind != kind):
            raise CompileError(
                f"the kernel has no {kind or 'slot'} {name!r}", expected=list(self._positions)
            )
        return at

    def pack(self, **values: float) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """A table with every slot filled."""
        table = np.zeros(len(self.slots), np.uint64)
        self.fill(table, **values)
        if len(values) != len(self.slots):
            missing = [slot.name for slot in self.slots if slot.name not in values]
            raise CompileError("slots of a kernel were not filled", found=", ".join(missing))
        return table

    def fill(self, table: np.ndarray[Any, np.dtype[np.uint64]], **values: float) -> None:
        """Set the named slots of a table."""
        for name, value in values.items():
            at = self.position(name)
            table[at] = _bits(self.slots[at].kind, value)


def _bits(kind: str, value: float) -> int:
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if kind == "f64":
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    return int(value) & 0xFFFFFFFFFFFFFFFF
