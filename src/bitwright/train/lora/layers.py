"""The layers of a graph that can have an adapter: products with one weight matrix, convolutions.

    matmul(x, w)              w[K, N] from a parameter or constant, also through dequantize
    dequant_matmul(x, q, ..)  q[N, K]
    conv(x, w)                w[M, C, ...], one group

Products that read one weight in the same way (a layer that is used several times) are one layer.
Layers in bodies of if, loop and scan are not among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.errors import TrainingError
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import module_of, near_misses, take_name
from bitwright.quant.model.layer_names import LayerNames
from bitwright.train.groups import matches

PRODUCTS = ("matmul", "conv", "dequant_matmul")
CARRIES = ("transpose", "reshape", "identity", "cast", "dequantize")
"""Ops whose result is still the weight that is their first operand."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Products with one weight."""

    name: str
    names: tuple[str, ...]
    """All names that a pattern may match."""
    products: tuple[Node, ...]

    @property
    def is_conv(self) -> bool:
        return self.products[0].op == "conv"

    @property
    def sizes(self) -> tuple[tuple[int, ...], int]:
        """The shape of an input window (the terms of a sum), and the number of outputs."""
        node = self.products[0]
        shape = tuple(int(size) for size in operand(node, 1).shape)
        if node.op == "matmul":
            return shape[:1], shape[1]
        return shape[1:], shape[0]

    @property
    def terms(self) -> int:
        return math.prod(self.sizes[0])

    @property
    def max_rank(self) -> int:
        return min(self.terms, self.sizes[1])

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of both parameters of an adapter."""
        window, columns = self.sizes
        if self.is_conv:
            return (rank, *window), (columns, rank, *(1 for _ in window[1:]))
        return (*window, rank), (rank, columns)


def operand(node: Node, place: int) -> Value:
    """An operand that the op always has."""
    value = node.inputs[place]
    assert value is not None
    return value


def weight_source(weight: Value) -> Value:
    """The value that a weight is made from: a parameter or constant, unless it is computed."""
    while weight.node.op in CARRIES:
        weight = operand(weight.node, 0)
    return weight


def find_layers(graph: Graph, reported: Mapping[str, Any] | None = None) -> list[Layer]:
    """The layers in order; `reported` are rows of a quantization report by product."""
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if node.op in PRODUCTS and _is_layer(node):
            groups.setdefault(_key(node), []).append(node)
    names, taken = LayerNames(graph), set[str]()
    found = []
    for products in groups.values():
        row = _reported(products[0], reported or {})
        every = dict.fromkeys(name for node in products for name in names.all(node.name))
        readable = _readable(products[0], names) if row is None else row.name
        name = take_name(readable.partition(" #")[0], taken)
        more = () if row is None else (row.name, row.weight)
        every.update(dict.fromkeys(text for text in (name, *more) if text))
        found.append(Layer(name, tuple(every), tuple(products)))
    return found


def _is_layer(node: Node) -> bool:
    x, weight = operand(node, 0), operand(node, 1)
    if not x.dtype.is_float or weight_source(weight).node.op not in ("parameter", "constant"):
        return False
    if node.op == "conv":
        return bool(node.attrs.get("groups", 1) == 1)
    return weight.rank == 2


def _key(node: Node) -> Any:
    """Equal for products that read one weight in the same way."""
    value, steps = operand(node, 1), []
    while value.node.op in CARRIES:
        steps.append((value.node.op, value.node.attrs_text))
        value = operand(value.node, 0)
    return node.op, value, tuple(steps)


def _reported(node: Node, rows: Mapping[str, Any]) -> Any:
    """The row of a product; equalization gives products new names, and keeps those of weights."""
    return rows.get(node.name, rows.get(_stem(node)))


def _stem(node: Node) -> str:
    return weight_source(operand(node, 1)).name.removesuffix(".weight")


def _readable(node: Node, names: LayerNames) -> str:
    """The name of a layer; `bw.quantize` names weights by products, and modules say more."""
    module = module_of(node.loc)
    is_by_product = node.name.startswith(_stem(node))
    return module if module and is_by_product else names.readable(node.name)


def chosen_layers(layers: Sequence[Layer], patterns: Iterable[str] | None) -> list[Layer]:
    """The layers that match a pattern, or all; a pattern without a match is an error."""
    if not layers:
        raise TrainingError(
            "the graph has no layer that can have an adapter",
            expected="a matmul or a convolution (one group) with a weight, outside of bodies",
        )
    if patterns is None:
        return list(layers)
    every = [name for layer in layers for name in layer.names]
    wanted = list(patterns)
    for pattern in wanted:
        if not any(matches(name, [pattern]) for name in every):
            known = ", ".join(repr(layer.name) for layer in layers[:5])
            raise TrainingError(
                f"the pattern {pattern!r} of layers matches no layer that can have an adapter",
                hint=near_misses(pattern, every) or f"Layers are, for example, {known}.",
            )
    return [layer for layer in layers if any(matches(name, wanted) for name in layer.names)]
