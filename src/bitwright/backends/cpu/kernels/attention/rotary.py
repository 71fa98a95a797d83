"""Rotary position embeddings: pairs of features rotated by the angles of their position.

    (a, b) -> (a·cos - b·sin, b·cos + a·sin)

x and y may have any strides with contiguous features; a row is one (batch, head, position). Sources
of the angles:

    "rows"   cos and sin [batch or 1, position, pair], strides `cos.0`, `cos.1`, …
    "table"  cos and sin [positions, pair] indexed by ids[batch, position]; other ids are faults
    "grid"   two pairs of tables: the first half of the features is rotated by the position's row in
             a grid of `columns` columns, the second half by its column
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import computed, i64, storage_type
from bitwright.backends.cpu.codegen.expression import load_computed
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS, record_fault
from bitwright.backends.cpu.lowering.region import address_of, store
from bitwright.ir.dtype import DType

ROWS, TABLE, GRID = "rows", "table", "grid"


@dataclass(frozen=True)
class Rotary:
    element: DType
    features: int
    rotated: int
    interleaved: bool
    angles: str
    ids: DType | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        return ("cos", "sin", "cos_w", "sin_w") if self.angles == GRID else ("cos", "sin")

    @property
    def signature(self) -> Signature:
        pointers = ["x", "y", *self.tables]
        axes = 2 if self.angles == ROWS else 1
        sizes = ["batches", "heads", "positions"]
        sizes += [f"{name}.{axis}" for name in ("x", "y") for axis in range(3)]
        sizes += [f"{name}.{axis}" for name in self.tables for axis in range(axes)]
        if self.angles == TABLE:
            pointers += ["ids", "fault"]
            sizes += ["ids.0", "ids.1", "limit", *FAULT_SLOTS]
        if self.angles == GRID:
            sizes.append("columns")
        return Signature(pointers, sizes)


def emit_rotary(module: Module, name: str, kernel: Rotary) -> Signature:
    with module.kernel(name, kernel.signature) as f:
        heads, positions = f.args.size("heads"), f.args.size("positions")
        begin, end = f.share(f.args.size("batches") * heads * positions)
        with f.loop(begin, end) as loop:
            group, position = f.udiv(loop.index, positions), f.urem(loop.index, positions)
            batch, head = f.udiv(group, heads), f.urem(group, heads)
            _Row(f, kernel, batch, head, position).emit()
    return kernel.signature


class _Row:
    def __init__(
        self, f: Kernel, kernel: Rotary, batch: Value, head: Value, position: Value
    ) -> None:
        self.f, self.kernel = f, kernel
        self.batch, self.position = batch, position
        self.stored = storage_type(kernel.element)
        self.lanes = f.target.lanes(computed(kernel.element).bits)
        self.x, self.y = (
            address_of(f, name, self.stored, (batch, head, position)) for name in ("x", "y")
        )

    def emit(self) -> None:
        f, kernel = self.f, self.kernel
        if kernel.angles == GRID:
            half = kernel.features // 2
            columns = f.args.size("columns")
            row, column = f.udiv(self.position, columns), f.urem(self.position, columns)
            self._rotate(0, half, *self._angles(("cos", "sin"), (row,)))
            self._rotate(half, half, *self._angles(("cos_w", "sin_w"), (column,)))
            return
        index = (self.batch, self.position) if kernel.angles == ROWS else (self._id(),)
        self._rotate(0, kernel.rotated, *self._angles(("cos", "sin"), index))
        for at in range(kernel.rotated, kernel.features, self.lanes):
            mask = self._mask(kernel.features - at)
            rest = load_computed(f, kernel.element, self.lanes, self.x, at, mask=mask)
            store(f, rest, kernel.element, self.y, at, mask)

    def _angles(self, names: tuple[str, str], index: tuple[Value, ...]) -> list[Value]:
        return [address_of(self.f, name, self.stored, index) for name in names]

    def _id(self) -> Value:
        """The table row of this position; 0 for an id out of range."""
        f, element = self.f, self.kernel.ids
        assert element is not None
        address = address_of(f, "ids", storage_type(element), (self.batch, self.position))
        number = f.convert(f.load(storage_type(element), address), i64, element.is_signed)
        outside = f.uge(number, f.args.size("limit"))
        with f.if_(outside):
            record_fault(f, number)
        return f.select(outside, 0, number)

    def _mask(self, left: int) -> Value | None:
        return self.f.mask(self.f.const(i64, left), self.lanes) if left < self.lanes else None

    def _rotate(self, start: int, size: int, cos: Value, sin: Value) -> None:
        """Rotate the pairs of features start … start + size - 1."""
        f, element, lanes = self.f, self.kernel.element, self.lanes
        for pair in range(0, size // 2, lanes):
            left = size // 2 - pair
            mask = self._mask(left)
            c = load_computed(f, element, lanes, cos, pair, mask=mask)
            s = load_computed(f, element, lanes, sin, pair, mask=mask)
            if self.kernel.interleaved:
                places, masks = self._neighbours(start + 2 * pair, 2 * left)
            else:
                places, masks = (start + pair, start + size // 2 + pair), (mask, mask)
            a, b = (
                load_computed(f, element, lanes, self.x, at, mask=m)
                for at, m in zip(places, masks, strict=True)
            )
            if self.kernel.interleaved:
                a, b = _deinterleave(f, a, b)
            # no fma: rounds like the unfused ops of an exported model
            a, b = f.sub(a * c, b * s), f.add(b * c, a * s)
            if self.kernel.interleaved:
                whole = f.interleave(a, b)
                a, b = f.part(whole, 0, lanes), f.part(whole, lanes, lanes)
            for value, at, m in zip((a, b), places, masks, strict=True):
                store(f, value, element, self.y, at, m)

    def _neighbours(
        self, at: int, left: int
    ) -> tuple[tuple[int, int], tuple[Value | None, Value | None]]:
        """Offsets and masks of two consecutive vectors; the second may be empty."""
        second = self.f.const(i64, max(0, left - self.lanes))
        if left >= 2 * self.lanes:
            return (at, at + self.lanes), (None, None)
        return (at, at + self.lanes), (self._mask(left), self.f.mask(second, self.lanes))


def _deinterleave(f: Kernel, a: Value, b: Value) -> tuple[Value, Value]:
    """The even and the odd elements of two consecutive vectors."""
    lanes = a.type.lanes
    if lanes == 1:
        return a, b
    return f.shuffle(a, range(0, 2 * lanes, 2), b), f.shuffle(a, range(1, 2 * lanes, 2), b)
