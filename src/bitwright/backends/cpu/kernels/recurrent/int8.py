"""The time steps of a recurrent layer with int8 products (`ops.quant.integer_recurrent`).

    quantize the state   peak = max |h|;  q = rne(h 127 / peak) + 128        per row
    product              Σ q r, by int8 dot products                         (`matmul.dot.int8_dot`)
    dequantize           (sum + offset) * (peak / 127 * scale)               input of the cell

with offset = (shift - 128) Σ r per unit, because q has an offset of 128. Panels are as in
`kernels.recurrent.recurrent` with groups of k innermost:
[units / width][k / group][gate][width][group].

    slots   h_q      scratch [directions · B, depth]       h_scale  scratch: peak / 127 of each row
            offset   [directions, gates · H] in i32        scale    the same in f32
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Type, Value, f32, i8, i32
from bitwright.backends.cpu.kernels.matmul.dot.int8_dot import Int8Dot
from bitwright.backends.cpu.kernels.recurrent.recurrent import Layer, Recurrence, Source
from bitwright.backends.cpu.kernels.recurrent.recurrent_cell import CellContext

SLOTS = ("h_q", "h_scale", "offset", "scale")
MIDDLE = 128
"""The quantized value of 0."""


def emit_int8_recurrence(
    module: Module, name: str, kernel: Recurrence, vectors: tuple[int, ...], dot: Int8Dot
) -> Signature:
    """Emit the kernel; `vectors` is the width of the panels of each pass."""
    signature = kernel.signature
    with module.kernel(name, signature) as f, f.subnormals_as_zeros():
        _QuantizedLayer(f, kernel, vectors, dot).emit()
    return signature


class _QuantizedLayer(Layer):
    def __init__(
        self, f: Kernel, kernel: Recurrence, vectors: tuple[int, ...], dot: Int8Dot
    ) -> None:
        self.dot = dot
        super().__init__(f, kernel, vectors)
        group = dot.group
        self.groups = f.udiv(self.hidden + (group - 1), group)
        self.depth = self.groups * group

    @property
    def sum(self) -> Type:
        return i32.vector(self.kernel.lanes)

    @property
    def weight(self) -> Type:
        return i8

    def _row(self, row: Value) -> Value:
        return self.direction * self.batch + row

    def _quantized(self, row: Value) -> Value:
        return self.f.offset(self.f.args.pointer("h_q"), self._row(row) * self.depth)

    def _prepare_states(self, source: Source) -> None:
        """Quantize the states of every row."""
        f = self.f
        with f.loop(self.top, self.bottom) as loop:
            read = self._half(*source, loop.index)
            peak = f.reduce(self._peaks(read), f.max)
            factor = f.select(f.eq(peak, 0.0), 0.0, f.div(127.0, peak))
            f.store(f.mul(peak, 1 / 127), f.args.pointer("h_scale"), self._row(loop.index))
            to = self._quantized(loop.index)

            def body(column: Value, mask: Value | None) -> None:
                h = f.load(self.vector, read, column, mask=mask)
                scaled = f.mul(h, f.splat(factor, self.kernel.lanes))
                whole = f.round_to_int(f.quick_min(127.0, f.quick_max(-127.0, scaled)))
                f.store(f.convert(f.add(whole, MIDDLE), i8), to, column, mask=mask)

            f.vectors(0, self.hidden, self.kernel.lanes, body)

    def _peaks(self, read: Value) -> Value:
        """The largest magnitude in each lane."""
        f, lanes = self.f, self.kernel.lanes
        with f.loop(0, self.hidden, lanes, [f.const(self.vector, 0.0)]) as loop:
            (most,) = loop.carried
            mask = f.mask(self.hidden - loop.index, lanes, self.type.bits)
            loop.next(f.max(most, f.abs(f.load(self.vector, read, loop.index, mask=mask))))
        return loop.results[0]

    def _sums(
        self, number: int, source: Source, row: Value, left: Value, panel: Value, height: int
    ) -> None:
        f, lanes = self.f, self.kernel.lanes
        each = self.kernel.passes[number] * self.vectors[number]
        # rows past the last one repeat it; their results are not used
        rows = [self._quantized(row + f.min(f.index(i), left - 1)) for i in range(height)]
        carry = (panel, *[f.const(self.sum, 0)] * (height * each))
        with f.loop(0, self.groups, 1, carry) as loop:
            w, *sums = loop.carried
            weights = self.dot.load_rhs(f, w, each, lanes)
            for i, pointer in enumerate(rows):
                states = self.dot.load_lhs(f, pointer, loop.index, lanes)
                for v, weight in enumerate(weights):
                    at = i * each + v
                    sums[at] = self.dot.multiply_add(f, states, weight, sums[at])
            loop.next(f.offset(w, each * lanes * self.dot.group), *sums)
        for position, total in enumerate(loop.results[1:]):
            f.store(total, self.scratch, position * lanes)

    def _dequantize(
        self, totals: list[Value], row: Value, at: CellContext, first_gate: int
    ) -> list[Value]:
        f = self.f
        step = f.load(f32, f.args.pointer("h_scale"), self._row(row))
        found = []
        for gate, total in enumerate(totals, first_gate):
            place = (self.direction * self.gates + gate) * self.hidden + at.unit
            offset = f.load(self.sum, f.args.pointer("offset"), place, mask=at.mask)
            scale = f.load(self.vector, f.args.pointer("scale"), place, mask=at.mask)
            factor = f.mul(scale, f.splat(step, self.kernel.lanes))
            found.append(f.mul(f.convert(f.add(total, offset), f32), factor))
        return found
