"""The layers of a quantized graph beside those of its float graph.

Quantization keeps the names of results, so a value of the float graph has a partner in the
quantized graph: the value of the same name. A layer is a value that the two graphs compute by
different nodes from the same named operands. Its local error is the difference of both results on
the operands of the quantized model, so that it contains no error of earlier layers.

A value that equalization scaled is named `<name>.equalized`; its partner is the value times one
factor per channel (`quant.model.transforms.equalize`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import TensorType
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.ops.core.reverse import is_differentiable
from bitwright.quant.model.transforms.equalize import EQUALIZED, find_chain


@dataclass(frozen=True, eq=False)
class LayerPair:
    """A result that both graphs compute, by different nodes."""

    layer: str
    """The name of the layer's product in the float graph, or of the result itself."""
    op: str
    value: Value
    """In the float graph."""
    partner: Value
    """In the quantized graph."""
    absorbed: frozenset[Value] = field(default=frozenset())
    """Values of the float graph inside the layer that have partners."""

    @property
    def channel_axis(self) -> int:
        return channel_axis(self.value)


class Matching:
    """Partners of the float graph's values, and the sites where the graphs differ."""

    def __init__(self, float_graph: Graph, quantized: Graph) -> None:
        self.float_graph, self.quantized = float_graph, quantized
        self.partners = dict(_partners(float_graph, quantized))
        self._same: dict[tuple[Value, Value], bool] = {}
        self.sites = self._joined(list(self._sites()))

    def equalized(self, value: Value, axis: int) -> Value | None:
        """The product of the float graph whose factors scale the partner of a value, or None."""
        partner = self.partners.get(value)
        if partner is None or partner.name == value.name:
            return None
        chain = find_chain(value, axis, with_clips=True)
        return None if chain is None else chain.product.outputs[0]

    def _sites(self) -> Iterator[LayerPair]:
        for node in self.float_graph.nodes:
            if node.is_boundary:
                continue
            for value in node.outputs:
                partner = self.partners.get(value)
                if partner is None or not is_differentiable(value):
                    continue
                is_scaled = partner.name != value.name and get(node.op).kind is not Kind.COMPUTE
                if not is_scaled and not self._is_same_node(node, partner.node):
                    owner = self._owner(node)
                    yield LayerPair(owner.name, owner.op, value, partner)

    def _owner(self, node: Node) -> Node:
        """The node that names a layer: the first product behind its result, or the node itself."""
        waiting, seen = [node], set()
        while waiting:
            found = waiting.pop(0)
            if found in seen or found.is_boundary:
                continue
            seen.add(found)
            is_lookup = found.op == "gather" and found.inputs[0] is not None
            if get(found.op).kind is Kind.COMPUTE or (
                is_lookup and constant_value(found.inputs[0]) is not None
            ):
                return found
            waiting += [v.node for v in found.operands if v not in self.partners]
        return node

    def _joined(self, sites: list[LayerPair]) -> list[LayerPair]:
        """The sites with each product and its bias addition as one."""
        by_value = {site.value: site for site in sites}
        readers: dict[Value, list[Node]] = {}
        for node in self.float_graph.nodes:
            for value in node.operands:
                readers.setdefault(value, []).append(node)
        joined: dict[Value, LayerPair] = {}
        for site in sites:
            value = site.value
            uses = self.float_graph.uses[value], self.quantized.uses[site.partner]
            found = readers.get(value, [])
            add = found[0] if uses == (1, 1) and len(found) == 1 else None
            if add is None or add.op != "add" or not _adds_constant(add):
                joined.setdefault(value, site)
                continue
            result = add.outputs[0]
            if result not in self.partners:
                joined.setdefault(value, site)
                continue
            inside = by_value[value].absorbed | {value}
            joined[result] = LayerPair(site.layer, site.op, result, self.partners[result], inside)
        return list(joined.values())

    # equality of nodes

    def _is_same_node(self, node: Node, other: Node) -> bool:
        if node.op != other.op or len(node.inputs) != len(other.inputs):
            return False
        if node.attrs_text != other.attrs_text and not _same_attrs(node, other):
            return False
        return all(map(self._is_same, node.inputs, other.inputs))

    def _is_same(self, value: Value | None, other: Value | None) -> bool:
        if value is None or other is None:
            return value is other
        if value in self.partners:
            return self.partners[value] is other
        key = value, other
        if key not in self._same:
            a, b = constant_value(value), constant_value(other)
            if a is not None or b is not None:
                self._same[key] = a is not None and b is not None and _equal(a, b)
            else:
                self._same[key] = value.index == other.index and self._is_same_node(
                    value.node, other.node
                )
        return self._same[key]


def channel_axis(value: Value) -> int:
    """The axis of a result with one bias per element: 1 for a conv, else the last."""
    if value.node.op == "add":
        found = next((v for v in value.node.operands if not v.is_constant), value)
        return channel_axis(found) if found is not value and found.rank == value.rank else -1
    return 1 if value.node.op == "conv" else max(0, value.rank - 1)


def _partners(graph: Graph, quantized: Graph) -> Iterator[tuple[Value, Value]]:
    names = quantized.values
    for node in graph.nodes:
        if node.op in ("constant", "parameter"):
            continue
        for value in node.outputs:
            for name in (value.name, value.name + EQUALIZED):
                other = names.get(name)
                if other is not None and other.node.op != "constant" and _fits(value, other):
                    yield value, other
                    break


def _fits(value: Value, other: Value) -> bool:
    if not isinstance(value.type, TensorType) or not isinstance(other.type, TensorType):
        return value.type == other.type
    if value.dtype != other.dtype and not (value.dtype.is_float and other.dtype.is_float):
        return False
    sizes = zip(value.shape, other.shape, strict=False)
    known = all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))
    return known and value.rank == other.rank


def _adds_constant(add: Node) -> bool:
    return any(v.is_constant for v in add.operands)


def _same_attrs(node: Node, other: Node) -> bool:
    """Whether attributes are equal; bodies compare by their text."""
    if node.attrs.keys() != other.attrs.keys() or not node.bodies:
        return False
    from bitwright.ir.printer import to_text

    plain = [k for k in node.attrs if k not in node.bodies]
    same = all(node.attrs[k] == other.attrs[k] for k in plain)
    bodies = ((body, other.bodies.get(name)) for name, body in node.bodies.items())
    return same and all(b is not None and to_text(a) == to_text(b) for a, b in bodies)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    same_form = a.shape == b.shape and a.dtype == b.dtype
    return a is b or (same_form and bool(np.array_equal(a, b)))
