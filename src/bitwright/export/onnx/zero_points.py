"""Converts between signed and unsigned 8-bit quantized values.

without_zero_points      for consumers that support only the zero point 0

    quantize(x, s, 128: u8)    ->  quantize(x, s, 0: i8)
    dequantize(q, s, 128: u8)  ->  dequantize(q - 128, s, 0: i8)

with_unsigned_values     for processors whose u8 · s8 product saturates

    quantize(x, s, z: i8)      ->  quantize(x, s, z + 128: u8)
    dequantize(q, s, z: i8)    ->  dequantize(q + 128, s, z + 128: u8)

Both conversions are exact. Zero points other than 0 and 128 cannot be removed; recipes with
`symmetric: true` have none.
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import ExportError
from bitwright.export.onnx.operands import Operands, dequantizes_activation
from bitwright.ir import Graph, Node, TensorType, Value, constant_value
from bitwright.ir.dtype import DType, i8, u8
from bitwright.ir.edit import Replacement, map_bodies, replace_nodes
from bitwright.ir.naming import take_name
from bitwright.ir.verify import place

MIDDLE = 128


def without_zero_points(graph: Graph) -> Graph:
    """The graph with every zero point 0; raises if that is not possible."""
    centred = _centred_values(graph)

    def change(node: Node) -> Node:
        if node.op == "quantize" and node.name in centred:
            signed = {**node.attrs, "to": i8}
            types = (node.outputs[0].tensor.with_dtype(i8),)
            return _with_zero(node).with_(attrs=signed, types=types)
        if node.op == "constant" and node.name in centred:
            array = (node.attrs["value"].astype(np.int16) - MIDDLE).astype(np.int8)
            return node.with_(attrs={"value": array}, types=(TensorType(i8, array.shape),))
        if node.op == "dequantize" and next(node.operands).name in centred:
            return _with_zero(node)
        return node

    found = replace_nodes(graph, change)
    for owner, node in found.walk():
        _require_zero(owner, node)
    return found


def _with_zero(node: Node) -> Node:
    """The node without its zero point; `to` gives the type of a quantizer."""
    return node.with_(inputs=node.inputs[:2])


def with_unsigned_values(graph: Graph) -> Graph:
    """The graph with unsigned operands of quantized products, if they are constants or quantized
    with constant zero points."""
    graph = map_bodies(graph, with_unsigned_values)
    shifted = _signed_values(Operands(graph))
    names = set(graph.values)

    def change(node: Node) -> Node | Replacement:
        value = node.outputs[0]
        if value.name in shifted and node.op in ("constant", "parameter"):
            array = (node.attrs["value"].astype(np.int16) + MIDDLE).astype(np.uint8)
            return node.with_(
                attrs={**node.attrs, "value": array}, types=(TensorType(u8, array.shape),)
            )
        if value.name in shifted:
            types = (value.tensor.with_dtype(u8),)
            return shift(node.with_(attrs={**node.attrs, "to": u8}, types=types))
        if node.op == "dequantize" and next(node.operands).name in shifted:
            return shift(node)
        return node

    def shift(node: Node) -> Replacement:
        """A quantize or dequantize with its zero point plus 128."""
        _, scale, zero = (*node.inputs, None)[:3]
        assert scale is not None
        known = np.zeros(scale.shape, np.int8) if zero is None else constant_value(zero)
        assert known is not None
        array = (known.astype(np.int16) + MIDDLE).astype(np.uint8)
        name = take_name(f"{node.name}.zero_point", names)
        made = Node("constant", (), {"value": array}, (TensorType(u8, array.shape),), (name,))
        changed = node.with_(inputs=(*node.inputs[:2], made.outputs[0]))
        return Replacement([made, changed], changed.outputs)

    return replace_nodes(graph, change, bodies=False) if shifted else graph


def _signed_values(operands: Operands) -> set[str]:
    """Names of i8 values that only quantized products read and that can be shifted."""
    made = [v for v in _read_by_dequantize(operands, i8) if _has_known_zeros(operands, v)]
    found = {v.name for v in made if v.node.op == "quantize"}
    weights = [v for v in made if v.node.op != "quantize"]
    return found | {v.name for v in weights if _meets_unsigned(operands, v, found)}


def _meets_unsigned(operands: Operands, weight: Value, shifted: set[str]) -> bool:
    """Whether a weight is multiplied only with quantized activations, none of which stays signed:
    runtimes do not multiply s8 by u8."""
    for node in operands.direct[weight]:
        if not operands.meets_quantized(node):
            return False
        for reader in operands.readers(node.outputs[0]):
            read = [v.node.inputs[0] for v in reader.operands if dequantizes_activation(v.node)]
            if any(v.dtype == i8 and v.name not in shifted for v in read if v is not None):
                return False
    return True


def _has_known_zeros(operands: Operands, value: Value) -> bool:
    """Whether zero points are constants, or absent with scales of known shape."""
    for node in (*operands.direct[value], *_quantizer(value)):
        scale, zero = node.inputs[1], _zero_of(node)
        is_fixed = scale is not None and all(isinstance(size, int) for size in scale.shape)
        if not (is_fixed if zero is None else constant_value(zero) is not None):
            return False
    return True


def _quantizer(value: Value) -> list[Node]:
    return [value.node] if value.node.op == "quantize" else []


def _read_by_dequantize(operands: Operands, element: DType) -> list[Value]:
    """Quantized values and constants of this type that nothing but `dequantize` reads."""
    found = []
    for node in operands.graph.nodes:
        if node.op not in ("quantize", "constant", "parameter"):
            continue
        value = node.outputs[0]
        if not isinstance(value.type, TensorType) or value.dtype != element:
            continue
        readers = operands.direct[value]
        only_dequantized = all(n.op == "dequantize" and n.inputs[0] is value for n in readers)
        if readers and only_dequantized and value not in operands.graph.results:
            found.append(value)
    return found


def _graphs(graph: Graph) -> list[Graph]:
    return list({id(owner): owner for owner, _ in graph.walk()}.values())


def _centred_values(graph: Graph) -> set[str]:
    """Names of u8 values whose zero points are all 128."""
    found: set[str] = set()
    for operands in map(Operands, _graphs(graph)):
        for value in _read_by_dequantize(operands, u8):
            if all(map(_is_middle, (*operands.direct[value], *_quantizer(value)))):
                found.add(value.name)
    return found


def _zero_of(node: Node) -> Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def _is_middle(node: Node) -> bool:
    zero = constant_value(_zero_of(node))
    return zero is not None and bool((zero == MIDDLE).all())


def _require_zero(graph: Graph, node: Node) -> None:
    if node.op not in ("quantize", "dequantize", "dynamic_quantize", "fake_quantize"):
        return
    zero = _zero_of(node)
    known = constant_value(zero)
    if node.op == "dynamic_quantize" or (zero is not None and (known is None or known.any())):
        raise ExportError(
            f"{node.op} has a zero point that is not 0",
            where=place(graph, node),
            expected="0, or 128 for u8",
            found="one computed at run time" if known is None else np.unique(known)[:4].tolist(),
            hint='Quantize with a recipe that has "symmetric": true.',
        )
