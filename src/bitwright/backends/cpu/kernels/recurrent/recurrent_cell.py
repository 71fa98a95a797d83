"""Recurrent cells: one time step of a vector of units (`kernels.recurrent.recurrent`).

`ops.sequence.recurrent` has the formulas. A cell takes the sums of its gates, adds x·W and the
biases, and stores the new states; a row whose sequence has ended keeps its states, and its outputs
are zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bitwright.backends.cpu.codegen.emit import Kernel, Value, storage_type
from bitwright.backends.cpu.codegen.scalars import LlvmScalars

if TYPE_CHECKING:
    from bitwright.backends.cpu.kernels.recurrent.recurrent import Recurrence

Sums = list[Value]


@dataclass(frozen=True)
class CellContext:
    """The addresses and indices of a vector of units in one row's step."""

    direction: Value
    hidden: Value
    unit: Value
    mask: Value
    is_active: Value | None
    """Whether the row's sequence has not ended; None without lengths."""
    p: Value
    """The row of x·W."""
    y: Value
    before: Value
    """The row's hidden state; `after` is the address of the next one."""
    after: Value
    c: Value | None
    kept: tuple[Value, Value] | None
    term: Value | None
    """In training: the row of what the gradient reads besides the gates."""


class Cell(ABC):
    """One kind of cell; `reverse` is whether the current direction is the reverse one."""

    def __init__(self, f: Kernel, kernel: Recurrence, reverse: Value) -> None:
        self.f, self.kernel, self.reverse = f, kernel, reverse
        self.type = storage_type(kernel.element)
        self.vector = self.type.vector(kernel.lanes)
        self.scalars = LlvmScalars(f, kernel.element, kernel.lanes)

    @staticmethod
    @abstractmethod
    def passes(linear_before_reset: bool) -> tuple[int, ...]:
        """The number of gates of each product of a step."""

    @abstractmethod
    def emit(self, number: int, at: CellContext, sums: Sums) -> None:
        """Emit the code after product `number`."""

    def _load(self, pointer: Value, at: CellContext, gate: int = 0) -> Value:
        """The units of one gate of a row."""
        return self.f.load(self.vector, pointer, at.hidden * gate + at.unit, mask=at.mask)

    def _store(self, value: Value, pointer: Value, at: CellContext) -> None:
        self.f.store(value, pointer, at.unit, mask=at.mask)

    def _load_parameter(self, name: str, at: CellContext, gates: int, gate: int) -> Value:
        """The units of one gate of an operand [directions, gates · H]."""
        row = self.f.gep(self.type, self.f.args.pointer(name), at.direction * gates * at.hidden)
        return self._load(row, at, gate)

    def _input_term(self, at: CellContext, gate: int, gates: int) -> Value:
        """x·W + Wb of a gate."""
        p = self._load(at.p, at, gate)
        if "bias" not in self.kernel.operands:
            return p
        return self.f.add(p, self._load_parameter("bias", at, 2 * gates, gate))

    def _recurrent_term(self, total: Value, at: CellContext, gate: int, gates: int) -> Value:
        """h·R + Rb of a gate."""
        if "bias" not in self.kernel.operands:
            return total
        return self.f.add(total, self._load_parameter("bias", at, 2 * gates, gates + gate))

    def _pre_activation(self, total: Value, at: CellContext, gate: int, gates: int) -> Value:
        return self.f.add(
            self._input_term(at, gate, gates), self._recurrent_term(total, at, gate, gates)
        )

    def _apply(self, position: int, x: Value) -> Value:
        """The activation f, g or h of the current direction."""
        e = self.scalars
        forms = [chosen[position] for chosen in self.kernel.activations]
        term = e.term(x, self.kernel.element)
        forward, *backward = [form.scalar(e, term).value for form in dict.fromkeys(forms)]
        return self.f.select(self.reverse, backward[0], forward) if backward else forward

    def _keep(self, at: CellContext, gates: dict[int, Value], term: Value | None = None) -> None:
        """In training: store activated gates in the place of x·W, and `term`."""
        if at.term is None:
            return
        places = [(self.f.gep(self.type, at.p, at.hidden * gate), v) for gate, v in gates.items()]
        for pointer, value in [*places, *([(at.term, term)] if term is not None else [])]:
            shown = value
            if at.is_active is not None:
                shown = self.f.select(at.is_active, value, self.f.const(self.vector, 0.0))
            self._store(shown, pointer, at)

    def _finish(self, new: Value, at: CellContext) -> None:
        """Store the next hidden state and the result."""
        shown = new
        if at.is_active is not None:
            shown = self.f.select(at.is_active, new, self.f.const(self.vector, 0.0))
            new = self.f.select(at.is_active, new, self._load(at.before, at))
        self._store(new, at.after, at)
        self._store(shown, at.y, at)


class RnnCell(Cell):
    @staticmethod
    def passes(linear_before_reset: bool) -> tuple[int, ...]:
        return (1,)

    def emit(self, number: int, at: CellContext, sums: Sums) -> None:
        self._finish(self._apply(0, self._pre_activation(sums[0], at, 0, 1)), at)


class GruCell(Cell):
    @staticmethod
    def passes(linear_before_reset: bool) -> tuple[int, ...]:
        return (3,) if linear_before_reset else (2, 1)

    def emit(self, number: int, at: CellContext, sums: Sums) -> None:
        f = self.f
        if number == 1:
            assert at.kept is not None
            update = self._load(at.kept[0], at)
            self._blend(update, self._pre_activation(sums[0], at, 2, 3), at)
            return
        update, reset = (self._apply(0, self._pre_activation(sums[g], at, g, 3)) for g in (0, 1))
        if len(sums) == 3:
            term = self._recurrent_term(sums[2], at, 2, 3)
            self._keep(at, {0: update, 1: reset}, term)
            self._blend(update, f.add(self._input_term(at, 2, 3), f.mul(reset, term)), at)
            return
        assert at.kept is not None
        term = f.mul(reset, self._load(at.before, at))
        self._keep(at, {0: update, 1: reset}, term)
        self._store(update, at.kept[0], at)
        self._store(term, at.kept[1], at)

    def _blend(self, update: Value, pre_activation: Value, at: CellContext) -> None:
        f = self.f
        candidate = self._apply(1, pre_activation)
        self._keep(at, {2: candidate})
        new = f.mul(f.sub(1.0, update), candidate)
        self._finish(f.fma(update, self._load(at.before, at), new), at)


class LstmCell(Cell):
    @staticmethod
    def passes(linear_before_reset: bool) -> tuple[int, ...]:
        return (4,)

    def emit(self, number: int, at: CellContext, sums: Sums) -> None:
        f = self.f
        assert at.c is not None
        c = self._load(at.c, at)
        pre_activation = [
            self._pre_activation(total, at, gate, 4) for gate, total in enumerate(sums)
        ]
        input_gate = self._apply(0, self._add_peephole(pre_activation[0], c, at, 0))
        if self.kernel.input_forget:
            forget_gate = f.sub(1.0, input_gate)
        else:
            forget_gate = self._apply(0, self._add_peephole(pre_activation[2], c, at, 2))
        candidate = self._apply(1, pre_activation[3])
        new = f.fma(forget_gate, c, f.mul(input_gate, candidate))
        output_gate = self._apply(0, self._add_peephole(pre_activation[1], new, at, 1))
        self._keep(at, {0: input_gate, 1: output_gate, 2: forget_gate, 3: candidate}, new)
        held = new if at.is_active is None else f.select(at.is_active, new, c)
        self._store(held, at.c, at)
        self._finish(f.mul(output_gate, self._apply(2, new)), at)

    def _add_peephole(self, pre_activation: Value, c: Value, at: CellContext, gate: int) -> Value:
        if "peephole" not in self.kernel.operands:
            return pre_activation
        return self.f.fma(self._load_parameter("peephole", at, 3, gate), c, pre_activation)


CELL_CLASSES: dict[str, type[Cell]] = {"rnn": RnnCell, "gru": GruCell, "lstm": LstmCell}
