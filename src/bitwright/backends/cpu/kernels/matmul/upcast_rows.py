"""Conversion of half-precision rows to f32, one piece at a time."""

from __future__ import annotations

from collections.abc import Callable

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, f32

PIECE = 256
"""Elements of a row that are converted at a time: those of a tile fit the L1 cache."""
STEP_BYTES = 32
"""Bytes of the next panel that are prefetched per step of k: a cache line every two steps."""
Add = Callable[..., tuple[Value, list[Value]]]


class UpcastRows:
    """The scratch for a piece of every row of a tile."""

    def __init__(self, f: Kernel, element: Type, rows: int, lanes: int) -> None:
        self.f, self.element, self.lanes = f, element, lanes
        buffer = f.scratch(f32, rows * PIECE)
        self.rows = [f.gep(f32, buffer, i * PIECE) for i in range(rows)]

    def add(
        self,
        rows: list[Value],
        w: Value,
        sums: list[Value],
        count: Value,
        ahead: Value | None,
        add: Add,
    ) -> tuple[Value, list[Value]]:
        """Calls `add`, which adds a run of f32 elements to the sums, for every piece of the
        rows."""
        f, wide = self.f, self.rows[: len(rows)]
        with f.loop(0, count, PIECE, carry=(w, *sums)) as loop:
            size = f.min(count - loop.index, PIECE)
            self._convert([f.gep(self.element, r, loop.index) for r in rows], wide, size)
            line = None if ahead is None else f.offset(ahead, loop.index * STEP_BYTES)
            after, totals = add(wide, loop.carried[0], list(loop.carried[1:]), size, line)
            loop.next(after, *totals)
        return loop.results[0], list(loop.results[1:])

    def _convert(self, rows: list[Value], wide: list[Value], size: Value) -> None:
        """Converts `size` elements of every row to f32."""
        f, lanes = self.f, self.lanes
        half = self.element.vector(lanes)

        def copy(at: Value, mask: Value | None) -> None:
            for row, to in zip(rows, wide, strict=True):
                f.store(f.convert(f.load(half, row, at, mask=mask), f32), to, at)

        whole = size - f.urem(size, lanes)
        with f.loop(0, whole, lanes) as loop:
            copy(loop.index, None)
        with f.if_(f.lt(whole, size)):
            copy(whole, f.mask(size - whole, lanes))
