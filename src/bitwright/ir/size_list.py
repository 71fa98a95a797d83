"""Sizes that are evaluated together, each distinct size once.

    sizes = SizeList()
    width, area = sizes.add(w), sizes.add(h * w)
    values = sizes.values({"h": 4, "w": 8})         # values[width] = 8, values[area] = 32

A program evaluates many sizes for every new shape. Numbering them once makes each lookup a list
index, which is much cheaper than hashing a `Dim`.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.ir.dim import Size, Sizes, evaluate


class SizeList:
    """Distinct sizes, numbered in the order of `add`."""

    def __init__(self) -> None:
        self._numbers: dict[Size, int] = {}

    def add(self, size: Size) -> int:
        """The number of a size."""
        return self._numbers.setdefault(size, len(self._numbers))

    def values(self, bindings: Mapping[str, int]) -> list[int]:
        """The value of each size, by its number, for these values of symbols."""
        known = bindings if isinstance(bindings, Sizes) else Sizes(bindings)
        return [evaluate(size, known) for size in self._numbers]
