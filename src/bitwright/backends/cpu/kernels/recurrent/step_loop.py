"""Shared parts of kernels that run time steps: the division of rows, places of steps, products.

Directions and rows of the batch are divided among threads, each with all of its steps: there are no
barriers, and each sum is in the order of k, so results do not depend on the number of threads.

Step `time` of a row is at place `time` of the sequence, in the reverse direction at length - 1 -
time; steps past the end of a sequence are at place `time`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Value
from bitwright.backends.cpu.codegen.emit.types import Type, i64, storage_type
from bitwright.backends.cpu.kernels.movement.fault import record_fault
from bitwright.ir.dtype import DType

_UNROLL = 4
"""Steps of k per iteration of the inner loop."""

Part = tuple[Sequence[Value], Value]
"""The addresses of some elements of every row, and their number."""


def training_heights(rows: int) -> tuple[int, ...]:
    """The heights of tiles of at most `rows` rows: remaining rows use the lowest that holds them.

    Training has whole batches; powers of two leave few rows computed in vain.
    """
    return (*(height for height in (1, 2, 4, 8) if height < rows), rows)


class StepLoop(ABC):
    """Emits a block of rows of one direction; `direction`, `top`, `bottom` are its place."""

    def __init__(self, f: Kernel, element: DType, lengths: DType | None, lanes: int) -> None:
        self.f, self.lengths, self.lanes = f, lengths, lanes
        self.type = storage_type(element)
        self.vector: Type = self.type.vector(lanes)
        names = ("steps", "batch", "directions", "hidden")
        self.steps, self.batch, self.directions, self.hidden = (f.args.size(n) for n in names)
        self.count = self.directions * self.batch

    def emit(self) -> None:
        """Emit the loop over directions and blocks of rows of this thread."""
        f = self.f
        fair = f.max(f.udiv(self.count + (f.threads - 1), f.threads), 1)
        height = f.min(fair, f.max(self.batch, 1))
        blocks = f.udiv(self.batch + (height - 1), height)
        begin, end = f.share(self.directions * blocks)
        with f.loop(begin, end) as loop:
            self.direction = f.udiv(loop.index, blocks)
            top = (loop.index - self.direction * blocks) * height
            self.top, self.bottom = top, f.min(top + height, self.batch)
            self.reverse = f.ge(self.direction, f.args.size("reverse_from"))
            self.emit_block()

    @abstractmethod
    def emit_block(self) -> None:
        """Emit all steps of the block."""

    # addresses

    def _state(self, name: str, row: Value) -> Value:
        """A row of an array [directions, B, H]."""
        f = self.f
        place = (self.direction * self.batch + row) * self.hidden
        return f.gep(self.type, f.args.pointer(name), place)

    def _result(self, name: str, place: Value, row: Value) -> Value:
        """A row of an array [S, directions, B, H]."""
        at = ((place * self.directions + self.direction) * self.batch + row) * self.hidden
        return self.f.gep(self.type, self.f.args.pointer(name), at)

    def _gates(self, name: str, place: Value, row: Value, gates: int) -> Value:
        """A row of an array [S, B, directions, gates · H]."""
        at = ((place * self.batch + row) * self.directions + self.direction) * gates
        return self.f.gep(self.type, self.f.args.pointer(name), at * self.hidden)

    def _place(self, time: Value, length: Value) -> Value:
        """The place of a step in the sequence."""
        f = self.f
        back = length - 1 - time
        if self.lengths is not None:
            back = f.select(f.lt(time, length), back, time)
        return f.select(self.reverse, back, time)

    def _length(self, row: Value) -> Value:
        """The number of steps of a row; a length outside 0 … S is a fault."""
        f = self.f
        if self.lengths is None:
            return self.steps
        read = f.load(storage_type(self.lengths), f.args.pointer("lengths"), row)
        length = f.convert(read, i64)
        outside = f.ugt(length, self.steps)
        with f.if_(outside):
            record_fault(f, length)
        return f.select(outside, 0, length)

    # rows and products

    def _copy_rows(self, source: str | None, target: str) -> None:
        """Copy the block's rows of a state; zeros without a source."""
        f = self.f
        with f.loop(self.top, self.bottom) as loop:
            to = self._state(target, loop.index)
            read = None if source is None else self._state(source, loop.index)

            def body(column: Value, mask: Value | None) -> None:
                v = f.const(self.vector, 0.0)
                if read is not None:
                    v = f.load(self.vector, read, column, mask=mask)
                f.store(v, to, column, mask=mask)

            f.vectors(0, self.hidden, self.lanes, body)

    def _by_height(
        self, heights: Sequence[int], left: Value, emit_tile: Callable[[int], None]
    ) -> None:
        """Emit a tile of the lowest of some ascending heights that holds `left` rows."""
        *lower, height = heights
        if not lower:
            emit_tile(height)
            return
        with self.f.if_(self.f.gt(left, lower[-1])) as branch:
            emit_tile(height)
        with branch.else_():
            self._by_height(lower, left, emit_tile)

    def _row_sums(self, parts: Sequence[Part], panel: Value, vectors: int) -> tuple[Value, ...]:
        """Σ_k row[k] panel[k] of every row, `vectors` at a time; `parts` follow each other on k."""
        f, lanes = self.f, self.lanes
        height = len(parts[0][0])
        carry: Sequence[Value] = (panel, *[f.const(self.vector, 0.0)] * (height * vectors))
        for rows, count in parts:
            whole = count - f.urem(count, _UNROLL)
            for start, stop, turns in ((f.index(0), whole, _UNROLL), (whole, count, 1)):
                with f.loop(start, stop, turns, carry) as loop:
                    w, *sums = loop.carried
                    for turn in range(turns):
                        weights = [f.load(self.vector, w, v * lanes) for v in range(vectors)]
                        for i, pointer in enumerate(rows):
                            element = f.load(self.type, pointer, loop.index + turn)
                            state = f.splat(element, lanes)
                            for v, weight in enumerate(weights):
                                at = i * vectors + v
                                sums[at] = f.fma(state, weight, sums[at])
                        w = f.gep(self.type, w, vectors * lanes)
                    loop.next(w, *sums)
                carry = loop.results
        return tuple(carry[1:])
