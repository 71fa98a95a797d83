"""Inputs whose answer changes between the float and the quantized model.

The answer of a float output is the place of the largest number along its last axis, one answer per
row; its margin is the distance to the second largest. The answer of an integer output is each of
its numbers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bitwright.ir.arrays import Array

MOST = 1000
"""Flips kept: those that the float model was most sure of."""


Margin = float | None


@dataclass(frozen=True)
class Flip:
    """One changed answer; margins are None for integer outputs."""

    batch: int
    row: int
    output: str
    float: int
    quantized: int
    float_margin: Margin
    quantized_margin: Margin

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Flips:
    """Changed answers over batches."""

    def __init__(self) -> None:
        self.count = self.rows = 0
        self._order = itertools.count()
        self._held: list[tuple[float, int, Flip]] = []

    def add(self, batch: int, exact: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for name, one in exact.items():
            other = found.get(name)
            if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
                continue
            if other.shape != one.shape or not one.ndim:
                continue
            if one.dtype.kind in "iu":
                self._compare(batch, name, one.reshape(-1), other.reshape(-1), None)
            elif one.dtype.kind == "f" and one.ndim > 1 and one.shape[-1] > 1 and one.size:
                rows = [a.reshape(-1, a.shape[-1]).astype(np.float64) for a in (one, other)]
                answers = rows[0].argmax(-1), rows[1].argmax(-1)
                self._compare(batch, name, *answers, (rows[0], rows[1]))

    def _compare(
        self, batch: int, name: str, a: Array, b: Array, values: tuple[Array, Array] | None
    ) -> None:
        changed = np.flatnonzero(a != b)
        self.rows += a.size
        self.count += changed.size
        for row in changed.tolist():
            margins = [None, None] if values is None else [_margin(v[row]) for v in values]
            flip = Flip(batch, row, name, int(a[row]), int(b[row]), *margins)
            entry = flip.float_margin or 0.0, -next(self._order), flip
            if len(self._held) < MOST:
                heapq.heappush(self._held, entry)
            else:
                heapq.heappushpop(self._held, entry)

    @property
    def found(self) -> list[Flip]:
        """The flips, the largest float margin first."""
        return [flip for _, _, flip in sorted(self._held, reverse=True)]


def _margin(row: Array) -> float:
    second, first = np.partition(row, -2)[-2:]
    return float(first - second)
