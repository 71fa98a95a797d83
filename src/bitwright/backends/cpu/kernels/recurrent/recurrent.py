"""The time steps of a recurrent layer; x·W of all steps is computed before (`lower_recurrent`).

    for t in steps:      s = h[t-1] · R                      a vector of units for every gate
                         h[t] = cell(x·W[t] + s, …)          (`kernels.recurrent.recurrent_cell`)

R is packed in panels [units / width][k][gate][width], so one pass over k gives every gate of
`width` units, and the cell uses the sums while they are in cache. A GRU that resets before its
product takes two passes per step: update and reset gates, then the candidate from r*h.

Directions and rows of the batch are divided among threads (`kernels.recurrent.step_loop`). The rows
of one thread read a panel while it is in cache.

    slots   p        x·W as [S, B, directions, gates, H]      r, r_new   packed weights
            h        2 alternating scratch states             keep       scratch: z and r*h
            y, last  results                                  c, c0, h0, bias, peephole, lengths
            term     in training: all cell states, or terms that the reset gate multiplies
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.codegen.emit.types import Type
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS
from bitwright.backends.cpu.kernels.recurrent.recurrent_cell import CELL_CLASSES, Cell, CellContext
from bitwright.backends.cpu.kernels.recurrent.step_loop import StepLoop, training_heights
from bitwright.ir.dtype import DType
from bitwright.ops.sequence.recurrence import Activation
from bitwright.target import Target

Source = tuple[str, Value]
"""An array of states, and which of its halves."""


@dataclass(frozen=True)
class Recurrence:
    """The compile-time parameters of a layer."""

    op: str
    element: DType
    activations: tuple[tuple[Activation, ...], ...]
    """f, g, h of each direction."""
    operands: tuple[str, ...]
    """Those of bias, lengths, h0, c0, peephole that are present."""
    lengths: DType | None
    linear_before_reset: bool
    """GRU: the reset gate multiplies h·R instead of h."""
    input_forget: bool
    """LSTM: the forget gate is 1 minus the input gate."""
    lanes: int
    more: tuple[str, ...] = ()
    """Additional pointers."""
    is_training: bool = False
    """Whether activated gates replace p, and `term` gets what else the gradient reads."""

    @property
    def passes(self) -> tuple[int, ...]:
        """The number of gates of each product of a step."""
        return CELL_CLASSES[self.op].passes(self.linear_before_reset)

    @property
    def gates(self) -> int:
        return sum(self.passes)

    @property
    def signature(self) -> Signature:
        pointers = ["p", "r", "h", "y", "last", *self.operands, *self.more]
        pointers += ["r_new", "keep"] if len(self.passes) > 1 else []
        pointers += ["c"] if self.op == "lstm" else []
        pointers += ["term"] if self.is_training else []
        pointers += ["fault"] if self.lengths else []
        sizes = ("steps", "batch", "directions", "hidden", "reverse_from")
        return Signature(pointers, (*sizes, *(FAULT_SLOTS if self.lengths else ())))


def vectors_of(
    target: Target, lanes: int, gates: int, hidden: int, is_training: bool = False
) -> int:
    """Vectors of units per panel: enough sums to hide latency, with little padding.

    Training has several rows, which hide latency with fewer vectors.
    """
    most = 8 if target.vector_registers >= 32 and not is_training else 4
    choices = [v for v in (8, 4, 2, 1) if v * gates <= max(most, gates)]
    return min(choices, key=lambda v: (-(-hidden // (v * lanes)) * v, -v))


def rows_of(target: Target, sums: int) -> int:
    """Rows of the batch that share each load of weights."""
    free = 24 if target.vector_registers >= 32 else 8
    return max(1, free // sums)


def emit_recurrence(
    module: Module, name: str, kernel: Recurrence, vectors: tuple[int, ...]
) -> Signature:
    """Emit the kernel; `vectors` is the width of the panels of each pass."""
    signature = kernel.signature
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        Layer(f, kernel, vectors).emit()
    return signature


class Layer(StepLoop):
    def __init__(self, f: Kernel, kernel: Recurrence, vectors: tuple[int, ...]) -> None:
        super().__init__(f, kernel.element, kernel.lengths, kernel.lanes)
        self.kernel, self.vectors = kernel, vectors
        self.rows = [rows_of(f.target, g * v) for g, v in zip(kernel.passes, vectors, strict=True)]
        most = max(r * g * v for r, g, v in zip(self.rows, kernel.passes, vectors, strict=True))
        self.scratch = f.scratch(self.sum, most)
        self.gates = kernel.gates
        self.depth = self.hidden
        """Terms per sum in the panels."""

    @property
    def sum(self) -> Type:
        """The vector type of sums."""
        return self.vector

    @property
    def weight(self) -> Type:
        """The element type of panels."""
        return self.type

    def emit_block(self) -> None:
        self._start()
        with self.f.loop(0, self.steps) as time:
            self._step(time.index)
        self._finish()

    def _half(self, name: str, half: Value, row: Value) -> Value:
        """A row of one half of a double array."""
        return self.f.gep(self.type, self._state(name, row), self.count * self.hidden * half)

    def _start(self) -> None:
        """Set the states before the first step."""
        given = self.kernel.operands
        self._copy_rows("h0" if "h0" in given else None, "h")
        if self.kernel.op == "lstm":
            self._copy_rows("c0" if "c0" in given else None, "c")

    def _finish(self) -> None:
        """Store the states after the last step; zeros for an empty sequence."""
        f = self.f
        half = f.and_(self.steps, 1)
        with f.loop(self.top, self.bottom) as loop:
            row = loop.index
            ran = f.gt(self._length(row), 0)
            moves = [(self._half("h", half, row), self._state("last", row))]
            if self.kernel.op == "lstm":
                moves.append((self._state("c", row),) * 2)

            def body(column: Value, mask: Value | None) -> None:
                for read, to in moves:
                    v = f.load(self.vector, read, column, mask=mask)
                    f.store(f.select(ran, v, f.const(self.vector, 0.0)), to, column, mask=mask)

            f.vectors(0, self.hidden, self.kernel.lanes, body)

    def _step(self, time: Value) -> None:
        f = self.f
        half = f.and_(time, 1)
        cell = CELL_CLASSES[self.kernel.op](self.f, self.kernel, self.reverse)

        def where(row: Value, unit: Value, mask: Value) -> CellContext:
            length = self._length(row)
            place = self._place(time, length)
            kept = None
            if len(self.kernel.passes) > 1:
                kept = self._half("keep", f.index(0), row), self._half("keep", f.index(1), row)
            if self.kernel.is_training:
                self._prefetch_next(time, length, row, unit)
            return CellContext(
                self.direction,
                self.hidden,
                unit,
                mask,
                f.lt(time, length) if self.kernel.lengths else None,
                p=self._gates("p", place, row, self.gates),
                y=self._result("y", place, row),
                before=self._half("h", half, row),
                after=self._half("h", 1 - half, row),
                c=self._state("c", row) if self.kernel.op == "lstm" else None,
                kept=kept,
                term=self._result("term", place, row) if self.kernel.is_training else None,
            )

        for number in range(len(self.kernel.passes)):
            source = ("h", half) if number == 0 else ("keep", f.index(1))
            self._pass(number, source, cell, where)

    def _prefetch_next(self, time: Value, length: Value, row: Value, unit: Value) -> None:
        """Prefetch a vector of units of the next step, which is far from this one in memory."""
        f = self.f
        place = self._place(time + 1, length)
        p = self._gates("p", place, row, self.gates)
        rows = [f.gep(self.type, p, self.hidden * gate) for gate in range(self.gates)]
        for start in (*rows, self._result("y", place, row), self._result("term", place, row)):
            f.prefetch(f.gep(self.type, start, unit))

    def _pass(
        self,
        number: int,
        source: Source,
        cell: Cell,
        where: Callable[[Value, Value, Value], CellContext],
    ) -> None:
        """One product with the weights, panel by panel, followed by the cell."""
        f, lanes = self.f, self.kernel.lanes
        gates, vectors, rows = self.kernel.passes[number], self.vectors[number], self.rows[number]
        width = vectors * lanes
        panels = f.udiv(self.hidden + (width - 1), width)
        base = f.args.pointer("r" if number == 0 else "r_new")
        size = self.depth * (gates * width)
        self._prepare_states(source)
        with f.loop(0, panels) as loop:
            panel = f.gep(self.weight, base, (self.direction * panels + loop.index) * size)
            first = loop.index * width
            filled = f.udiv(self.hidden - first + (lanes - 1), lanes)
            filled = f.min(filled, vectors)
            with f.loop(self.top, self.bottom, rows) as tiles:
                left = f.min(self.bottom - tiles.index, rows)
                self._tile_sums(number, source, tiles.index, left, panel)
                with f.loop(0, left, nonempty=True) as each:
                    row = tiles.index + each.index
                    with f.loop(0, filled, nonempty=True) as vector:
                        unit = first + vector.index * lanes
                        mask = f.mask(self.hidden - unit, lanes, self.type.bits)
                        at = each.index * (gates * width) + vector.index * lanes
                        totals = [
                            f.load(self.sum, self.scratch, at + gate * width)
                            for gate in range(gates)
                        ]
                        place = where(row, unit, mask)
                        first_gate = sum(self.kernel.passes[:number])
                        cell.emit(number, place, self._dequantize(totals, row, place, first_gate))

    def _prepare_states(self, source: Source) -> None:
        """Hook: prepare the states that a product reads."""

    def _dequantize(
        self, totals: list[Value], row: Value, at: CellContext, first_gate: int
    ) -> list[Value]:
        """Hook: convert the sums of some gates to floats."""
        return totals

    def _tile_sums(
        self, number: int, source: Source, row: Value, left: Value, panel: Value
    ) -> None:
        """Compute the sums of a tile."""
        rows = self.rows[number]
        heights = training_heights(rows) if self.kernel.is_training else sorted({1, rows})
        self._by_height(
            heights, left, lambda height: self._sums(number, source, row, left, panel, height)
        )

    def _sums(
        self, number: int, source: Source, row: Value, left: Value, panel: Value, height: int
    ) -> None:
        f = self.f
        each = self.kernel.passes[number] * self.vectors[number]
        # rows past the last one repeat it; their results are not used
        rows = [self._half(*source, row + f.min(f.index(i), left - 1)) for i in range(height)]
        for position, total in enumerate(self._row_sums([(rows, self.hidden)], panel, each)):
            f.store(total, self.scratch, position * self.lanes)
