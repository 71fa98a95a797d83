"""Index checks: an out-of-range index is replaced by a valid one, and a fault is recorded.

    place = checked_index(f, index, size)       # always in 0 … size - 1

A kernel that uses this has the slots `FAULT_SLOTS` and the pointer `fault` (`Lowering.fault`).
"""

from __future__ import annotations

from collections.abc import Callable

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i64

FAULT_SLOTS = ("node",)
"""The number of the node (`Lowering.number`)."""


def record_fault(f: Kernel, index: Value) -> None:
    """Record an out-of-range index; of several, any one remains."""
    fault = f.args.pointer("fault")
    f.store(index, fault, 1)
    f.store(f.args.size("node"), fault, 0)


def checked_index(f: Kernel, index: Value, size: Value, signed: bool = True) -> Value:
    """The index with negative values counted from the end; 0 if it is out of range."""
    index = f.convert(index, i64, signed)
    place = f.select(f.lt(index, 0), index + size, index)
    outside = f.uge(place, size)
    with f.if_(outside):
        record_fault(f, index)
    return f.select(outside, 0, place)


def unless_empty(
    f: Kernel, count: Value, begin: Value, end: Value, emit: Callable[[], None]
) -> None:
    """Run `emit` if the tensor has elements (`count`); else a nonempty range is a fault."""
    with f.if_(f.gt(count, 0)) as branch:
        emit()
    with branch.else_(), f.if_(f.lt(begin, end)):
        record_fault(f, f.index(0))
