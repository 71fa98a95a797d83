"""Torch's symbolic integers as sizes.

The shapes of inputs are sympy expressions. Their symbols get the names that the caller gave, or the
input and axis where they first occur (`x.0`), and torch's upper bound, if any. Arithmetic of the
program on sizes uses bitwright's sizes (`scalars`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from bitwright.errors import UnsupportedError
from bitwright.ir.dim import FUNCTIONS, RESERVED, Dim, Size, max_size, min_size, symbol

_LARGEST_BOUND = 2**31  # larger bounds mean infinity

_OPERATIONS: dict[str, Callable[[Size, Size], Size]] = {
    "Add": lambda a, b: a + b,
    "Mul": lambda a, b: a * b,
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "Max": max_size,
    "Min": min_size,
}


class SymbolTable:
    """The sizes of torch's symbols."""

    def __init__(self, ranges: Mapping[Any, Any]) -> None:
        self._ranges = ranges
        self._names: dict[Any, str] = {}
        self._sizes: dict[str, Dim] = {}

    def declare(self, size: Any, name: str, of_root: bool = False) -> None:
        """Name the symbol of a torch size, if it has no name.

        The size is the symbol itself, or with `of_root` an expression of that symbol only.
        """
        expression = getattr(getattr(size, "node", None), "expr", None)
        if expression is None:
            return
        if expression.is_Symbol:
            self._names.setdefault(expression, name)
        elif of_root and len(expression.free_symbols) == 1:
            (root,) = expression.free_symbols
            self._names.setdefault(root, name)

    def size(self, size: Any) -> Size:
        """The size of an axis of an input."""
        node = getattr(size, "node", None)
        return int(size) if node is None else self._convert(node.expr)

    def _convert(self, expression: Any) -> Size:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self._symbol(expression)
        kind = type(expression).__name__
        if kind == "Pow" and expression.args[1].is_Integer and int(expression.args[1]) > 0:
            return reduce(
                lambda a, b: a * b, [self._convert(expression.args[0])] * int(expression.args[1])
            )
        if kind in _OPERATIONS:
            return reduce(_OPERATIONS[kind], map(self._convert, expression.args))
        raise UnsupportedError(f"a size has the form {expression}", expected="integer arithmetic")

    def _symbol(self, expression: Any) -> Dim:
        name = usable_name(self._names.get(expression, str(expression)))
        if name not in self._sizes:
            self._sizes[name] = symbol(name, self._bound(expression))
        return self._sizes[name]

    def _bound(self, expression: Any) -> int | None:
        try:
            upper = int(self._ranges[expression].upper)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            return None
        return upper if upper < _LARGEST_BOUND else None


def usable_name(name: str) -> str:
    """A valid name of a size that is similar to this one."""
    name = re.sub(r"[^A-Za-z0-9_.]", "_", name)
    if not re.match(r"[A-Za-z_]", name) or name in RESERVED or name in FUNCTIONS:
        name = f"_{name}"
    return name
