"""Regions: the boxes of the graph picture.

A region is a node with the elementwise and movement nodes that only continue it: a product with
its bias, activation and residual. Each region has one tail, the only node whose results leave it,
so regions form no cycle. Nodes that quantize or dequantize belong to the region that reads them.
Bodies of branches and loops are part of their node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bitwright.ir.graph import Graph, Node
from bitwright.ir.naming import module_of
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get

EQUALIZED = ".equalized"
"""The ending of values that equalization scaled (`quant.model.transforms.equalize`)."""
QUANTIZERS = ("quantize", "dequantize", "dynamic_quantize")


@dataclass(eq=False)
class Region:
    """Nodes drawn as one box; `sources` are the regions that it reads."""

    nodes: list[Node]
    sources: list[Region] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    """Names of model outputs that it computes."""

    @property
    def tail(self) -> Node:
        return self.nodes[-1]

    @property
    def anchor(self) -> Node:
        """The node that names the region: its first product, reduction or control node."""
        strong = (n for n in self.nodes if get(n.op).kind is Kind.COMPUTE)
        weak = (n for n in self.nodes if _kind(n) not in (Kind.ELEMENTWISE, Kind.MOVEMENT))
        return next(strong, None) or next(weak, None) or self.nodes[0]

    @property
    def name(self) -> str:
        return module_of(self.anchor.loc) or self.anchor.name


@dataclass(frozen=True)
class Regions:
    """The regions of a graph in topological order; `of` maps value names to regions."""

    regions: list[Region]
    of: dict[str, Region]

    def find(self, path: str) -> Region | None:
        """The region of a layer, by the path of its value in the float model."""
        outer = path.partition("/")[0]  # a value in a body belongs to the body's node
        names = (path, f"{path}{EQUALIZED}", outer)
        return next((self.of[name] for name in names if name in self.of), None)


def find_regions(graph: Graph) -> Regions:
    """The regions of a graph's top level."""
    return _Finder(graph).run()


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.results = {value.node for value in graph.results}
        self.readers: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for value in node.operands:
                self.readers.setdefault(value.node, []).append(node)
        self.static: set[Node] = set()
        for node in graph.nodes:
            operands = [value.node for value in node.operands]
            is_weight = node.op in ("constant", "parameter")
            if is_weight or (operands and self.static.issuperset(operands)):
                self.static.add(node)
        self.static -= self.results
        self.passed: set[Node] = set()
        for node in reversed(graph.nodes):
            if self._is_passed(node):
                self.passed.add(node)
        self.shown = [n for n in graph.nodes if n not in self.static and n not in self.passed]
        self.region: dict[Node, Region] = {}

    def _is_passed(self, node: Node) -> bool:
        """Whether it quantizes or dequantizes, or only scales what is then quantized."""
        if node in self.results or node in self.static:
            return False
        if node.op in QUANTIZERS:
            return True
        moving = [value for value in node.operands if value.node not in self.static]
        readers = self.readers.get(node, [])
        return (
            node.op == "mul"
            and len(moving) == 1
            and bool(readers)
            and all(reader in self.passed and reader.op in QUANTIZERS for reader in readers)
        )

    def _sources(self, node: Node) -> list[Node]:
        """The shown nodes that a node reads, through those that are not shown."""
        found: dict[Node, None] = {}
        stack = [value.node for value in node.operands][::-1]
        while stack:
            source = stack.pop()
            if source in self.passed:
                stack += [value.node for value in source.operands][::-1]
            elif source not in self.static:
                found[source] = None
        return list(found)

    def run(self) -> Regions:
        sources = {node: self._sources(node) for node in self.shown}
        readers: dict[Node, set[Node]] = {}
        for node, read in sources.items():
            for source in read:
                readers.setdefault(source, set()).add(node)
        regions: list[Region] = []
        for node in self.shown:
            joined = self._continued(node, sources[node], readers)
            if joined is None:
                joined = Region([])
                regions.append(joined)
            joined.nodes.append(node)
            self.region[node] = joined
        place = {node: number for number, node in enumerate(self.shown)}
        regions.sort(key=lambda region: place[region.tail])
        for region in regions:
            found = [self.region[s] for node in region.nodes for s in sources[node]]
            region.sources = [r for r in dict.fromkeys(found) if r is not region]
        for name, value in self.graph.outputs:
            if value.node in self.region:
                self.region[value.node].outputs.append(name)
        return Regions(regions, self._names())

    def _continued(
        self, node: Node, sources: Iterable[Node], readers: dict[Node, set[Node]]
    ) -> Region | None:
        """The region that a node continues, or None."""
        kind = _kind(node)
        sources = list(sources)
        if kind not in (Kind.ELEMENTWISE, Kind.MOVEMENT) or node.bodies:
            return None
        if kind is Kind.MOVEMENT and len(sources) != 1:
            return None
        fitting = [
            self.region[source]
            for source in sources
            if not source.is_boundary
            and source not in self.results
            and readers[source] == {node}
            and self.region[source].tail is source
        ]
        strong = [region for region in fitting if _kind(region.anchor) is Kind.COMPUTE]
        return (strong or fitting)[-1] if fitting else None

    def _names(self) -> dict[str, Region]:
        """Regions by value name; a value that is not shown belongs to its first reader."""
        found: dict[str, Region] = {}
        owner: dict[Node, Region] = dict(self.region)
        for node in reversed(self.graph.nodes):
            if node not in owner:
                known = (owner[r] for r in self.readers.get(node, ()) if r in owner)
                if (region := next(known, None)) is None:
                    continue
                owner[node] = region
            found.update(dict.fromkeys(node.names, owner[node]))
        return found


def _kind(node: Node) -> Kind:
    return get(node.op).kind
