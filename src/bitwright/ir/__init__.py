"""The intermediate representation: element types, sizes, graphs, their text and byte forms.

Modules that read and write text are imported on first use, because running a model needs no parser.
"""

from typing import TYPE_CHECKING

from bitwright.ir.dim import UNKNOWN, Dim, Size, symbol
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import OpaqueType, Shape, TensorType, ValueType, broadcast_shapes
from bitwright.lazy import lazy_names

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
    "Node",
    "OpaqueType",
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

if not TYPE_CHECKING:  # a type checker would accept every name
    __getattr__, __dir__ = lazy_names(__name__, _HOME)
