"""The time steps of the gradient of a recurrent layer (`ops.sequence.recurrent_backward`).

    for t in reversed steps:      s = dgates[t+1] · R                   the gradient of h[t]
                                  dgates[t] = cell(s + dy[t], …)        (`recurrent.backward_cell`)

R is packed in panels [units / width][k][width] with the rows of gates as k. One pass gives s of
`width` units, and the cell makes their gates' gradients, which are results and the next factor. A
GRU that resets before its product takes a second pass per step: m = dn · R_n, which makes dr.

Every vector of gates is read before its gradients are stored, so `dgates` may be `gates`.

One turn of the loop is a product and a cell. The first turn has no product; the last one has no
cell and stores the gradient of the first state.

    slots   gates, term, y     what the forward kept            dy, dh, dc   gradients of results
            h0, c0, lengths    operands of the layer            r, r_new     packed weights
            dgates, dterm      results of each step             dh0, dc0     results and states
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Value
from bitwright.backends.cpu.kernels.matmul.register_tile import Tile
from bitwright.backends.cpu.kernels.movement.fault import FAULT_SLOTS
from bitwright.backends.cpu.kernels.recurrent.backward_cell import (
    BACKWARD_CELLS,
    BackwardContext,
)
from bitwright.backends.cpu.kernels.recurrent.step_loop import Part, StepLoop, training_heights
from bitwright.ir.dtype import DType


@dataclass(frozen=True)
class BackwardRecurrence:
    """The compile-time parameters of the kernel."""

    op: str
    """rnn, gru or lstm."""
    element: DType
    operands: tuple[str, ...]
    """The names of those operands that are present, without r."""
    lengths: DType | None
    linear_before_reset: bool
    """GRU: the reset gate multiplies h·R instead of h."""
    is_relu: bool
    """RNN: relu instead of tanh."""
    tile: Tile

    @property
    def gates(self) -> int:
        return BACKWARD_CELLS[self.op].gates

    @property
    def is_two_pass(self) -> bool:
        return self.op == "gru" and not self.linear_before_reset

    @property
    def results(self) -> tuple[str, ...]:
        return BACKWARD_CELLS[self.op].results

    @property
    def signature(self) -> Signature:
        pointers = ["r", *self.operands, *self.results]
        pointers += ["r_new"] if self.is_two_pass else []
        pointers += ["fault"] if self.lengths else []
        sizes = ("steps", "batch", "directions", "hidden", "reverse_from")
        return Signature(pointers, (*sizes, *(FAULT_SLOTS if self.lengths else ())))


def emit_backward(module: Module, name: str, kernel: BackwardRecurrence) -> Signature:
    signature = kernel.signature
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        BackwardLayer(f, kernel).emit()
    return signature


class BackwardLayer(StepLoop):
    def __init__(self, f: Kernel, kernel: BackwardRecurrence) -> None:
        super().__init__(f, kernel.element, kernel.lengths, kernel.tile.lanes)
        self.kernel, self.tile = kernel, kernel.tile
        self.scratch = f.scratch(self.vector, self.tile.rows * self.tile.vectors)

    def emit_block(self) -> None:
        f, kernel = self.f, self.kernel
        self.cell = BACKWARD_CELLS[kernel.op](f, kernel, self.lanes)
        self._start()
        with f.loop(0, self.steps + 1, nonempty=True) as loop:
            self.is_end = f.eq(loop.index, self.steps)
            self.has_product = f.gt(loop.index, 0)
            time = self.steps - 1 - loop.index
            self._pass(0, time)
            if kernel.is_two_pass:
                with f.if_(f.not_(self.is_end)):
                    self._pass(1, time)

    def _start(self) -> None:
        """Set the gradients of the states after the last step."""
        if self.kernel.op == "gru":  # what passes a step beside its product
            self._copy_rows(None, "dh0")
        elif self.kernel.op == "lstm":
            self._copy_rows("dc" if "dc" in self.kernel.operands else None, "dc0")
            self._clear_empty()

    def _clear_empty(self) -> None:
        """Set the gradients of empty sequences to zero."""
        f = self.f
        with f.loop(self.top, self.bottom) as loop, f.if_(f.eq(self._length(loop.index), 0)):
            to = self._state("dc0", loop.index)
            zero = f.const(self.vector, 0.0)
            f.vectors(0, self.hidden, self.lanes, lambda at, mask: f.store(zero, to, at, mask=mask))

    def _pass(self, number: int, time: Value) -> None:
        """One product with the weights, panel by panel, followed by the cell."""
        f, lanes, tile = self.f, self.lanes, self.tile
        panels = f.udiv(self.hidden + (tile.columns - 1), tile.columns)
        base = f.args.pointer("r" if number == 0 else "r_new")
        depth = self.hidden * (1 if number else self.kernel.gates - self.kernel.is_two_pass)
        size = depth * tile.columns
        with f.loop(0, panels) as loop:
            panel = f.gep(self.type, base, (self.direction * panels + loop.index) * size)
            first = loop.index * tile.columns
            filled = f.min(f.udiv(self.hidden - first + (lanes - 1), lanes), tile.vectors)
            with f.loop(self.top, self.bottom, tile.rows) as tiles:
                left = f.min(self.bottom - tiles.index, tile.rows)
                self._tile_sums(number, time, tiles.index, left, panel)
                with f.loop(0, left, nonempty=True) as each:
                    at = self._context(tiles.index + each.index, time)
                    with f.loop(0, filled, nonempty=True) as vector:
                        unit = first + vector.index * lanes
                        place = (each.index * tile.vectors + vector.index) * lanes
                        total = f.load(self.vector, self.scratch, place)
                        self._emit_cell(number, at.at_unit(f, unit, self.type), total)

    def _emit_cell(self, number: int, at: BackwardContext, total: Value) -> None:
        if number == 1:
            self.cell.emit_second(at, total)
            return
        with self.f.if_(self.is_end) as branch:
            self.cell.emit_end(at, total)
        with branch.else_():
            assert at.unit is not None
            for start in at.ahead:
                self.f.prefetch(self.f.gep(self.type, start, at.unit))
            self.cell.emit(at, total)

    def _tile_sums(self, number: int, time: Value, row: Value, left: Value, panel: Value) -> None:
        """Store the sums of a tile; zeros in front of the first product."""
        f, tile = self.f, self.tile
        heights = training_heights(tile.rows)

        def emit_tile(height: int) -> None:
            # rows past the last one repeat it; their results are not used
            rows = [row + f.min(f.index(i), left - 1) for i in range(height)]
            parts = self._factors(number, time, rows)
            for position, total in enumerate(self._row_sums(parts, panel, tile.vectors)):
                f.store(total, self.scratch, position * self.lanes)

        if number == 1:
            self._by_height(heights, left, emit_tile)
            return
        with f.if_(self.has_product) as branch:
            self._by_height(heights, left, emit_tile)
        with branch.else_():
            for position in range(tile.rows * tile.vectors):
                zero = f.const(self.vector, 0.0)
                f.store(zero, self.scratch, position * self.lanes)

    def _factors(self, number: int, time: Value, rows: list[Value]) -> list[Part]:
        """The gates' gradients that a product reads: those of the step after, or dn of this one."""
        f, kernel, hidden = self.f, self.kernel, self.hidden
        step = time if number == 1 else time + 1
        places = [self._place(step, self._length(row)) for row in rows]
        pairs = list(zip(places, rows, strict=True))
        starts = [self._gates("dgates", place, row, kernel.gates) for place, row in pairs]
        if number == 1:
            return [([f.gep(self.type, start, hidden * 2) for start in starts], hidden)]
        if kernel.op != "gru":
            return [(starts, hidden * kernel.gates)]
        first = (starts, hidden * 2)
        if kernel.is_two_pass:
            return [first]
        return [first, ([self._gates("dterm", place, row, 1) for place, row in pairs], hidden)]

    def _context(self, row: Value, time: Value) -> BackwardContext:
        """The addresses of a row's step; in the last turn those of step 0, which are not used."""
        f, kernel = self.f, self.kernel
        time = f.max(time, 0)
        length = self._length(row)
        place = self._place(time, length)
        found: dict[str, Value] = {}
        for name in kernel.operands:
            if name == "gates":
                found[name] = self._gates(name, place, row, kernel.gates)
            elif name in ("term", "y", "dy"):
                found[name] = self._result(name, place, row)
            elif name != "lengths":
                found[name] = self._state(name, row)
        found["dgates"] = self._gates("dgates", place, row, kernel.gates)
        if kernel.op == "gru":
            found["dterm"] = self._gates("dterm", place, row, 1)
        for name in kernel.results[-1 - (kernel.op == "lstm") :]:
            found[name] = self._state(name, row)
        is_first = f.eq(time, 0)
        states, initial = {"lstm": ("term", "c0"), "gru": ("y", "h0")}.get(kernel.op, ("", ""))
        if states:
            # without a first state the row of this step is read, and its values are not used
            earlier = self._place(f.select(is_first, time, time - 1), length)
            before = self._result(states, earlier, row)
            if initial in kernel.operands:
                before = f.select(is_first, found[initial], before)
            found["before"] = before
        return BackwardContext(
            found,
            self.hidden,
            self._ahead(row, time, length, states),
            is_active=f.lt(time, length) if self.lengths is not None else None,
            is_first=is_first if initial and initial not in kernel.operands else None,
            is_last=f.eq(time, length - 1),
        )

    def _ahead(self, row: Value, time: Value, length: Value, states: str) -> list[Value]:
        """The rows that only the next turn reads or writes; they are far apart in memory.

        `states` names the sequence whose element before the step is read.
        """
        f, kernel = self.f, self.kernel
        following = self._place(time - 1, length)
        found = [
            self._result(name, self._place(time - 2, length) if name == states else following, row)
            for name in ("term", "y", "dy")
            if name in kernel.operands
        ]
        for name in ("gates", "dgates"):
            if name in (*kernel.operands, *kernel.results):
                start = self._gates(name, following, row, kernel.gates)
                found += [f.gep(self.type, start, self.hidden * i) for i in range(kernel.gates)]
        return found
