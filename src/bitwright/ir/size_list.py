"""Sizes that are evaluated together, each distinct size once.

    sizes = SizeList()
    width, area = sizes.add(w), sizes.add(h * w)
    values = sizes.values({"h": 4, "w": 8})         # values[width] = 8, values[area] = 32

A program evaluates many sizes for every new shape. Numbering them once makes each lookup a list
index, which is much cheaper than hashing a `Dim`; and most sizes are `factor * symbol + rest`.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.ir.dim import Dim, Size, Sizes, Symbol, evaluate

Line = tuple[str, int, int]
"""Symbol, factor and rest of factor * symbol + rest; without a symbol, the rest."""


class SizeList:
    """Distinct sizes, numbered in the order of `add`."""

    def __init__(self) -> None:
        self._numbers: dict[Size, int] = {}
        self._lines: list[Line | Dim] = []

    def add(self, size: Size) -> int:
        """The number of a size."""
        if size not in self._numbers:
            self._numbers[size] = len(self._numbers)
            self._lines.append(_line(size))
        return self._numbers[size]

    def values(self, bindings: Mapping[str, int]) -> list[int]:
        """The value of each size, by its number, for these values of symbols."""
        known = bindings if isinstance(bindings, Sizes) else Sizes(bindings)
        found = []
        for line in self._lines:
            if isinstance(line, Dim):
                found.append(evaluate(line, known))
                continue
            name, factor, rest = line
            if factor:
                if name not in known:
                    evaluate(next(s for s in self._numbers if _line(s) == line), known)  # raises
                rest += factor * known[name]
            found.append(rest)
        return found


def _line(size: Size) -> Line | Dim:
    if not isinstance(size, Dim):
        return "", 0, int(size)
    name, factor, rest = "", 0, 0
    for monomial, coefficient in size.terms:
        if not monomial:
            rest = coefficient
        elif len(monomial) == 1 and isinstance(monomial[0], Symbol) and not name:
            name, factor = monomial[0].name, coefficient
        else:
            return size
    return name, factor, rest
