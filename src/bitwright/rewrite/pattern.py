"""Patterns: what a rule's `match` lambda builds when it is called with `op` and its variables.

    lambda op, x, p: op.add(op.mul(x, p), 0)     variables bind values
    lambda op, x, a: op.softmax(x, axis=a)       or attributes; attributes left out match anything
    lambda op, x: op.concat(..., as_="joined")   `...` matches any operands, `as_` binds the node
    lambda op, x, b: op.conv(x, w, op.maybe(b))  an operand that may be absent (binds None)
    lambda op, x, k: op.split(x)[1]              one result of an op with several

A number in an operand's place matches a constant whose elements all equal it, as nearly as their
type can say it. An op that is
declared commutative matches in either order of operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bitwright.errors import RewriteError
from bitwright.ops.core.registry import get


@dataclass(frozen=True)
class Variable:
    name: str
    optional: bool = False


@dataclass(frozen=True)
class Literal:
    number: float


@dataclass(frozen=True)
class OpPattern:
    op: str
    operands: tuple[Pattern, ...] | None
    """None matches any operands."""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    bound: str = ""
    index: int = 0

    def __getitem__(self, index: int) -> OpPattern:
        return replace(self, index=index)

    @cached_property
    def orders(self) -> tuple[tuple[str, ...], ...]:
        """The ops that must have made the operands, in each order; "" where any may have."""
        wanted = tuple(map(_maker, self.operands or ()))
        is_transposed = len(wanted) == 2 and get(self.op).commutative and wanted[0] != wanted[1]
        return (wanted, wanted[::-1]) if is_transposed else (wanted,)


Pattern = Variable | Literal | OpPattern


def _maker(pattern: Pattern) -> str:
    if isinstance(pattern, OpPattern):
        return pattern.op
    return "constant" if isinstance(pattern, Literal) else ""


class PatternMaker:
    """The `op` of a `match` lambda."""

    def maybe(self, variable: Variable) -> Variable:
        return replace(variable, optional=True)

    def __getattr__(self, name: str) -> Callable[..., OpPattern]:
        op = get(name.removesuffix("_")).name

        def make(*operands: Any, as_: str = "", **attrs: Any) -> OpPattern:
            if operands == (...,):
                return OpPattern(op, None, attrs, as_)
            return OpPattern(op, tuple(map(_as_pattern, operands)), attrs, as_)

        return make


def _as_pattern(operand: Any) -> Pattern:
    if isinstance(operand, (Variable, Literal, OpPattern)):
        return operand
    if isinstance(operand, (int, float)):
        return Literal(float(operand))
    raise RewriteError(f"{operand!r} cannot stand in a pattern")


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The variables a lambda asks for: its parameters after `op`, but for those with defaults."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)


def make_pattern(match: Callable[..., Any]) -> OpPattern:
    """Call a `match` lambda with one variable per parameter that has no default."""
    names = parameter_names(match)
    pattern = match(PatternMaker(), *(Variable(name) for name in names))
    if not isinstance(pattern, OpPattern):
        raise RewriteError("a pattern must have an op at its root")
    return pattern


def any_operands(op_name: str) -> Callable[[Any], Any]:
    """The `match` function for an op with any operands and attributes."""
    return lambda op: getattr(op, op_name)(...)
