"""How each layer of a graph is quantized, read from the graph itself.

A layer is a product or an embedding with a constant weight. Its weight is computed from constants;
scales and zero points are those of the dequantization before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.interpret import run_node
from bitwright.passes.lower_integer.operands import quantize_operands
from bitwright.quant.model.layer_names import LayerNames

PRODUCTS = (
    *("matmul", "conv", "conv_transpose", "grouped_matmul", "gather", "lstm", "gru", "rnn"),
    *("integer_matmul", "integer_conv", "dequant_matmul"),
)
_MOVES = (
    *("transpose", "reshape", "cast", "sub", "mul", "dequantize", "squeeze", "unsqueeze", "slice"),
    *("expand", "concat", "bitcast"),
)
_SAME = ("transpose", "reshape", "relu", "max_pool", "squeeze", "unsqueeze", "slice", "pad", "cast")
LARGEST_PER_VALUE = 1 << 28


@dataclass(frozen=True)
class Quantization:
    """Element type, scale and zero point of an operand."""

    dtype: str
    scale: Array
    zero: Array | None
    how: str
    """"static", "dynamic", or "constant" for weights."""

    @property
    def granularity(self) -> str:
        if not self.scale.size:
            return "computed at run time"
        return "per tensor" if self.scale.size == 1 else f"{self.scale.size:,}"


class LayerFacts:
    """One layer of a graph."""

    def __init__(self, name: str, node: Node) -> None:
        self.name, self.node = name, node
        is_table = node.op == "gather"
        self.op = "embedding" if is_table else node.op
        weight = node.inputs[0 if is_table else 1]
        assert weight is not None  # `layers_of` takes no others
        self._weight = weight
        self.activation = None if is_table else _activation(node)
        self.quantization = _constant_quantization(self._weight)
        if self.quantization is None and node.op == "dequant_matmul":
            q, scale, zero = (*node.inputs[1:4], None)[:3]
            self.quantization = _from_operands(q, scale, zero)
        self.qvalues = _narrow_constant(self._weight)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._weight.shape)

    @cached_property
    def scheme(self) -> str:
        if self.op.startswith("integer_"):
            return "integer"
        if self.qvalues is None:
            return "float"
        return "weight_only" if self.activation is None else self.activation.how

    @property
    def bits(self) -> int:
        value = self._weight if self.qvalues is None else self.qvalues
        return int(value.dtype.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored weight."""
        value: Value = self._weight if self.qvalues is None else self.qvalues
        return value.dtype.nbytes(int(np.prod(value.shape, dtype=np.int64)))

    def weight(self) -> Array | None:
        """The weight in float; None if it cannot be computed."""
        try:
            return _evaluate(self._weight)
        except BitwrightError:
            return None

    def distances(self) -> Array | None:
        """The quantized weight minus its zero point, which does not depend on the stored type."""
        if self.qvalues is None:
            return None
        q = constant_value(self.qvalues)
        if q is None or self.quantization is None or self.quantization.zero is None:
            return None if q is None else q.astype(np.int32)
        zero = self.quantization.zero
        if zero.size == 1:
            return q.astype(np.int32) - int(zero.reshape(()))
        if len({int(z) for z in zero.reshape(-1)}) == 1:
            return q.astype(np.int32) - int(zero.reshape(-1)[0])
        return None


def layers_of(graph: Graph) -> Iterator[LayerFacts]:
    """The layers of a graph in order; those of bodies are left out."""
    names = LayerNames(graph)
    for node in graph.nodes:
        if node.op not in PRODUCTS:
            continue
        weight = node.inputs[0 if node.op == "gather" else 1]
        if weight is not None and _is_constant(weight) and len(weight.shape) > 1:
            yield LayerFacts(names.readable(node.name), node)


def _is_constant(value: Value) -> bool:
    node = value.node
    if node.op in ("constant", "parameter"):
        return node.attrs.get("value") is not None
    return node.op in _MOVES and all(map(_is_constant, node.operands))


def _constants(value: Value) -> Iterator[Value]:
    if value.node.op in ("constant", "parameter"):
        yield value
    for operand in value.node.operands if value.node.op in _MOVES else ():
        yield from _constants(operand)


def _narrow_constant(value: Value) -> Value | None:
    """The largest constant of at most 8 bits that a weight is made from."""
    found = [v for v in _constants(value) if v.dtype.bits <= 8 and v.dtype.name != "bool"]
    return max(found, key=lambda v: int(np.prod(v.shape)), default=None)


def _constant_quantization(value: Value) -> Quantization | None:
    while value.node.op in _MOVES and value.node.op != "dequantize":
        value = next(iter(value.node.operands))
    if value.node.op != "dequantize":
        return None
    return _from_operands(*quantize_operands(value.node))


def _from_operands(
    q: Value | None, scale: Value | None, zero: Value | None = None, how: str = "constant"
) -> Quantization | None:
    if q is None or scale is None:
        return None
    known, offset = (_evaluate(v) if v and _is_constant(v) else None for v in (scale, zero))
    if known is None:
        return Quantization(q.dtype.name, np.zeros(0), None, "dynamic")
    return Quantization(q.dtype.name, np.asarray(known, np.float64), offset, how)


def _activation(node: Node) -> Quantization | None:
    value = node.inputs[0]
    while value is not None and value.node.op in _SAME:
        value = next(iter(value.node.operands), None)
    if value is None or value.node.op != "dequantize":
        return None
    return _from_operands(*quantize_operands(value.node), how="static")


def _evaluate(value: Value) -> Array:
    """The array of a value that constants determine."""
    node = value.node
    if node.op in ("constant", "parameter"):
        array: Array = node.attrs["value"]
        return array
    if int(np.prod(value.shape, dtype=np.int64)) > LARGEST_PER_VALUE:
        raise BitwrightError(f"{value} is too large to compare")
    operands = [None if v is None else _evaluate(v) for v in node.inputs]
    made: Array = run_node(node, operands)[value.index]
    return made
