"""The ONNX form of each bitwright op. Files in `mappings/` register them, one per family.

    @exports("silu")
    def silu(e, x):
        return e.Mul(x, e.Sigmoid(x))

A mapping takes the scope, the operands (None if absent) and the attributes by name, and returns the
result or a tuple of results. An op without a mapping is written as the ONNX op that its declaration
names, or by its scalar form.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from bitwright.export.onnx.scalars import scalar_form
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ops.core.registry import get

__all__ = ["Ref", "Scope", "exports", "exports_table", "no_form", "same_form"]

Write = Callable[..., Any]
F = TypeVar("F", bound=Write)


@dataclass(frozen=True)
class Form:
    write: Write
    widens: bool = True
    """Whether computing in a wider element type and rounding gives the same result."""


_FORMS: dict[str, Form] = {}
_REASONS: dict[str, str] = {}


def exports(*names: str, widens: bool = True) -> Callable[[F], F]:
    """Register the function as the ONNX form of these ops."""

    def register(write: F) -> F:
        for name in names:
            assert name not in _FORMS, f"{name} has two mappings"
            _FORMS[name] = Form(write, widens)
        return write

    return register


def exports_table(table: dict[str, Write], widens: bool = True) -> None:
    """Register the ONNX forms that are one expression."""
    for name, write in table.items():
        exports(name, widens=widens)(write)


def no_form(*names: str, reason: str) -> None:
    """Register the reason why these ops have no ONNX form."""
    _REASONS.update(dict.fromkeys(names, reason))


@cache
def _load() -> None:
    package = importlib.import_module("bitwright.export.onnx.mappings")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def form_of(op: str) -> Form | str:
    """The form of an op, or the reason why it has none."""
    _load()
    if op in _FORMS:
        return _FORMS[op]
    if op in _REASONS:
        return _REASONS[op]
    opdef = get(op)
    if opdef.onnx or opdef.scalar:
        return Form(lambda e, *operands, **attrs: same_form(e, op, opdef.onnx, operands, attrs))
    return "no mapping exists"


def same_form(
    e: Scope, op: str, op_type: str, operands: tuple[Any, ...], attrs: dict[str, Any]
) -> Any:
    """The ONNX op of the same operands and attributes, else the op's scalar form."""
    scalar = get(op).scalar
    if scalar is None or (op_type and e.fits(op_type, operands, attrs)):
        results = len(e.node.types) if e.node else 1
        return e.emit(op_type, operands, attrs, results=results)
    return scalar_form(e, op, operands, attrs)
