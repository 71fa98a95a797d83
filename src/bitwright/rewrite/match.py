"""Matching a pattern against a value and what produced it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from bitwright.errors import RewriteError
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.core.registry import get
from bitwright.rewrite.pattern import Literal, OpPattern, Pattern, Variable

Array = np.ndarray[Any, Any]
Bindings = dict[str, Any]
T = TypeVar("T")
SMALL = 64  # constants up to this many elements are compared by content


class Match:
    """What a rule's `replace` and `unless` see: bound values, nodes and attributes by name."""

    def __init__(
        self, root: Node, bindings: Mapping[str, Any], uses: Callable[[Value], int]
    ) -> None:
        self.root = root
        self.bindings = bindings
        self.uses = uses
        self._memo: dict[Callable[[Match], Any], Any] = {}

    def memo(self, compute: Callable[[Match], T]) -> T:
        """compute(self), computed once per match: `unless` and `replace` share results this way."""
        if compute not in self._memo:
            self._memo[compute] = compute(self)
        return self._memo[compute]  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.bindings:
            raise AttributeError(f"the pattern binds no {name!r}")
        return self.bindings[name]

    def array(self, name: str) -> Array:
        """The array of a variable that must be a constant (check with `is_constant` first)."""
        found = constant_value(self.bindings[name])
        if found is None:
            raise RewriteError(f"{name!r} is not a constant")
        return found

    def is_constant(self, *names: str) -> bool:
        return all(constant_value(self.bindings[name]) is not None for name in names)

    def scalar(self, name: str) -> float | None:
        """The number a constant holds everywhere, or None."""
        return uniform(self.bindings[name])


def uniform(value: Value | None) -> float | None:
    """The one number that every element of a small constant equals, or None."""
    array = constant_value(value)
    if array is None or array.size == 0 or array.size > SMALL or array.dtype == object:
        return None
    if array.dtype.kind == "c":
        return None
    first = array.reshape(-1)[0]
    return float(first) if (array == first).all() else None


def is_number(value: Value | None, number: float) -> bool:
    """Whether a constant is this number everywhere, as nearly as its element type can say it."""
    found = uniform(value)
    if found is None or value is None:
        return False
    if found == number or not value.dtype.is_float or number == 0:
        return found == number
    return abs(found - number) <= 2 * float(ml_dtypes.finfo(value.dtype.numpy).eps) * abs(number)  # type: ignore[no-untyped-call]


def same_value(a: Any, b: Any) -> bool:
    """Whether two bindings are one: the same value, equal small constants, or equal attributes."""
    if isinstance(a, Value) and isinstance(b, Value):
        if a is b:
            return True
        x, y = constant_value(a), constant_value(b)
        return (
            x is not None
            and y is not None
            and x.size <= SMALL
            and x.dtype == y.dtype
            and x.shape == y.shape
            and bool(np.array_equal(x, y))
        )
    return bool(type(a) is type(b) and a == b)


def match_node(pattern: OpPattern, node: Node) -> Iterable[Bindings]:
    """Every way in which the pattern fits this node."""
    return _match_op(pattern, node, {}) if may_match(pattern, node) else ()


def may_match(pattern: OpPattern, node: Node) -> bool:
    """Whether the ops that made the operands allow it, which few nodes pass."""
    if node.op != pattern.op:
        return False
    if pattern.operands is None:
        return True
    given = [None if value is None else value.node.op for value in node.inputs]
    if len(given) > len(pattern.operands):
        return False
    for wanted in pattern.orders:
        for op, found in zip_longest(wanted, given):
            if op and op != found:
                break
        else:
            return True
    return False


def _match(pattern: Pattern, value: Value | None, bound: Bindings) -> Iterator[Bindings]:
    if isinstance(pattern, Variable):
        if value is None and not pattern.optional:
            return
        if pattern.name not in bound:
            yield {**bound, pattern.name: value}
        elif same_value(bound[pattern.name], value) or bound[pattern.name] is value:
            yield bound
    elif value is None:
        return
    elif isinstance(pattern, Literal):
        if is_number(value, pattern.number):
            yield bound
    elif value.index == pattern.index:
        yield from _match_op(pattern, value.node, bound)


def _match_op(pattern: OpPattern, node: Node, bound: Bindings) -> Iterator[Bindings]:
    if node.op != pattern.op:
        return
    attrs = _match_attrs(pattern, node, bound)
    if attrs is None:
        return
    if pattern.bound:
        attrs = {**attrs, pattern.bound: node}
    if pattern.operands is None:
        yield attrs
        return
    count = len(pattern.operands)
    if len(node.inputs) > count:
        return
    inputs = [*node.inputs, *[None] * (count - len(node.inputs))]
    orders = [inputs]
    if count == 2 and get(node.op).commutative:
        orders.append(inputs[::-1])
    for order in orders:
        yield from _match_all(pattern.operands, order, attrs)


def _match_all(
    patterns: tuple[Pattern, ...], values: list[Value | None], bound: Bindings
) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for found in _match(patterns[0], values[0], bound):
        yield from _match_all(patterns[1:], values[1:], found)


def _match_attrs(pattern: OpPattern, node: Node, bound: Bindings) -> Bindings | None:
    for name, wanted in pattern.attrs.items():
        found = node.attrs.get(name)
        if isinstance(wanted, Variable):
            if wanted.name in bound:
                if not same_value(bound[wanted.name], found):
                    return None
            else:
                bound = {**bound, wanted.name: found}
        elif found != wanted:
            return None
    return bound
