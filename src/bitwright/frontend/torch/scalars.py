"""Scalar arithmetic of a program: sizes, ratios of sizes, and data.

A number is a Python number, a size, a `Ratio` of sizes (a symbolic float of torch), or a value of
rank 0 if it depends on data. The result is of the first kind in this list that can represent it:
`int(seq * 0.5)` is the size `seq//2`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from bitwright.ir.dim import Dim, Size, divide_exactly, max_size, min_size
from bitwright.ir.dtype import DType, bool_, f64, i64
from bitwright.ir.graph import Value
from bitwright.ops.core.decide import below, equal, negated

if TYPE_CHECKING:
    from bitwright.frontend.torch.context import Context

_EXACT = 2**20  # products of sizes with such fractions are exact in f64


@dataclass(frozen=True)
class Ratio:
    """numerator / denominator, where the denominator is positive."""

    numerator: Size
    denominator: Size

    def floor(self) -> Size:
        return self.numerator // self.denominator

    def ceil(self) -> Size:
        return (self.numerator + self.denominator - 1) // self.denominator


def as_ratio(number: Any) -> Ratio | None:
    """The number as a ratio of sizes, if it is exactly one."""
    if isinstance(number, Ratio):
        return number
    if isinstance(number, (int, Dim)):
        return Ratio(number, 1)
    if isinstance(number, float) and math.isfinite(number):
        exact = Fraction(number)
        if max(abs(exact.numerator), exact.denominator) <= _EXACT:
            return Ratio(exact.numerator, exact.denominator)
    return None


def _add(a: Ratio, b: Ratio) -> Ratio:
    if a.denominator == b.denominator:
        return Ratio(a.numerator + b.numerator, a.denominator)
    numerator = a.numerator * b.denominator + b.numerator * a.denominator
    return Ratio(numerator, a.denominator * b.denominator)


def _divide(a: Ratio, b: Ratio) -> Ratio | None:
    if isinstance(b.numerator, int) and b.numerator <= 0:
        return None
    return Ratio(a.numerator * b.denominator, a.denominator * b.numerator)


_RATIOS: dict[str, Callable[[Ratio, Ratio], Ratio | None]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, Ratio(-b.numerator, b.denominator)),
    "mul": lambda a, b: Ratio(a.numerator * b.numerator, a.denominator * b.denominator),
    "truediv": _divide,
}
_SIZES: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "sym_max": max_size,
    "sym_min": min_size,
    "eq": equal,
    "ne": lambda a, b: negated(equal(a, b)),
    "lt": below,
    "le": lambda a, b: negated(below(b, a)),
    "gt": lambda a, b: below(b, a),
    "ge": lambda a, b: negated(below(a, b)),
    "floor": lambda a: a,
    "ceil": lambda a: a,
    "trunc": lambda a: a,
    "round": lambda a: a,
    "sym_int": lambda a: a,
    "sym_float": lambda a: Ratio(a, 1),
}
_ROUNDED: dict[str, Callable[[Ratio], Size | Ratio]] = {
    "floor": Ratio.floor,
    "trunc": Ratio.floor,  # a size is not negative
    "sym_int": Ratio.floor,
    "ceil": Ratio.ceil,
    "sym_float": lambda a: a,
}
_PYTHON: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "and_": operator.and_,
    "or_": operator.or_,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "sym_max": max,
    "sym_min": min,
    "sym_int": int,
    "sym_float": float,
    "sym_not": operator.not_,
    "sym_ite": lambda condition, yes, no: yes if condition else no,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
}
_TENSORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "mod": "mod",
    "pow": "pow",
    "neg": "neg",
    "and_": "and",
    "or_": "or",
    "sym_not": "not",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "sym_max": "maximum",
    "sym_min": "minimum",
    "sqrt": "sqrt",
    "exp": "exp",
    "log": "log",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "round": "round",
}
_FLOATING = ("truediv", "sqrt", "exp", "log", "log2", "sym_float")
_TO_INTEGER = ("floor", "ceil", "trunc", "round", "sym_int")
_REDUCED = {"sym_sum": "add"}


def function_name(target: Any) -> str | None:
    """The name of a supported scalar function, or None."""
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", "").removeprefix("_sym_")
    if not module.startswith(("_operator", "math", "torch", "builtins")):
        return None
    return name if name in _PYTHON or name in _REDUCED else None


def compute(ctx: Context, name: str, args: tuple[Any, ...]) -> Any:
    """The function on numbers of any kind."""
    if name in _REDUCED:
        total, *more = args[0] if len(args) == 1 else args
        for number in more:
            total = compute(ctx, _REDUCED[name], (total, number))
        return total
    if name == "sym_ite" and isinstance(args[0], bool):
        return args[1] if args[0] else args[2]
    if all(isinstance(a, (bool, int, float)) for a in args):
        return _PYTHON[name](*args)
    if all(isinstance(a, (int, Dim)) and not isinstance(a, bool) for a in args):
        answer = _on_sizes(name, args)
        if answer is not None:
            return answer
    ratios = [as_ratio(a) for a in args]
    if all(ratio is not None for ratio in ratios):
        answer = _on_ratios(name, ratios)
        if answer is not None:
            return answer
    return _on_tensors(ctx, name, args)


def _on_sizes(name: str, sizes: tuple[Any, ...]) -> Any:
    if name == "pow" and isinstance(sizes[1], int) and 0 < sizes[1] <= 8:
        return math.prod([sizes[0]] * sizes[1])
    if name in ("floordiv", "mod") and isinstance(sizes[1], int) and sizes[1] <= 0:
        return None
    return _SIZES[name](*sizes) if name in _SIZES else None


def _on_ratios(name: str, ratios: list[Any]) -> Any:
    if name in _ROUNDED:
        return _ROUNDED[name](*ratios)
    return _RATIOS[name](*ratios) if name in _RATIOS else None


def kind_of(number: Any) -> DType:
    """The element type that holds a number."""
    if isinstance(number, Value):
        return number.dtype
    if isinstance(number, bool):
        return bool_
    return i64 if isinstance(number, (int, Dim)) else f64


def _on_tensors(ctx: Context, name: str, args: tuple[Any, ...]) -> Value:
    if name == "sym_ite":
        condition, *branches = args
        element = _widest(branches)
        return ctx.b.where(
            ctx.scalar(condition, bool_), *(ctx.scalar(branch, element) for branch in branches)
        )
    element = f64 if name in _FLOATING else _widest(args)
    operands = [ctx.scalar(a, element) for a in args]
    if name in ("sym_float", "sym_int") or (name in _TO_INTEGER and element == i64):
        return ctx.cast(operands[0], i64 if name in _TO_INTEGER else f64)
    if name == "truediv":
        return ctx.b.div(*operands)
    if name == "floordiv":
        rest = ctx.b.mod(*operands)
        return ctx.b.div(ctx.b.sub(operands[0], rest), operands[1])
    if name == "log2":
        return ctx.b.mul(ctx.b.log(*operands), 1 / math.log(2))
    result = ctx.b.op(_TENSORS[name], *operands)
    return ctx.cast(result, i64) if name in _TO_INTEGER else result


def _widest(numbers: Iterable[Any]) -> DType:
    kinds = [kind_of(number) for number in numbers]
    if any(kind.is_float for kind in kinds):
        return f64
    return bool_ if all(kind == bool_ for kind in kinds) else i64


def scaled(ctx: Context, size: Size, factor: float) -> Any:
    """`int(size * factor)`, as a number of any kind."""
    return compute(ctx, "sym_int", (compute(ctx, "mul", (size, float(factor))),))


def exact_quotient(a: Size, b: Size) -> Size | None:
    """a / b where b divides a for every value of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return divide_exactly(a, b)
