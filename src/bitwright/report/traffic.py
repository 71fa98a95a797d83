"""Bytes that a step reads and writes per buffer, at given sizes.

A view counts its elements, a broadcast axis (stride 0) once, and at most the size of its buffer. A
gather reads at most as many bytes per operand as it writes: only the selected rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bitwright.ir.dim import evaluate
from bitwright.lir.buffer import Buffer, View
from bitwright.lir.plan import byte_size
from bitwright.lir.schedule import KernelStep, Step


@dataclass(frozen=True)
class Traffic:
    reads: dict[str, int]
    writes: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


def view_bytes(view: View, bindings: Mapping[str, int]) -> int:
    """Bytes of the distinct elements of a view."""
    count = 1
    for size, stride in zip(view.shape, view.strides, strict=True):
        if evaluate(stride, bindings) != 0:
            count *= evaluate(size, bindings)
    return count * max(view.dtype.bits, 8) // 8


def traffic(step: Step, bindings: Mapping[str, int], is_lookup: bool) -> Traffic:
    """The bytes that a step reads and writes."""
    if isinstance(step, KernelStep):
        views: list[View] = list(step.pointers.values())
    else:
        given = (*step.inputs, *getattr(step, "outputs", ()))
        views = [view for view in given if view is not None]
    sums = _sums(views, bindings)
    writes = {b.name: sums[b] for b in step.writes}
    reads = {b.name: sums[b] for b in step.reads if b.name not in writes}
    if is_lookup and writes:
        most = sum(writes.values())
        reads = {name: min(nbytes, most) for name, nbytes in reads.items()}
    return Traffic(reads, writes)


def _sums(views: Iterable[View], bindings: Mapping[str, int]) -> dict[Buffer, int]:
    sums: dict[Buffer, int] = {}
    for view in views:
        sums[view.buffer] = sums.get(view.buffer, 0) + view_bytes(view, bindings)
    return {b: min(nbytes, byte_size(b, bindings)) for b, nbytes in sums.items()}
