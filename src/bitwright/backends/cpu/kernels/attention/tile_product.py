"""A register tile of a matrix product over memory with strides.

    sums[r][:] = first[r][:] + sum over d of a[row + r][d] * b[d][column : column + count vectors]

a is read element by element and broadcast, b in whole vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bitwright.backends.cpu.codegen.emit import Kernel, Value
from bitwright.backends.cpu.codegen.emit.types import Type

UNROLL = 4


@dataclass(frozen=True)
class Matrix:
    """A matrix in memory; `row` and `step` are the strides of its axes, in elements."""

    start: Value
    row: int
    step: int = 1


def column_groups(vectors: int, most: int) -> Iterator[tuple[int, int]]:
    """Start and count of groups of at most `most` vectors, as even as possible."""
    groups = -(-vectors // most)
    bounds = [vectors * n // groups for n in range(groups + 1)]
    for begin, end in pairwise(bounds):
        yield begin, end - begin


def emit_tiles(
    f: Kernel,
    vector: Type,
    a: Matrix,
    b: Matrix,
    row: Value,
    column: int,
    shape: tuple[int, int],
    depth: Value | int,
    first: Sequence[Value] | None,
) -> Sequence[Value]:
    """The sums of a tile of `shape` (rows, vectors), row by row; from `first`, or from zero."""
    type_, lanes, (rows, count) = vector.scalar, vector.lanes, shape
    start = f.gep(type_, a.start, row * a.row)
    sums: Sequence[Value] = first or [f.const(vector, 0.0)] * (rows * count)

    def step(d: Value, totals: Sequence[Value]) -> list[Value]:
        vectors = [f.load(vector, b.start, d * b.row + (column + v) * lanes) for v in range(count)]
        found = []
        for r in range(rows):
            factor = f.splat(f.load(type_, start, d * a.step + r * a.row), lanes)
            found += [f.fma(factor, w, totals[r * count + v]) for v, w in enumerate(vectors)]
        return found

    end = f.index(depth)
    whole = (
        f.index(depth // UNROLL * UNROLL) if isinstance(depth, int) else end - f.urem(end, UNROLL)
    )
    with f.loop(0, whole, UNROLL, carry=sums) as loop:
        totals: Sequence[Value] = loop.carried
        for turn in range(UNROLL):
            totals = step(loop.index + turn, totals)
        loop.next(*totals)
    with f.loop(whole, end, carry=loop.results) as rest:
        rest.next(*step(rest.index, rest.carried))
    return rest.results
