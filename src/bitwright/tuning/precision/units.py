"""Units of a search: the parts of a model that get a precision of their own.

    product     the products that share an input or a weight (`quant.model.points`)
    body        all products in the body of one loop or branch: its steps are timed together
    attention   one attention op
    lookup      one gather from a large constant table

Unit names are names of values in the prepared float graph (`stages.simplify`).
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.ir.graph import Graph, Node
from bitwright.quant.model.embeddings import chosen_lookups
from bitwright.quant.model.points import QuantizationPoint, find_points
from bitwright.quant.model.recipe import RECIPES


@dataclass(frozen=True)
class Unit:
    name: str
    kind: str
    """product, body, attention or lookup."""
    nodes: tuple[str, ...]
    """Names of its nodes in the top-level graph, to which steps are attributed."""
    layers: tuple[str, ...]
    """Paths of the layers that get its precision."""
    weights: int = 0
    """Elements of its constant weights."""
    channels: int = 0
    """Output channels: the scales of 8-bit weights."""


def find_units(graph: Graph) -> list[Unit]:
    """The units of a prepared float graph, in graph order."""
    points = find_points(graph)
    lookups = chosen_lookups(graph, points, RECIPES["int8"])
    tied: dict[str, list[str]] = {}
    found: list[Unit] = []
    for lookup in lookups:
        name = lookup.node.name
        if lookup.product is None:
            size = int(lookup.table.size)
            found.append(Unit(name, "lookup", (name,), (name,), size, int(lookup.table.shape[0])))
        else:
            tied.setdefault(lookup.product.name, []).append(name)
    for point in points:
        if not point.is_inside:
            found.append(_product_unit(point, tied))
    for node in graph.nodes:
        if node.op == "attention":
            found.append(Unit(node.name, "attention", (node.name,), (node.name,)))
        elif node.bodies:
            inside = [p for p in points if p.path.startswith(f"{node.name}/")]
            if inside:
                found.append(_body_unit(node, inside))
    place = {name: number for number, node in enumerate(graph.nodes) for name in node.names}
    return sorted(found, key=lambda unit: min(place[name] for name in unit.nodes))


def _product_unit(point: QuantizationPoint, tied: dict[str, list[str]]) -> Unit:
    names = tuple(product.node.name for product in point.products)
    lookups = tuple(name for product in point.products for name in tied.get(product.name, ()))
    layers = (*(product.name for product in point.products), *lookups)
    return Unit(names[0], "product", names, layers, point.weights, _channels([point]))


def _body_unit(node: Node, points: list[QuantizationPoint]) -> Unit:
    layers = tuple(product.name for point in points for product in point.products)
    weights = sum(point.weights for point in points)
    return Unit(node.name, "body", (node.name,), layers, weights, _channels(points))


def _channels(points: list[QuantizationPoint]) -> int:
    shapes = (product.matrix.shape for point in points for product in point.distinct)
    return sum(int(shape[0] * shape[1]) for shape in shapes)


def neighbours(graph: Graph, units: list[Unit]) -> list[tuple[str, str, str]]:
    """Pairs of units where the second reads a result of the first, with the value that it reads.

    Between the two are only ops that belong to no unit.
    """
    home = {name: unit.name for unit in units for name in unit.nodes}
    sources: dict[str, frozenset[str]] = {}
    found: dict[tuple[str, str], str] = {}
    for node in graph.nodes:
        before: frozenset[str] = frozenset()
        for value in node.operands:
            before |= sources.get(value.name, frozenset())
        own = home.get(node.name)
        if own is not None:
            first = next(iter(node.operands)).name
            for other in sorted(before - {own}):
                found.setdefault((other, own), first)
            before = frozenset((own,))
        sources.update(dict.fromkeys(node.names, before))
    return [(first, second, value) for (first, second), value in found.items()]


def owners(graph: Graph, units: list[Unit]) -> dict[str, str]:
    """The unit that the time of each value counts to.

    A value counts to the last unit before it; values before all units count to the first unit that
    reads them.
    """
    order = {unit.name: number for number, unit in enumerate(units)}
    home = {name: unit.name for unit in units for name in unit.nodes}
    found: dict[str, str] = {}
    for node in graph.nodes:
        own = home.get(node.name)
        before = [found[v.name] for v in node.operands if v.name in found]
        if own is None and before:
            own = max(before, key=lambda name: order[name])
        if own is not None:
            found.update(dict.fromkeys(node.names, own))
    readers: dict[str, str] = {}
    for node in reversed(graph.nodes):
        later = [found.get(name) or readers.get(name) for name in node.names]
        own = min((name for name in later if name), key=lambda name: order[name], default=None)
        if own is not None:
            for value in node.operands:
                readers[value.name] = own
    return {**readers, **found}
