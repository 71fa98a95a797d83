"""Tables of ONNX ops that have the operands of a bitwright op.

    imports_table({"Gather": ("gather", {"axis": 0})})

says that Gather has the operands of `gather`, and an attribute `axis` with the default 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results, imports

_OWN_NAMES = {"select_last_index": "select_last", "epsilon": "eps"}
_READERS = {bool: OnnxNode.flag, float: OnnxNode.number, str: OnnxNode.text}


def imports_table(table: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Register ops by their bitwright op and the defaults of their attributes.

    The type of a default is that of the attribute; None stands for an optional integer.
    """
    for op_type, (op, defaults) in table.items():
        imports(op_type)(partial(_with_attributes, op, defaults))


def _with_attributes(
    op: str, defaults: Mapping[str, Any], ctx: Context, node: OnnxNode, inputs: Inputs
) -> Results:
    attrs = {
        _OWN_NAMES.get(name, name): _READERS.get(type(default), OnnxNode.integer)(
            node, name, default
        )
        for name, default in defaults.items()
    }
    return ctx.b.results(op, *inputs, **attrs)
