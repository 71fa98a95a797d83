"""Reads panels: words of quantized values, and scales and minimums of 16 columns."""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Value, bf16, f16, f32, i8, i16, i32
from bitwright.backends.cpu.codegen.instr import shuffle_bytes
from bitwright.backends.cpu.kernels.blocks.panels import COLUMNS, GROUPS, WORD_BYTES, PanelLayout
from bitwright.ops.quant.block_formats import RUN


class Reader:
    """Emits loads of one panel in vectors of `lanes` columns."""

    def __init__(self, f: Kernel, layout: PanelLayout, lanes: int) -> None:
        self.f, self.layout, self.lanes = f, layout, lanes
        self.form = layout.form
        self.vectors = COLUMNS // lanes

    # scales

    def block_scales(self, block: Value, v: Value | int) -> tuple[Value, Value | None]:
        """Scales and minimums of a block, in f32."""
        scale = self._halves(block, 0, v)
        if not self.form.has_minimum:
            return scale, None
        return scale, self._halves(block, self.layout.minimum_at, v)

    def _halves(self, block: Value, at: int, v: Value | int) -> Value:
        f = self.f
        element = bf16 if self.layout.scale_is_bf16 else f16
        address = f.offset(f.offset(block, at), f.mul(f.index(v), 2 * self.lanes))
        return f.convert(f.load(element.vector(self.lanes), address), f32)

    def of_run(
        self, block: Value, numbers: tuple[Value, Value | None], run: Value, v: Value | int
    ) -> tuple[Value, Value | None]:
        """Scales and minimums of a run of a block."""
        layout = self.layout
        if not self.form.has_steps:
            return numbers
        scale, minimum = numbers
        factor = scale * self._steps(block, layout.steps_at, run, v, True)
        if minimum is None:
            return factor, None
        return factor, minimum * self._steps(block, layout.minimum_steps_at, run, v, False)

    def _steps(self, block: Value, at: int, run: Value, v: Value | int, signed: bool) -> Value:
        f = self.f
        place = f.add(f.mul(run, COLUMNS), f.mul(f.index(v), self.lanes))
        steps = f.load(i8.vector(self.lanes), f.offset(f.offset(block, at), place))
        return f.convert(f.convert(steps, i32, signed), f32)

    # values

    def load_words(self, chunk: Value, v: Value | int) -> list[Value]:
        """The words of all groups of a chunk: u8 values in vectors i8[4 lanes]."""
        f = self.f
        found: list[Value] | None = None
        at = shift = 0
        start = f.offset(chunk, f.mul(f.index(v), 4 * self.lanes))
        for bits in self.layout.planes:
            plane = [
                f.load(i8.vector(4 * self.lanes), f.offset(start, at + n * WORD_BYTES))
                for n in range(self.layout.plane_words(bits))
            ]
            fields = [self._field(plane, bits, group, shift) for group in range(GROUPS)]
            found = fields if found is None else self._joined(found, fields)
            at, shift = at + len(plane) * WORD_BYTES, shift + bits
        assert found is not None
        if self.form.values is not None:
            found = [self._looked_up(word) for word in found]
        return found

    def _joined(self, low: list[Value], high: list[Value]) -> list[Value]:
        return [self.f.or_(a, b) for a, b in zip(low, high, strict=True)]

    def _field(self, plane: list[Value], bits: int, group: int, shift: int) -> Value:
        """The field of a group, moved to bit `shift`."""
        if bits == 8:
            return plane[group]
        if bits == 4:
            word, place = plane[group % 4], 4 * (group // 4)
        elif bits == 2:
            word, place = plane[group // 4], 2 * (group % 4)
        else:
            word, place = plane[0], group
        return self._moved(word, place - shift, ((1 << bits) - 1) << shift)

    def _moved(self, word: Value, right: int, mask: int) -> Value:
        """The bits of a mask after a shift to the right (left if negative)."""
        f = self.f
        if right:
            wide = f.bitcast(word, i16.vector(word.type.lanes // 2))
            wide = f.lshr(wide, right) if right > 0 else f.shl(wide, -right)
            word = f.bitcast(wide, word.type)
        return f.and_(word, mask)

    def _looked_up(self, word: Value) -> Value:
        """The table's value of each index."""
        f, table = self.f, self.form.table
        numbers = [n - 256 if n > 127 else n for n in table]
        shuffle = shuffle_bytes(f.target)
        lanes = word.type.lanes
        if shuffle is None:
            found = f.const(word.type, 0)
            for index, number in enumerate(numbers):
                found = f.select(f.eq(word, index), number, found)
            return found
        part = shuffle.result.lanes
        entries = f.const_vector(i8, numbers * (part // 16))
        pieces = [shuffle(f, entries, f.part(word, at, part)) for at in range(0, lanes, part)]
        return f.join(*pieces)

    def elements(self, words: list[Value]) -> list[Value]:
        """The 32 elements of a chunk in f32, `zero` subtracted."""
        f = self.f
        found = []
        for word in words:
            whole = f.bitcast(word, i32.vector(self.lanes))
            for place in range(4):
                q = f.and_(f.lshr(whole, 8 * place), 0xFF)
                found.append(f.convert(q - self.form.zero if self.form.zero else q, f32))
        assert len(found) == RUN
        return found
