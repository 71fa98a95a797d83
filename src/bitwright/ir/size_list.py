"""Sizes that are evaluated together, each different one once.

    sizes = SizeList()
    width, area = sizes.add(w), sizes.add(h * w)
    values = sizes.values({"h": 4, "w": 8})         # values[width] = 8, values[area] = 32

Who asks for many sizes again and again (the tables of a program, for every new shape) numbers them
once: looking up a number is far cheaper than looking up a `Dim`.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.ir.dim import Size, Sizes, evaluate


class SizeList:
    """Different sizes, numbered in the order in which they came."""

    def __init__(self) -> None:
        self._numbers: dict[Size, int] = {}

    def add(self, size: Size) -> int:
        """The number of a size."""
        return self._numbers.setdefault(size, len(self._numbers))

    def values(self, bindings: Mapping[str, int]) -> list[int]:
        """What each size is, by its number, with these values of symbols."""
        known = bindings if isinstance(bindings, Sizes) else Sizes(bindings)
        return [evaluate(size, known) for size in self._numbers]
