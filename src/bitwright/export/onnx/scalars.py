"""Converts the scalar forms of elementwise ops to ONNX nodes, for ops without a mapping.

An op's `scalar` uses the interface `ops.core.scalar.Scalars`; here each operation is one ONNX node
on tensors. Python numbers become constants in the element type of the other operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import bool_
from bitwright.ops.core.registry import get

Term = Ref | float

_UNARY = {
    "neg": "Neg", "abs": "Abs", "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "sin": "Sin",
    "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "tanh": "Tanh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh",
    "erf": "Erf", "floor": "Floor", "ceil": "Ceil", "round": "Round",
}  # fmt: skip
_BINARY = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "max": "Max",
    "min": "Min", "eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater",
    "ge": "GreaterOrEqual",
}  # fmt: skip
_LOGIC = {"bit_and": "And", "bit_or": "Or", "bit_xor": "Xor"}


class OnnxScalars:
    """A scalar interface whose terms are ONNX values."""

    def __init__(self, scope: Scope, like: Ref) -> None:
        self.scope, self.like = scope, like

    def __getattr__(self, name: str) -> Callable[..., Ref]:
        if name in _UNARY:
            return lambda a: self.scope.emit(_UNARY[name], self._values(a))[0]
        if name in _BINARY:
            return lambda a, b: self.scope.emit(_BINARY[name], self._values(a, b))[0]
        if name in _LOGIC:
            return lambda a, b: self._logic(_LOGIC[name], a, b)
        raise AttributeError(name)

    def _values(self, *terms: Term) -> list[Ref]:
        like = next((term for term in terms if isinstance(term, Ref)), self.like)
        return [t if isinstance(t, Ref) else self.scope.scalar(t, like) for t in terms]

    def _logic(self, op_type: str, a: Term, b: Term) -> Ref:
        values = self._values(a, b)
        bits = "" if values[0].dtype == bool_ else "Bitwise"
        return self.scope.emit(bits + op_type, values)[0]

    def rem(self, a: Term, b: Term) -> Ref:
        return self.scope.emit("Mod", self._values(a, b), {"fmod": 1})[0]

    def ne(self, a: Term, b: Term) -> Ref:
        return self.scope.Not(self.scope.emit("Equal", self._values(a, b))[0])

    def bit_not(self, a: Term) -> Ref:
        (value,) = self._values(a)
        return self.scope.emit("Not" if value.dtype == bool_ else "BitwiseNot", [value])[0]

    def select(self, condition: Ref, a: Term, b: Term) -> Ref:
        return self.scope.emit("Where", [condition, *self._values(a, b)])[0]


def scalar_form(scope: Scope, op: str, operands: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    """The op's scalar form as elementwise ONNX nodes."""
    scalar = get(op).scalar
    assert scalar is not None
    return scalar(OnnxScalars(scope, operands[0]), *operands, **attrs)
