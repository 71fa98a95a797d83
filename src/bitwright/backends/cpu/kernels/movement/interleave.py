"""Interleaving 2 to 4 rows into one, and deinterleaving: transposes of a matrix with few rows.

    interleave     y[i, k] = x[k, i]        colour planes to pixels
    deinterleave   y[k, i] = x[i, k]        the reverse; real and imaginary parts

Shuffles turn one vector of each row into the same number of vectors of the other side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bitwright.backends.cpu.codegen.emit import Kernel, Module, Operand, Signature, Type, Value
from bitwright.backends.cpu.kernels.elementwise.loop_nest import emit_loop_nest, pieces, product
from bitwright.backends.cpu.kernels.movement.copy import PIECE_BYTES, WORD

MAX_ROWS = 4


def emit_interleave(
    module: Module, name: str, rank: int, width: int, rows: int, zips: bool
) -> Signature:
    """Slots: sizes n and strides x, y of the outer axes; `count` elements per row, and the
    `stride` between rows on the side that has rows."""
    outer = [f"{letter}{axis}" for letter in "nxy" for axis in range(rank)]
    signature = Signature("xy", (*outer, "count", "stride"))
    word = WORD[width]
    piece = PIECE_BYTES // width
    with module.kernel(name, signature) as f:
        count = f.args.size("count")
        counts = [*(f.args.size(f"n{axis}") for axis in range(rank)), pieces(f, count, piece)]
        begin, end = f.share(product(f, counts))
        last = {"x": 1 if zips else rows, "y": rows if zips else 1}
        steps: dict[str, list[Operand]] = {
            o: [*(f.args.size(f"{o}{axis}") for axis in range(rank)), last[o] * piece] for o in "xy"
        }
        vector = word.vector(f.target.lanes(word.bits))

        def body(coordinates: Sequence[Value], offsets: Mapping[str, Value]) -> None:
            x, y = (f.gep(word, f.args.pointer(o), offsets[o]) for o in "xy")
            length = f.min(count - coordinates[-1] * piece, piece)
            _Interleaver(f, x, y, rows, zips).emit(length, vector)

        emit_loop_nest(f, counts, steps, begin, end, body)
    return signature


class _Interleaver:
    def __init__(self, f: Kernel, x: Value, y: Value, rows: int, zips: bool) -> None:
        self.f, self.x, self.y, self.rows, self.zips = f, x, y, rows, zips
        self.stride = f.args.size("stride")

    def emit(self, count: Value, vector: Type) -> None:
        """Vectors, the last one ending at the row's end; shorter rows are copied by elements."""
        f, lanes = self.f, vector.lanes
        with f.if_(f.ge(count, lanes)) as long, f.loop(0, count, lanes) as loop:
            self._move(f.min(loop.index, count - lanes), vector)
        with long.else_(), f.loop(0, count) as loop:
            self._move(loop.index, vector.scalar)

    def _move(self, index: Value, type_: Type) -> None:
        f, lanes = self.f, type_.lanes
        apart = [self.stride * row + index for row in range(self.rows)]
        close = [index * self.rows + turn * lanes for turn in range(self.rows)]
        places, targets = (apart, close) if self.zips else (close, apart)
        loaded = [f.load(type_, self.x, place) for place in places]
        for number, target in enumerate(targets):
            f.store(self._shuffled(loaded, number), self.y, target)

    def _shuffled(self, loaded: Sequence[Value], number: int) -> Value:
        """Vector `number` of the other side; `picks` are the source vector and lane per lane."""
        lanes, rows = loaded[0].type.lanes, self.rows
        if self.zips:
            flat = range(number * lanes, (number + 1) * lanes)
            picks = [(place % rows, place // rows) for place in flat]
        else:
            picks = [divmod(lane * rows + number, lanes) for lane in range(lanes)]
        if lanes == 1:
            return loaded[picks[0][0]]
        found = loaded[0]
        for source in range(1, rows):
            # after the first shuffle, lanes of earlier vectors are in place
            order = [
                lanes + lane if vector == source else (lane if source == 1 else at)
                for at, (vector, lane) in enumerate(picks)
            ]
            found = self.f.shuffle(found, order, loaded[source])
        return found
