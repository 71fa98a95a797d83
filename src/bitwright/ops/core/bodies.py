"""Types of nested graphs: whether operands fit a body, and its result types outside.

A body declares its inputs with its own symbols. Outside, the sizes of its results are expressed by
the sizes of the operands that bind these symbols. A size that data inside the body decides is
unknown outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitwright.errors import InferenceError
from bitwright.ir.dim import UNKNOWN, Dim, Size, Symbol, symbols_of
from bitwright.ir.dtype import DType, bool_
from bitwright.ir.graph import Graph, symbols_in
from bitwright.ir.substitute import substitute
from bitwright.ir.types import OpaqueType, TensorType, ValueType
from bitwright.ops.core import expect

Sizes = Mapping[str, Size]


def check_fit(body: Graph, operands: Sequence[ValueType | None]) -> None:
    """Raise unless every operand can be the body's input at its position."""
    if len(operands) != len(body.inputs):
        raise InferenceError(
            f"body {body.name!r} has another number of inputs than it is given",
            expected=len(body.inputs),
            found=len(operands),
        )
    for value, type_ in zip(body.inputs, operands, strict=True):
        if not _fits(value.type, type_):
            raise InferenceError(
                f"input {value} of body {body.name!r} is given a value of another type",
                expected=value.type,
                found=type_,
                hint="Sizes that differ between runs of the body need symbols of their own.",
            )


def _fits(declared: ValueType, given: ValueType | None) -> bool:
    if isinstance(declared, OpaqueType):
        return given is not None
    return (
        isinstance(given, TensorType)
        and given.dtype == declared.dtype
        and given.rank == declared.rank
        and all(
            isinstance(a, Dim) or isinstance(b, Dim) or a == b
            for a, b in zip(declared.shape, given.shape, strict=True)
        )
    )


def require_scalar(what: str, type_: ValueType, element: DType) -> None:
    """One element, as [] or [1]."""
    if isinstance(type_, OpaqueType):
        raise InferenceError(f"{what} is not a tensor", expected=f"{element}[]", found=type_)
    expect.element(what, type_, element)
    if type_.rank > 1 or any(isinstance(size, int) and size != 1 for size in type_.shape):
        raise InferenceError(f"{what} is not one value", expected=f"{element}[]", found=type_)


def require_condition(type_: ValueType) -> None:
    require_scalar("the condition", type_, bool_)


def bind_sizes(declared: Iterable[ValueType], given: Iterable[ValueType | None]) -> dict[str, Size]:
    """The outer size of each symbol that is a whole dimension of an input; the first wins."""
    found: dict[str, Size] = {}
    for inner, outer in zip(declared, given, strict=True):
        if isinstance(inner, TensorType) and isinstance(outer, TensorType):
            for size, actual in zip(inner.shape, outer.shape, strict=True):
                if name := _plain_symbol(size):
                    found.setdefault(name, actual)
    return found


def _plain_symbol(size: Size) -> str | None:
    if isinstance(size, Dim) and len(size.terms) == 1:
        monomial, coefficient = size.terms[0]
        if coefficient == 1 and len(monomial) == 1 and isinstance(monomial[0], Symbol):
            return monomial[0].name
    return None


def hidden_symbols(body: Graph) -> frozenset[str]:
    """The symbols without meaning outside: those of inputs, and those that data inside decides."""
    hidden = {symbol.name for symbol in body.input_symbols}
    for node in body.nodes:
        if not node.is_boundary:
            given = _mentioned(node.attrs.values()).union(*(v.type.symbols for v in node.operands))
            made = frozenset[Symbol]().union(*(type_.symbols for type_ in node.types))
            hidden |= {symbol.name for symbol in made - given}
    return frozenset(hidden)


def _mentioned(attrs: Iterable[Any]) -> frozenset[Symbol]:
    found: frozenset[Symbol] = frozenset()
    for attr in attrs:
        found |= symbols_in(attr)
        if isinstance(attr, Graph):
            for _, node in attr.walk():
                found |= node.attr_symbols
    return found


def outer_size(size: Size, sizes: Sizes, hidden: frozenset[str]) -> Size:
    """A size of the body in terms of outer sizes, or UNKNOWN."""
    if any(s.name in hidden and s.name not in sizes for s in symbols_of(size)):
        return UNKNOWN
    return substitute(size, sizes)


def outer_type(type_: ValueType, sizes: Sizes, hidden: frozenset[str]) -> ValueType:
    if isinstance(type_, OpaqueType):
        return type_
    return type_.with_shape(outer_size(size, sizes, hidden) for size in type_.shape)


def result_types(body: Graph, operands: Sequence[ValueType | None]) -> tuple[ValueType, ...]:
    """The outer types of the body's results after one run on these operands."""
    sizes = bind_sizes((v.type for v in body.inputs), operands)
    hidden = hidden_symbols(body)
    return tuple(outer_type(value.type, sizes, hidden) for _, value in body.outputs)


def either(what: str, one: ValueType, other: ValueType) -> ValueType:
    """The type of a value that has one of two types."""
    if isinstance(one, OpaqueType) or isinstance(other, OpaqueType):
        return one if isinstance(one, OpaqueType) else other
    if one.dtype != other.dtype:
        raise InferenceError(f"{what} has two element types", expected=one, found=other)
    if one.rank != other.rank:
        return OpaqueType(f"tensor({one.dtype})")
    return one.with_shape(
        a if a == b else UNKNOWN for a, b in zip(one.shape, other.shape, strict=True)
    )


def lasting_sizes(
    body: Graph,
    operands: Sequence[ValueType | None],
    carried: Sequence[tuple[int, int]],
    hidden: frozenset[str],
) -> dict[str, Size]:
    """Outer sizes of the body's input symbols that are the same in every iteration.

    `carried` pairs the position of an input with the position of the output that replaces it. This
    is a fixed point: assume that all symbols keep their first size, drop those whose output then
    has another size than its input, and repeat until none is dropped.
    """
    declared = [v.type for v in body.inputs]
    changing = {given for given, _ in carried}
    fixed = [i for i in range(len(declared)) if i not in changing]
    constant = bind_sizes((declared[i] for i in fixed), (operands[i] for i in fixed))
    sizes = {**bind_sizes(declared, operands), **constant}
    while True:
        dropped = {
            symbol.name
            for given, made in carried
            for before, first, after in _axes(body, operands, given, made)
            if after != before and outer_size(after, sizes, hidden) != first
            for symbol in symbols_of(before)
            if symbol.name in sizes and symbol.name not in constant
        }
        if not dropped:
            return sizes
        sizes = {name: size for name, size in sizes.items() if name not in dropped}


def _axes(
    body: Graph, operands: Sequence[ValueType | None], given: int, made: int
) -> list[tuple[Size, Size, Size]]:
    """Per axis: the inner size before an iteration, the outer size before the first, and the
    inner size after an iteration."""
    before, first, after = body.inputs[given].type, operands[given], body.outputs[made][1].type
    if not (isinstance(before, TensorType) and isinstance(first, TensorType)):
        return []
    if not isinstance(after, TensorType) or after.rank != before.rank:
        raise InferenceError(
            f"body {body.name!r} changes the rank of input {body.inputs[given]}",
            expected=before,
            found=after,
            hint=f"A value of changing rank is declared as host<tensor({before.dtype})>.",
        )
    return list(zip(before.shape, first.shape, after.shape, strict=True))


def carried_type(
    body: Graph,
    operands: Sequence[ValueType | None],
    given: int,
    made: int,
    sizes: Sizes,
    hidden: frozenset[str],
) -> ValueType:
    """The type of a carried value after all iterations (possibly none)."""
    first, (name, value) = operands[given], body.outputs[made]
    assert first is not None
    last = either(f"carried value {name!r}", first, outer_type(value.type, sizes, hidden))
    axes = _axes(body, operands, given, made)
    if isinstance(last, OpaqueType) or not axes:
        return last
    return last.with_shape(
        size if after == before else found
        for (before, size, after), found in zip(axes, last.shape, strict=True)
    )
