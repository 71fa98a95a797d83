"""Sizes of tensor dimensions: plain integers, or integer polynomials over named symbols.

A `Dim` has a normal form (a sum of integer multiples of products of atoms), so equal sizes compare
equal: `2*seq + batch*3 == batch*3 + seq*2`. An atom is a named symbol or an opaque `floordiv`,
`mod`, `max`, `min` or `broadcast` of sizes that does not simplify. Operations return an `int` if
the result is constant, so `Size = int | Dim` is the type of every dimension.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import mul

from bitwright.errors import GraphError, RunError
from bitwright.ir.dtype import DTYPES

RESERVED = frozenset({"true", "false", "none", "inf", "nan", "graph", "tensor", *DTYPES})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
_MAX_DEPTH = 60
_MAX_TERMS = 200
_MAX_WEIGHT = 400  # atoms in a size, nested ones included; larger sizes become UNKNOWN
_MAX_COEFFICIENT = 1 << 64


@dataclass(frozen=True, order=True)
class Symbol:
    """A named free size from 0 to `bound` (None: unbounded)."""

    name: str
    bound: int | None = None

    depth = 0
    weight = 1

    @property
    def bounds(self) -> tuple[float, float]:
        return 0, math.inf if self.bound is None else self.bound

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Function:
    """An operation on sizes that has no polynomial form."""

    kind: str
    args: tuple[Size, ...]

    @cached_property
    def depth(self) -> int:
        return 1 + max(a.depth if isinstance(a, Dim) else 0 for a in self.args)

    @cached_property
    def weight(self) -> int:
        return 1 + sum(a.weight if isinstance(a, Dim) else 0 for a in self.args)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        (low, high), (other_low, other_high) = map(bounds, self.args)
        if self.kind == "max":
            return max(low, other_low), max(high, other_high)
        if self.kind == "min":
            return min(low, other_low), min(high, other_high)
        if low < 0 or other_low < 0:
            return -math.inf, math.inf
        if self.kind == "broadcast":
            return min(low, other_low), max(high, other_high)
        if self.kind == "mod":
            return 0, min(high, max(other_high - 1, 0))
        return 0, high if other_low < 1 or high == math.inf else high // other_low

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.args))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _text(self) -> str:
        if self.kind in _INFIX:
            left, right = map(str, self.args)
            left = (
                f"({left})" if isinstance(self.args[0], Dim) and not self.args[0].is_term else left
            )
            right = f"({right})" if isinstance(self.args[1], Dim) else right
            return f"{left}{_INFIX[self.kind]}{right}"
        return f"{self.kind}({', '.join(map(str, self.args))})"

    def __str__(self) -> str:
        return self._text


Atom = Symbol | Function
Monomial = tuple[Atom, ...]  # sorted by text; a power repeats its atom
_INFIX = {"floordiv": "//"}


def _broadcast(a: int, b: int) -> int:
    if a != b and a != 1 and b != 1:
        raise RunError(f"sizes {a} and {b} do not broadcast")
    return b if a == 1 else a


def _quotient(a: int, b: int) -> int:
    if b == 0:
        raise RunError(f"size {a} is divided by a size that is zero")
    return a // b


_EVALUATE: dict[str, Callable[[int, int], int]] = {
    "floordiv": _quotient,
    "mod": lambda a, b: a - b * _quotient(a, b),
    "max": max,
    "min": min,
    "broadcast": _broadcast,
}
FUNCTIONS = frozenset(_EVALUATE)
_SYMMETRIC = ("max", "min", "broadcast")


class Dim:
    """A symbolic size; `symbol`, arithmetic and the functions of this module make it."""

    __slots__ = ("_hash", "_symbols", "_text", "depth", "terms", "weight")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self.depth = max((atom.depth for monomial, _ in terms for atom in monomial), default=0)
        self.weight = sum(1 + sum(atom.weight for atom in monomial) for monomial, _ in terms)
        self._hash = hash(terms)
        self._text: str | None = None
        self._symbols: frozenset[Symbol] | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Dim) and self._hash == other._hash and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Size) -> Size:
        return _combine(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return _combine(self, other, -1)

    def __rsub__(self, other: int) -> Size:
        return _combine(-self, other, 1)

    def __neg__(self) -> Size:
        return _make({m: -c for m, c in self.terms})

    def __mul__(self, other: Size) -> Size:
        if not isinstance(other, Dim):
            return _scaled(self, int(other))
        total: dict[Monomial, int] = {}
        if len(self.terms) * len(_terms(other)) > _MAX_WEIGHT:
            return UNKNOWN
        for m1, c1 in self.terms:
            for m2, c2 in _terms(other):
                product = tuple(sorted(m1 + m2, key=str))
                total[product] = total.get(product, 0) + c1 * c2
        return _make(total)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return floordiv_size(self, other)

    def __rfloordiv__(self, other: int) -> Size:
        return floordiv_size(other, self)

    def __mod__(self, other: Size) -> Size:
        return mod_size(self, other)

    def __rmod__(self, other: int) -> Size:
        return mod_size(other, self)

    def __str__(self) -> str:
        if self._text is None:
            self._text = self._render()
        return self._text

    def _render(self) -> str:
        parts = []
        for monomial, coefficient in self.terms:
            alone = len(monomial) == 1 and abs(coefficient) == 1
            factors = [str(a) if alone or "//" not in str(a) else f"({a})" for a in monomial]
            if not factors:
                text = str(abs(coefficient))
            elif abs(coefficient) == 1:
                text = "*".join(factors)
            else:
                text = "*".join([str(abs(coefficient)), *factors])
            parts.append(("-" if coefficient < 0 else "+") + text)
        return "".join(parts).removeprefix("+")

    __repr__ = __str__

    @property
    def is_term(self) -> bool:
        """Whether the text is one product, which needs no parentheses as an operand."""
        return len(self.terms) == 1 and self.terms[0][1] > 0

    @property
    def symbols(self) -> frozenset[Symbol]:
        """Every symbol that this size depends on."""
        if self._symbols is None:
            found: set[Symbol] = set()
            for monomial, _ in self.terms:
                for atom in monomial:
                    if isinstance(atom, Symbol):
                        found.add(atom)
                    else:
                        for arg in atom.args:
                            found |= symbols_of(arg)
            self._symbols = frozenset(found)
        return self._symbols


Size = int | Dim


_NO_NAME = Symbol("?")


class _Unknown(Dim):
    """The inferred size where only the data decides; the builder replaces it by a named symbol."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__((((_NO_NAME,), 1),))


UNKNOWN = _Unknown()


def symbol(name: str, bound: int | None = None) -> Dim:
    """A free size. `bound`, if given, is its largest value."""
    if not _NAME.match(name) or name in RESERVED or name in FUNCTIONS:
        raise GraphError(
            f"{name!r} cannot name a size", expected="letters, digits, _ and ., no reserved word"
        )
    if bound is not None and bound < 0:
        raise GraphError(f"size {name!r} has a negative bound {bound}")
    return Dim((((Symbol(name, bound),), 1),))


_NO_SYMBOLS: frozenset[Symbol] = frozenset()


def symbols_of(size: Size) -> frozenset[Symbol]:
    return size.symbols if isinstance(size, Dim) else _NO_SYMBOLS


def _terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(size, Dim):
        return size.terms
    return (((), int(size)),) if size else ()


def _make(terms: Mapping[Monomial, int]) -> Size:
    kept = sorted(((m, c) for m, c in terms.items() if c), key=lambda t: (-len(t[0]), _key(t[0])))
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    if any(_NO_NAME in monomial for monomial, _ in kept):
        return UNKNOWN
    size = Dim(tuple(kept))
    if size.weight > _MAX_WEIGHT or any(abs(c) > _MAX_COEFFICIENT for _, c in kept):
        return UNKNOWN
    return size


def _key(monomial: Monomial) -> str:
    return "*".join(map(str, monomial))


def _scaled(size: Dim, factor: int) -> Size:
    """size * factor; the terms keep their order, so nothing is sorted."""
    if factor == 0 or factor == 1:
        return size if factor else 0
    if size is UNKNOWN or any(abs(c * factor) > _MAX_COEFFICIENT for _, c in size.terms):
        return UNKNOWN
    return Dim(tuple([(m, c * factor) for m, c in size.terms]))


def _combine(a: Size, b: Size, sign: int) -> Size:
    if isinstance(a, Dim) and not isinstance(b, Dim) and a is not UNKNOWN:
        monomial, number = a.terms[-1]
        rest, number = (a.terms, 0) if monomial else (a.terms[:-1], number)
        number += sign * int(b)
        if abs(number) <= _MAX_COEFFICIENT and a.weight < _MAX_WEIGHT:
            return Dim((*rest, ((), number)) if number else rest)
    total = dict(_terms(a))
    for monomial, coefficient in _terms(b):
        total[monomial] = total.get(monomial, 0) + sign * coefficient
    return _make(total)


def _function(kind: str, a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return _EVALUATE[kind](a, b)
    if a is UNKNOWN or b is UNKNOWN:
        return UNKNOWN
    if kind in _SYMMETRIC and str(b) < str(a):
        a, b = b, a
    atom = Function(kind, (a, b))
    if atom.depth > _MAX_DEPTH or atom.weight > _MAX_WEIGHT:
        return UNKNOWN
    return Dim((((atom,), 1),))


def divide_exactly(a: Size, b: Size) -> Size | None:
    """a / b if b divides a as a polynomial (or equals a), else None."""
    if a == b:
        return 1
    divisor = _terms(b)
    if not divisor:
        return None
    leading, factor = min(divisor, key=_degree_order)
    rest, quotient = dict(_terms(a)), dict[Monomial, int]()
    for _ in range(_MAX_TERMS):
        if not rest:
            return _make(quotient)
        monomial, coefficient = min(rest.items(), key=_degree_order)
        cofactor = _without(monomial, leading)
        if cofactor is None or coefficient % factor:
            return None
        quotient[cofactor] = coefficient // factor
        for m, c in divisor:  # rest -= cofactor * divisor, which cancels its leading term
            product = tuple(sorted(cofactor + m, key=str))
            rest[product] = rest.get(product, 0) - quotient[cofactor] * c
            if not rest[product]:
                del rest[product]
    return None


def _degree_order(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    """A sort key with the leading term first, in an order that multiplication preserves."""
    return -len(term[0]), [str(atom) for atom in term[0]]


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    """monomial / part, or None if it does not divide."""
    rest = list(monomial)
    for atom in part:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def floordiv_size(a: Size, b: Size) -> Size:
    if b == 0:
        raise GraphError(f"size {a} is divided by zero")
    exact = divide_exactly(a, b)
    if exact is not None:
        return exact
    if isinstance(b, int) and b > 0:  # (b*q + r) // b -> q + r // b
        whole = {m: c // b for m, c in _terms(a) if c % b == 0 or not m}
        rest = {m: (c % b if not m else c) for m, c in _terms(a) if c % b or not m}
        if any(whole.values()):
            return _combine(_make(whole), _function("floordiv", _make(rest), b), 1)
    return _function("floordiv", a, b)


def mod_size(a: Size, b: Size) -> Size:
    if b == 0:
        raise GraphError(f"size {a} is taken modulo zero")
    if divide_exactly(a, b) is not None:
        return 0
    if isinstance(b, int) and b > 0:  # (b*q + r) % b -> r % b
        a = _make({m: (c % b if not m else c) for m, c in _terms(a) if c % b})
    return _function("mod", a, b)


def max_size(a: Size, b: Size) -> Size:
    return _extreme("max", a, b)


def min_size(a: Size, b: Size) -> Size:
    return _extreme("min", a, b)


def _extreme(kind: str, a: Size, b: Size) -> Size:
    low, high = bounds(_combine(a, b, -1))
    if low >= 0 or high <= 0:
        return a if (low >= 0) == (kind == "max") else b
    return _function(kind, a, b)


def bounds(size: Size) -> tuple[float, float]:
    """Lower and upper bounds of a size, from the bounds of its atoms."""
    low: float = 0
    high: float = 0
    for monomial, coefficient in _terms(size):
        corners: tuple[float, ...] = (coefficient, coefficient)
        for atom in monomial:
            every = [x * y if x and y else 0 for x in corners for y in atom.bounds]
            corners = (min(every), max(every))
        low, high = low + corners[0], high + corners[1]
    return low, high


def broadcast_size(a: Size, b: Size) -> Size:
    """The size of two broadcast dimensions; a `GraphError` for unequal constants."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int) and isinstance(b, int):
        raise GraphError(f"sizes {a} and {b} do not broadcast")
    if isinstance(a, int):
        return a  # a symbol that broadcasts with a constant above 1 equals it, or is 1
    if isinstance(b, int):
        return b
    for one, other in ((a, b), (b, a)):
        if _cuts(one, other):
            return other
    return _function("broadcast", a, b)


def _cuts(size: Dim, other: Dim) -> bool:
    """Whether size is min(limit, other) with a limit above 1; it broadcasts only if it is equal."""
    ((monomial, coefficient), *more) = size.terms
    if more or coefficient != 1 or len(monomial) != 1:
        return False
    (atom,) = monomial
    if not isinstance(atom, Function) or atom.kind != "min" or other not in atom.args:
        return False
    return all(arg == other or bounds(arg)[0] > 1 for arg in atom.args)


class Sizes(dict[str, int]):
    """Fixed values of symbols, with a cache of evaluated sizes."""

    def __init__(self, bindings: Mapping[str, int]) -> None:
        super().__init__(bindings)
        self.known: dict[Dim, int] = {}


def evaluate(size: Size, bindings: Mapping[str, int]) -> int:
    """The value of a size once its symbols are known."""
    if not isinstance(size, Dim):
        return int(size)
    known = bindings.known if isinstance(bindings, Sizes) else {}
    found = known.get(size)
    if found is not None:
        return found
    total = 0
    for monomial, coefficient in size.terms:
        product = coefficient
        for atom in monomial:
            if isinstance(atom, Symbol):
                if atom.name not in bindings:
                    raise RunError(f"size {atom.name!r} has no value yet")
                product *= bindings[atom.name]
            else:
                left, right = atom.args
                product *= _EVALUATE[atom.kind](evaluate(left, bindings), evaluate(right, bindings))
        total += product
    known[size] = total
    return total


def product(sizes: Iterable[Size]) -> Size:
    number, dims = 1, list[Dim]()
    for size in sizes:
        if isinstance(size, Dim):
            dims.append(size)
        else:
            number *= size
    return reduce(mul, dims, 1) * number
