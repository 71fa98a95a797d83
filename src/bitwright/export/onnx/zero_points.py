"""All zero points 0, for consumers that know no others.

    quantize(x, s, 128: u8)    ->  quantize(x, s, 0: i8)
    dequantize(q, s, 128: u8)  ->  dequantize(q - 128, s, 0: i8)

Codes around 128 hold the same numbers as signed codes around 0, so nothing is lost. Other zero
points cannot be taken away afterwards: recipes with `symmetric: true` give codes without them.
"""

from __future__ import annotations

import numpy as np

from bitwright.errors import ExportError
from bitwright.ir.dtype import i8, u8
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import TensorType
from bitwright.ir.verify import place
from bitwright.passes.edit import replace_nodes

MIDDLE = 128


def without_zero_points(graph: Graph) -> Graph:
    """The same graph with every zero point 0, or an error that names one that is not."""
    centred = _centred_codes(graph)

    def change(node: Node) -> Node:
        if node.op == "quantize" and node.name in centred:
            signed = node.attrs | {"to": i8}
            types = (node.outputs[0].tensor.with_dtype(i8),)
            return _with_zero(node).with_(attrs=signed, types=types)
        if node.op == "constant" and node.name in centred:
            codes = (node.attrs["value"].astype(np.int16) - MIDDLE).astype(np.int8)
            return node.with_(attrs={"value": codes}, types=(TensorType(i8, codes.shape),))
        if node.op == "dequantize" and node.inputs[0].name in centred:  # type: ignore[union-attr]
            return _with_zero(node)
        return node

    found = replace_nodes(graph, change)
    for owner, node in found.walk():
        _require_zero(owner, node)
    return found


def _with_zero(node: Node) -> Node:
    """The node without its zero point, which a quantizer's type tells as well."""
    return node.with_(inputs=node.inputs[:2])


def _centred_codes(graph: Graph) -> set[str]:
    """Names of u8 codes that are read only as codes around 128."""
    found: set[str] = set()
    for owner, node in graph.walk():
        if node.op not in ("quantize", "constant") or len(node.outputs) != 1:
            continue
        codes = node.outputs[0]
        if not isinstance(codes.type, TensorType) or codes.dtype != u8:
            continue
        if node.op == "quantize" and not _is_middle(node):
            continue
        readers = [n for n in owner.nodes if codes in n.inputs]
        is_read_so = all(n.op == "dequantize" and n.inputs[0] is codes for n in readers)
        if readers and is_read_so and all(map(_is_middle, readers)) and codes not in owner.results:
            found.add(codes.name)
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
            expected="codes around 0, or u8 codes around 128",
            found="one made by the run" if known is None else np.unique(known)[:4].tolist(),
            hint='Quantize with a recipe that has "symmetric": true.',
        )
