"""Gradients of recurrent cells: one time step of a vector of units (`recurrent.backward`).

`ops.sequence.recurrent_backward` has the formulas. A cell takes the gradient of the hidden state
that comes through the product with R, adds dy and the gradient of the last state, and stores the
gradients of its gates; a step past the end of a sequence has zeros and leaves the states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from bitwright.backends.cpu.codegen.emit import Kernel, Value, storage_type
from bitwright.backends.cpu.codegen.emit.types import Type
from bitwright.backends.cpu.codegen.scalars import LlvmScalars

if TYPE_CHECKING:
    from bitwright.backends.cpu.kernels.recurrent.backward import BackwardRecurrence


@dataclass(frozen=True)
class BackwardContext:
    """The addresses of one row's step, by name; `before` is the row of states before the step."""

    rows: Mapping[str, Value]
    hidden: Value
    ahead: Sequence[Value]
    """Rows of the next turn, to be prefetched."""
    is_active: Value | None
    """Whether the row's sequence has not ended; None without lengths."""
    is_first: Value | None
    """Whether the states before the step are zeros; None if they never are."""
    is_last: Value
    """Whether it is the last step of the row's sequence."""
    unit: Value | None = None
    mask: Value | None = None

    def at_unit(self, f: Kernel, unit: Value, element: Type) -> BackwardContext:
        """The same step at a vector of units."""
        mask = f.mask(self.hidden - unit, f.target.lanes(element.bits), element.bits)
        return replace(self, unit=unit, mask=mask)


class BackwardCell(ABC):
    gates: ClassVar[int]
    results: ClassVar[tuple[str, ...]]
    """Result pointers in the order of the op's results."""

    def __init__(self, f: Kernel, kernel: BackwardRecurrence, lanes: int) -> None:
        self.f, self.kernel = f, kernel
        self.vector = storage_type(kernel.element).vector(lanes)
        self.scalars = LlvmScalars(f, kernel.element, lanes)

    @abstractmethod
    def emit(self, at: BackwardContext, total: Value) -> None:
        """Emit the code after the product that gives the gradient of h."""

    def emit_second(self, at: BackwardContext, total: Value) -> None:
        """Emit the code after the second product of a step."""
        raise NotImplementedError(f"a {self.kernel.op} step has one product")

    def emit_end(self, at: BackwardContext, total: Value) -> None:
        """Store the gradient of the first hidden state."""
        self._store(total, "dh0", at)

    def _load(self, name: str, at: BackwardContext, gate: int = 0) -> Value:
        assert at.unit is not None
        place = at.hidden * gate + at.unit
        return self.f.load(self.vector, at.rows[name], place, mask=at.mask)

    def _store(self, value: Value, name: str, at: BackwardContext, gate: int = 0) -> None:
        assert at.unit is not None
        self.f.store(value, at.rows[name], at.hidden * gate + at.unit, mask=at.mask)

    def _store_active(self, value: Value, name: str, at: BackwardContext, gate: int = 0) -> None:
        """Store a gradient of a step; zeros past the end of a sequence."""
        if at.is_active is not None:
            value = self.f.select(at.is_active, value, self.f.const(self.vector, 0.0))
        self._store(value, name, at, gate)

    def _before(self, at: BackwardContext) -> Value:
        """The state before the step."""
        value = self._load("before", at)
        if at.is_first is None:
            return value
        return self.f.select(at.is_first, self.f.const(self.vector, 0.0), value)

    def _above(self, total: Value, at: BackwardContext) -> Value:
        """The gradient of h after the step."""
        f = self.f
        if "dy" in self.kernel.operands:
            total = f.add(total, self._load("dy", at))
        if "dh" in self.kernel.operands:
            last = f.select(at.is_last, self._load("dh", at), f.const(self.vector, 0.0))
            total = f.add(total, last)
        return total

    def _slope(self, gate: Value) -> Value:
        """The derivative of a sigmoid with this value."""
        return self.f.mul(gate, self.f.sub(1.0, gate))

    def _tanh_slope(self, value: Value) -> Value:
        """The derivative of a tanh with this value."""
        return self.f.fma(self.f.neg(value), value, self.f.const(self.vector, 1.0))


class BackwardRnnCell(BackwardCell):
    gates = 1
    results = ("dgates", "dh0")

    def emit(self, at: BackwardContext, total: Value) -> None:
        f, y = self.f, self._load("y", at)
        above = self._above(total, at)
        if self.kernel.is_relu:
            gradient = f.select(f.gt(y, 0.0), above, f.const(self.vector, 0.0))
        else:
            gradient = f.mul(above, self._tanh_slope(y))
        self._store_active(gradient, "dgates", at)


class BackwardGruCell(BackwardCell):
    """dh0 holds what passes a step beside its product until the end: dh*z, and m*r."""

    gates = 3
    results = ("dgates", "dterm", "dh0")

    def emit(self, at: BackwardContext, total: Value) -> None:
        f = self.f
        z, r, n = (self._load("gates", at, gate) for gate in range(3))
        beside, h = self._load("dh0", at), self._before(at)
        above = self._above(f.add(total, beside), at)
        dn = f.mul(f.mul(above, f.sub(1.0, z)), self._tanh_slope(n))
        dz = f.mul(f.mul(above, f.sub(h, n)), self._slope(z))
        self._store_active(dz, "dgates", at, 0)
        self._store_active(dn, "dgates", at, 2)
        if self.kernel.linear_before_reset:
            dr = f.mul(f.mul(dn, self._load("term", at)), self._slope(r))
            self._store_active(dr, "dgates", at, 1)
            self._store_active(f.mul(dn, r), "dterm", at)
        else:
            self._store_active(dn, "dterm", at)
        passed = f.mul(above, z)
        self._store(self._unless_past(passed, beside, at), "dh0", at)

    def emit_second(self, at: BackwardContext, total: Value) -> None:
        f = self.f
        r, beside = self._load("gates", at, 1), self._load("dh0", at)
        dr = f.mul(f.mul(total, self._before(at)), self._slope(r))
        self._store_active(dr, "dgates", at, 1)
        self._store(self._unless_past(f.fma(total, r, beside), beside, at), "dh0", at)

    def emit_end(self, at: BackwardContext, total: Value) -> None:
        self._store(self.f.add(total, self._load("dh0", at)), "dh0", at)

    def _unless_past(self, new: Value, old: Value, at: BackwardContext) -> Value:
        return new if at.is_active is None else self.f.select(at.is_active, new, old)


class BackwardLstmCell(BackwardCell):
    """dc0 holds the gradient of the cell state."""

    gates = 4
    results = ("dgates", "dh0", "dc0")

    def emit(self, at: BackwardContext, total: Value) -> None:
        f, e = self.f, self.scalars
        i, o, forget, g = (self._load("gates", at, gate) for gate in range(4))
        bent = e.tanh(e.term(self._load("term", at), self.kernel.element)).value
        above, old = self._above(total, at), self._load("dc0", at)
        dc = f.fma(f.mul(above, o), self._tanh_slope(bent), old)
        gradients = (
            f.mul(f.mul(dc, g), self._slope(i)),
            f.mul(f.mul(above, bent), self._slope(o)),
            f.mul(f.mul(dc, self._before(at)), self._slope(forget)),
            f.mul(f.mul(dc, i), self._tanh_slope(g)),
        )
        for gate, gradient in enumerate(gradients):
            self._store_active(gradient, "dgates", at, gate)
        new = f.mul(dc, forget)
        if at.is_active is not None:
            new = f.select(at.is_active, new, old)
        self._store(new, "dc0", at)


BACKWARD_CELLS: dict[str, type[BackwardCell]] = {
    "rnn": BackwardRnnCell,
    "gru": BackwardGruCell,
    "lstm": BackwardLstmCell,
}
