"""The intermediate representation: element types, sizes, graphs, their text and byte forms.

What reads and writes text is imported when it is first used: running a model needs no parser.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bitwright.ir.dim import UNKNOWN, Dim, Size, symbol
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import HostType, Shape, TensorType, ValueType, broadcast_shapes

if TYPE_CHECKING:
    from bitwright.ir.lexer import parse_size
    from bitwright.ir.parser import parse, parse_type
    from bitwright.ir.printer import node_text, to_text
    from bitwright.ir.verify import verify_structure

__all__ = [
    "UNKNOWN",
    "DType",
    "Dim",
    "Graph",
    "HostType",
    "Node",
    "Shape",
    "Size",
    "TensorType",
    "Value",
    "ValueType",
    "broadcast_shapes",
    "constant_value",
    "dtype",
    "node_text",
    "parse",
    "parse_size",
    "parse_type",
    "symbol",
    "to_text",
    "verify_structure",
]

_HOME = {
    "node_text": "bitwright.ir.printer",
    "parse": "bitwright.ir.parser",
    "parse_size": "bitwright.ir.lexer",
    "parse_type": "bitwright.ir.parser",
    "to_text": "bitwright.ir.printer",
    "verify_structure": "bitwright.ir.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bitwright.ir' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
