"""Which function imports which ONNX op.

    @imports("Relu")
    def relu(ctx, node, inputs): return ctx.b.relu(inputs[0])

A mapping returns a value, or a list of values in the order of the node's outputs (None for one that
is not needed). All modules of `standard` and `microsoft` are loaded. An ONNX op with the same
operands as a bitwright op and no attributes needs no mapping: `OpDef.onnx` names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from bitwright.errors import UnsupportedError
from bitwright.ir import Value
from bitwright.ops.core.registry import all_ops

if TYPE_CHECKING:
    from bitwright.frontend.onnx.context import Context, Inputs
    from bitwright.frontend.onnx.node import OnnxNode

Results = Value | Sequence[Value | None]
Mapping = Callable[["Context", "OnnxNode", "Inputs"], Results]

_MAPPINGS: dict[tuple[str, str], Mapping] = {}


class UnmappedError(UnsupportedError):
    """A mapping does not support this use of its op; the interpreter fallback may run it."""


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
        return ctx.b.results(op, *inputs)

    return same_operands
