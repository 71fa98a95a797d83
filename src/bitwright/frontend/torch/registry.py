"""Which function imports which ATen op.

    @maps("relu.default")
    def relu(ctx, x): return ctx.b.relu(x)

A mapping takes the arguments of the op's schema in order (keyword-only arguments by keyword):
tensors as values, symbolic integers as sizes, dtypes as element types. It returns one value, or a
sequence in the order of the op's results (None for one that is not needed). All modules of `aten`
are loaded. The tracer keeps ops that have a mapping and decomposes all others.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import bitwright.frontend.torch.aten as package
from bitwright.errors import UnsupportedError

Mapping = Callable[..., Any]
F = TypeVar("F", bound=Mapping)

_MAPPINGS: dict[str, Mapping] = {}


class UnmappedError(UnsupportedError):
    """A mapping does not support this use of its op."""


def maps(*names: str, namespace: str = "aten") -> Callable[[F], F]:
    """Register a function as the importer of these ops, named as `add.Tensor`."""

    def register(function: F) -> F:
        for name in names:
            _MAPPINGS[f"{namespace}.{name}"] = function
        return function

    return register


def maps_table(table: dict[str, Mapping]) -> None:
    """Register ops of one expression; a key holds one or several names."""
    for names, function in table.items():
        maps(*names.split())(function)


@cache
def all_mappings() -> dict[str, Mapping]:
    """Every mapping by the op's qualified name."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_MAPPINGS)
