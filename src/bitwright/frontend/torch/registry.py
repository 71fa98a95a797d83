"""Which function imports which ATen op.

    @maps("relu.default")
    def relu(ctx, x): return ctx.b.relu(x)

A mapping takes the arguments of the op's schema in order (those that only the keyword names, by
keyword): tensors as values, symbolic integers as sizes, dtypes as element types. It answers one
value, or a sequence in the order of the op's results (None for one that nothing asks for). Every
module of `aten` is searched. An op that has a mapping is kept by the tracer; all
others are decomposed until only mapped ones are left.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

import bitwright.frontend.torch.aten as package
from bitwright.errors import UnsupportedError

Mapping = Callable[..., Any]

_MAPPINGS: dict[str, Mapping] = {}


class UnmappedError(UnsupportedError):
    """A mapping says that this use of its op has no form here."""


def maps(*names: str, namespace: str = "aten") -> Callable[[Mapping], Mapping]:
    """Register a function as the importer of these ops, named as `add.Tensor`."""

    def register(function: Mapping) -> Mapping:
        for name in names:
            _MAPPINGS[f"{namespace}.{name}"] = function
        return function

    return register


@cache
def all_mappings() -> dict[str, Mapping]:
    """Every mapping by the op's qualified name."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_MAPPINGS)
