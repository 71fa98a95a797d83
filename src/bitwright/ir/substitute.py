"""Substitution of symbols in sizes, to express the sizes of a body by those of the outer graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bitwright.ir.dim import (
    UNKNOWN,
    Dim,
    Size,
    Symbol,
    broadcast_size,
    floordiv_size,
    max_size,
    min_size,
    mod_size,
)


def substitute(size: Size, values: Mapping[str, Size]) -> Size:
    """The size with its symbols replaced by other sizes."""
    if not isinstance(size, Dim) or size is UNKNOWN:
        return size
    total: Size = 0
    for monomial, coefficient in size.terms:
        product: Size = coefficient
        for atom in monomial:
            if isinstance(atom, Symbol):
                product = product * values.get(atom.name, Dim((((atom,), 1),)))
            else:
                left, right = (substitute(a, values) for a in atom.args)
                product = product * apply_function(atom.kind, left, right)
        total = total + product
    return total


def apply_function(kind: str, a: Size, b: Size) -> Size:
    """One of `FUNCTIONS` on two sizes, simplified."""
    simplify: dict[str, Callable[[Size, Size], Size]] = {
        "floordiv": floordiv_size,
        "mod": mod_size,
        "max": max_size,
        "min": min_size,
        "broadcast": broadcast_size,
    }
    return simplify[kind](a, b)
