"""Which function imports which ONNX op.

    @imports("Relu")
    def relu(ctx, node, inputs): return ctx.b.relu(inputs[0])

A mapping answers a value, or a list of values in the order of the node's outputs (None for one that
nothing asks for). Every module of `standard` and `microsoft` is searched. An op that has
the same operands as one of ours and no attributes needs no function: `OpDef.onnx` names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwright.errors import UnsupportedError
from bitwright.ir import Value
from bitwright.ops.core.registry import all_ops

if TYPE_CHECKING:
    from bitwright.frontend.onnx.context import Context
    from bitwright.frontend.onnx.node import OnnxNode

Inputs = list[Any]
Results = Value | Sequence[Value | None]
Mapping = Callable[["Context", "OnnxNode", Inputs], Results]

_MAPPINGS: dict[tuple[str, str], Mapping] = {}


class UnmappedError(UnsupportedError):
    """A mapping says that this use of its op has no form here; a host step may still run it."""


def imports(*op_types: str, domain: str = "") -> Callable[[Mapping], Mapping]:
    """Register a function as the importer of these ops."""

    def register(function: Mapping) -> Mapping:
        for op_type in op_types:
            _MAPPINGS[domain, op_type] = function
        return function

    return register


@cache
def all_mappings() -> dict[tuple[str, str], Mapping]:
    """Every mapping by domain and op type."""
    for family in ("standard", "microsoft"):
        folder = Path(__file__).parent / family
        for module in pkgutil.iter_modules([str(folder)]):
            importlib.import_module(f"{__package__}.{family}.{module.name}")
    found = dict(_MAPPINGS)
    for opdef in all_ops().values():
        if opdef.onnx:
            found.setdefault(("", opdef.onnx), _direct(opdef.name))
    return found


def _direct(op: str) -> Mapping:
    def same_operands(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
        results = ctx.b.op(op, *inputs)
        return list(results) if isinstance(results, tuple) else [results]

    return same_operands
