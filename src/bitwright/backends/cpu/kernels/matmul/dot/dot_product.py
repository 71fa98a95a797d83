"""What the products of a matmul or convolution are made of: how a step of k is read and summed.

A step takes `group` numbers of every row and one unit of a packed panel for every column. For
real numbers it is one of each; `kernels.matmul.dot.int8_dot` has those for 8-bit codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from bitwright.backends.cpu.codegen.emit import Kernel, Type, Value, f32, i16, i32

ONE_PLANE = ((0, 0),)


class Numbers(Protocol):
    """All of it shapes the code; `repr` is exact."""

    @property
    def element(self) -> Type:
        """One number of a."""

    @property
    def unit(self) -> Type:
        """What a step takes from a panel for one column."""

    @property
    def group(self) -> int:
        """Numbers of a row that go into one step."""

    @property
    def has_rest(self) -> bool:
        """Whether a run may end with fewer numbers than a group."""

    @property
    def widens(self) -> bool:
        """Whether rows are copied as f32, piece by piece, before they are multiplied."""

    @property
    def tiles(self) -> Any:
        """How blocks of sums are held in two-dimensional registers (`kernels.matmul.dot.amx`), or None."""

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """What a step of tiles multiplies: planes of the rows, each with a part of the panel."""

    @property
    def sum(self) -> Type:
        """A sum."""

    @property
    def pointers(self) -> tuple[str, ...]:
        """Slots that `start` and `finished` read."""

    @property
    def extra(self) -> int:
        """Vectors of sums that every row has behind those of its columns."""

    def start(self, f: Kernel, column: Value, masks: list[Value], lanes: int) -> list[Value]:
        """What the sums of a row begin with."""

    def panel(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Any]:
        """The factors of one step: `vectors`, and `extra` more."""

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Any:
        """A row's numbers of one step, for every lane, as `multiply` takes them."""

    def rest(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Any:
        """The same where only `count` numbers are left; zeros stand for the others."""

    def multiply(self, f: Kernel, number: Any, part: Any, total: Value) -> Value:
        """The sum with one more product."""

    def corrected(
        self, product: Any, rows: Sequence[Value], column: Value, sums: list[Value]
    ) -> list[Value]:
        """The sums of a tile whose rows begin here, with what the panel leaves out."""

    def finished(self, f: Kernel, sums: list[Value], column: Value, masks: list[Value]) -> None:
        """Brings the `extra` sums of a row into those of its columns."""


class RealNumbers:
    """f32, one at a time, fused where the target can."""

    element = unit = sum = f32
    group, has_rest, extra, widens = 1, False, 0, False
    tiles: Any = None
    pointers: tuple[str, ...] = ()
    parts = ONE_PLANE

    def __repr__(self) -> str:
        return "f32"

    def start(self, f: Kernel, column: Value, masks: list[Value], lanes: int) -> list[Value]:
        return [f.const(f32.vector(lanes), 0.0)] * len(masks)

    def panel(self, f: Kernel, w: Value, vectors: int, lanes: int) -> list[Value]:
        return [f.load(f32.vector(lanes), w, v * lanes) for v in range(vectors)]

    def number(self, f: Kernel, row: Value, step: Value, lanes: int) -> Value:
        return f.splat(f.load(f32, row, step), lanes)

    def rest(self, f: Kernel, row: Value, step: Value, count: Value, lanes: int) -> Value:
        raise AssertionError("a step takes one number: none is ever left over")

    def multiply(self, f: Kernel, number: Value, part: Value, total: Value) -> Value:
        return f.fma(number, part, total)

    def corrected(
        self, product: Any, rows: Sequence[Value], column: Value, sums: list[Value]
    ) -> list[Value]:
        return sums

    def finished(self, f: Kernel, sums: list[Value], column: Value, masks: list[Value]) -> None:
        pass


REAL = RealNumbers()


def pair(f: Kernel, element: Type, row: Value, step: Value, lanes: int) -> Value:
    """Two neighbours of 16 bits in a row, for every column."""
    both = f.load(i32, f.offset(row, step * 4), align=2)
    return f.bitcast(f.splat(both, lanes), element.vector(2 * lanes))


def half_a_pair(f: Kernel, element: Type, row: Value, step: Value, lanes: int) -> Value:
    """The last number of a row, and 0."""
    last = f.convert(f.load(i16, f.offset(row, step * 4)), i32, False)
    return f.bitcast(f.splat(last, lanes), element.vector(2 * lanes))
