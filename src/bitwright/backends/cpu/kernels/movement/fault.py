"""Indices that a kernel cannot use: it reads or writes elsewhere, and notes the fault.

    place = checked_index(f, index, size)       # from 0 to size - 1 whatever the index is

A kernel that uses this has the slots `FAULT_SLOTS` and the pointer `fault` (`Lowering.fault`).
"""

from __future__ import annotations

from collections.abc import Callable

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i64

FAULT_SLOTS = ("node",)
"""The number of the node, as `Lowering.number` gives it."""


def record_fault(f: Kernel, index: Value) -> None:
    """Write down an index that is outside; of several, any one stays."""
    fault = f.args.pointer("fault")
    f.store(index, fault, 1)
    f.store(f.args.size("node"), fault, 0)


def checked_index(f: Kernel, index: Value, size: Value, signed: bool = True) -> Value:
    """The index counted from the front (negative ones count from the end); 0 for one outside."""
    index = f.convert(index, i64, signed)
    place = f.select(f.lt(index, 0), index + size, index)
    outside = f.uge(place, size)
    with f.if_(outside):
        record_fault(f, index)
    return f.select(outside, 0, place)


def unless_empty(
    f: Kernel, count: Value, begin: Value, end: Value, emit: Callable[[], None]
) -> None:
    """Emit what reads a tensor of `count` elements; where it has none, work to do is a fault."""
    with f.if_(f.gt(count, 0)) as branch:
        emit()
    with branch.else_(), f.if_(f.lt(begin, end)):
        record_fault(f, f.index(0))
