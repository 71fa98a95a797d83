"""Toom-Cook matrices of short convolutions: y = A [(G g) · (B d)].

m results of a filter of r taps are coefficients of a product of polynomials. They follow from its
values at n = m + r - 1 points including infinity: one product per point instead of one per result
and tap. With P(x) = Π (x - p_j) over the finite points,

    G[i] = p_i^k / Π_{j≠i} (p_i - p_j)      the filter's values, scaled    last row: its last tap
    A[k] = p_i^k                            back to results                last column: 0 … 0 1
    B[i] = coefficients of P(x) / (x - p_i)                                last row: those of P(x)

The matrices are exact fractions. Points of different magnitudes and both signs keep the rounding
error small: with 0, 1, -1, 1/2, -2 four results per line lose one digit instead of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations, permutations
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.emit import Kernel, Value

Array = np.ndarray[Any, Any]
Row = dict[int, Fraction]
_POINTS = (Fraction(0), Fraction(1), Fraction(-1), Fraction(1, 2), Fraction(-2))


@dataclass(frozen=True)
class Matrices:
    """A, G and B for `results` outputs of a filter of `taps`."""

    back: tuple[tuple[Fraction, ...], ...]
    filter: tuple[tuple[Fraction, ...], ...]
    data: tuple[tuple[Fraction, ...], ...]


@cache
def matrices(results: int, taps: int, candidates: tuple[Fraction, ...] = _POINTS) -> Matrices:
    """The matrices for the first of these points, and infinity."""
    count = results + taps - 1
    points = candidates[: count - 1]
    assert len(points) == count - 1
    filters, data = [], []
    for i, point in enumerate(points):
        others = [other for j, other in enumerate(points) if j != i]
        scale = Fraction(1)
        for other in others:
            scale *= point - other
        filters.append(tuple(point**k / scale for k in range(taps)))
        data.append((*_polynomial(others), Fraction(0)))
    filters.append((*(Fraction(0),) * (taps - 1), Fraction(1)))
    data.append(_polynomial(points))
    back = tuple(
        (*(point**k for point in points), Fraction(int(k == results - 1))) for k in range(results)
    )
    return Matrices(back, tuple(filters), tuple(data))


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The coefficients of Π (x - root), the constant one first."""
    found = [Fraction(1)]
    for root in roots:
        found = [
            (found[k - 1] if k else 0) - root * (found[k] if k < len(found) else 0)
            for k in range(len(found) + 1)
        ]
    return tuple(found)


def transform_filter(weight: Array, results: int) -> Array:
    """Transforms w[out, in, r, r] to u[n, n, in, out], rounded once."""
    matrix = np.array(matrices(results, weight.shape[-1]).filter, np.float64)
    wide = weight.astype(np.float64)
    found: Array = np.einsum("ij,ocjk,lk->ilco", matrix, wide, matrix)
    return found.astype(np.float32)


@dataclass(frozen=True)
class LinearMap:
    """A matrix product as sums of multiples, with common subexpressions computed once."""

    shared: tuple[Row, ...]
    """Common subexpressions, appended to the inputs in order."""
    rows: tuple[Row, ...]

    @property
    def operations(self) -> int:
        return sum(len(row) - 1 for row in (*self.shared, *self.rows))

    def apply(self, f: Kernel, inputs: Sequence[Value]) -> list[Value]:
        values = list(inputs)
        for row in self.shared:
            values.append(_combine(f, row, values))
        return [_combine(f, row, values) for row in self.rows]


@cache
def linear_map(matrix: tuple[tuple[Fraction, ...], ...], is_whole: bool = False) -> LinearMap:
    """The matrix with common subexpressions eliminated: a pair of inputs that has the same ratio in
    several rows becomes a new input, the most frequent pair first. `is_whole` permits only integer
    ratios."""
    rows: list[Row] = [{k: c for k, c in enumerate(row) if c} for row in matrix]
    shared: list[Row] = []
    width = len(matrix[0])
    while True:
        pairs = Counter(
            (i, j, row[j] / row[i])
            for row in rows
            for i, j in (permutations if is_whole else combinations)(sorted(row), 2)
            if not is_whole or (row[j] / row[i]).denominator == 1
        )
        if not pairs or max(pairs.values()) < 2:
            return LinearMap(tuple(shared), tuple(rows))
        (i, j, ratio), _ = max(pairs.items(), key=lambda pair: (pair[1], abs(pair[0][2]) == 1))
        new = width + len(shared)
        shared.append({i: Fraction(1), j: ratio})
        for row in rows:
            if i in row and row.get(j) == ratio * row[i]:
                row[new] = row.pop(i)
                del row[j]


def _combine(f: Kernel, row: Row, values: Sequence[Value]) -> Value:
    """Σ coefficient · value, starting with a coefficient of 1 if there is one."""
    (first, scale), *rest = sorted(row.items(), key=lambda item: (item[1] != 1, item[0]))
    total = values[first]
    if scale != 1:
        total = f.neg(total) if scale == -1 else total * _factor(total, scale)
    for place, coefficient in rest:
        value = values[place]
        if coefficient == 1:
            total = total + value
        elif coefficient == -1:
            total = total - value
        elif value.type.is_int:
            total = total + value * _factor(value, coefficient)
        else:
            total = f.fma(value, f.const(value.type, float(coefficient)), total)
    return total


def _factor(value: Value, coefficient: Fraction) -> float:
    """A coefficient as a factor of a value; an integer for integer values."""
    if not value.type.is_int:
        return float(coefficient)
    assert coefficient.denominator == 1
    return int(coefficient)
