"""Regions: standard nodes that stand for one op of bitwright.

The exporter writes an op that ONNX cannot say in one node as standard nodes, and notes the region
in the model's metadata: op, attributes, names of operands and outputs, names of other values that
the nodes read (sizes, mostly), and a digest of the nodes.

    "bitwright.regions": [{"op": ..., "attrs": {...}, "operands": [...], "reads": [...],
                           "outputs": [...], "digest": ...}, ...]

The importer takes such a region for a call of a model-local function with the region as its body,
and so finds the op again (`frontend.onnx.own`). A region whose nodes another tool changed has
another digest: its nodes are imported as they stand.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, helper
from onnx import TensorProto as Tensor

from bitwright.errors import BitwrightError

KEY = "bitwright.regions"
DOMAIN = "bitwright"
SMALL = 1024
"""Constants of fewer bytes than this are part of the digest; larger ones are inputs of a region."""
WALKS = 50
"""Nodes that all walks together may visit, as a multiple of the nodes of the model."""

Constants = Callable[[str], Tensor | None]
"""The small constant of this name, or None."""


@dataclass(frozen=True)
class Region:
    op: str
    attrs: Mapping[str, Any]
    operands: Sequence[str]
    """Names of values; empty for an operand that is left out."""
    reads: Sequence[str]
    outputs: Sequence[str]
    digest: str

    @property
    def inputs(self) -> list[str]:
        return [*self.operands, *self.reads]


class ForeignRegionError(Exception):
    """The nodes are not, or no longer, a region."""


def to_json(regions: Iterable[Region]) -> str:
    return json.dumps([asdict(region) for region in regions], separators=(",", ":"))


def noted_regions(model: ModelProto) -> list[Region]:
    """The regions that the metadata names; none where it is malformed."""
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), "")
    with suppress(ValueError, TypeError, RecursionError):
        found = [Region(**entry) for entry in json.loads(text or "[]")]
        return [region for region in found if _is_well_formed(region)]
    return []


def _is_well_formed(region: Region) -> bool:
    lists = (region.operands, region.reads, region.outputs)
    texts = all(isinstance(names, list) for names in lists) and all(
        isinstance(name, str) for names in lists for name in names
    )
    kinds = isinstance(region.op, str) and isinstance(region.digest, str)
    attrs = isinstance(region.attrs, dict) and all(
        isinstance(item, (int, float, str))
        for value in region.attrs.values()
        for item in (value if isinstance(value, list) else [value])
    )
    return bool(texts and region.outputs and all(region.outputs) and kinds and attrs)


class Producers:
    """The nodes of one graph by the names of their outputs."""

    def __init__(self, graph: GraphProto) -> None:
        self.nodes = list(graph.node)
        self.place = {name: i for i, n in enumerate(self.nodes) for name in n.output if name}

    def between(
        self, inputs: Sequence[str], outputs: Sequence[str], constants: Constants
    ) -> tuple[list[int], str]:
        """The places of all nodes from inputs to outputs, in order, and their digest."""
        given = {name for name in inputs if name}
        places: set[int] = set()
        small: dict[str, Tensor] = {}
        left = list(outputs)
        while left:
            name = left.pop()
            if not name or name in given or name in small:
                continue
            place = self.place.get(name)
            if place is None:
                constant = constants(name)
                if constant is None:
                    raise ForeignRegionError(f"{name!r} is neither an input nor a small constant")
                small[name] = constant
            elif place not in places:
                places.add(place)
                left += self.nodes[place].input
        order = sorted(places)
        return order, _digest([self.nodes[i] for i in order], inputs, outputs, small)


def _digest(
    nodes: Iterable[NodeProto],
    inputs: Sequence[str],
    outputs: Sequence[str],
    small: Mapping[str, Tensor],
) -> str:
    """A hash of what the nodes compute, whatever their values are called."""
    numbers = {name: f"input {i}" for i, name in enumerate(inputs) if name}
    for name, tensor in small.items():
        content = f"{tensor.data_type} {list(tensor.dims)} {tensor.raw_data.hex()}"
        numbers[name] = f"constant {content}"
    lines: list[str] = []
    for place, node in enumerate(nodes):
        numbers.update({name: f"{place}.{i}" for i, name in enumerate(node.output) if name})
        read = ", ".join(numbers.get(name, "") for name in node.input)
        attrs = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
        lines.append(f"{node.domain}:{node.op_type}({read}) {attrs}")
    lines.append(", ".join(numbers[name] for name in outputs))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


class Regions:
    """Nodes of a model's graphs, with calls in place of the regions that its metadata names."""

    def __init__(self, model: ModelProto) -> None:
        self.functions: dict[tuple[str, str, str], FunctionProto] = {}
        self.called: dict[str, Region] = {}
        """The regions by the names of their functions."""
        self._left = noted_regions(model)
        self._number = len(model.functions)
        self._steps = WALKS * sum(len(graph.node) for graph in graphs(model.graph))
        self._calls: dict[int, tuple[GraphProto, list[NodeProto]]] = {}
        """By the identity of a graph, which lives as long as the entry does."""
        if self._left:
            self._enter(model.graph, {})

    def nodes(self, graph: GraphProto) -> Sequence[NodeProto]:
        """The nodes of a graph of the model."""
        _, nodes = self._calls.get(id(graph), (graph, graph.node))
        return nodes

    def _enter(self, graph: GraphProto, around: Mapping[str, Tensor]) -> None:
        small = {t.name: t for t in graph.initializer if is_small(t)}
        known = {**around, **small}
        producers = Producers(graph)
        nodes: list[NodeProto | None] = list(graph.node)
        uses = Counter(_read_names(graph))
        is_changed = False
        for region in [r for r in self._left if r.outputs[-1] in producers.place]:
            self._left.remove(region)
            with suppress(ForeignRegionError, BitwrightError, ValueError, TypeError):
                self._replace(region, producers, nodes, uses, known.get)
                is_changed = True
        if is_changed:
            self._calls[id(graph)] = graph, [node for node in nodes if node is not None]
        for inner in _inner_graphs(graph):
            self._enter(inner, known)

    def _replace(
        self,
        region: Region,
        producers: Producers,
        nodes: list[NodeProto | None],
        uses: Counter[str],
        constants: Constants,
    ) -> None:
        places, digest = producers.between(region.inputs, region.outputs, constants)
        self._steps -= len(places)
        if digest != region.digest or self._steps < 0 or not places:
            raise ForeignRegionError("other nodes")
        last = places[-1]
        body = [producers.nodes[place] for place in places]
        _require_sole_outputs(body, region.outputs, uses)
        _require_later_readers(producers.nodes[: last + 1], set(places), region.outputs)
        call = self._call(region, body, constants)
        for place in reversed(places):
            node = nodes[place]
            is_read = node is not None and any(
                uses[name] for name in node.output if name not in region.outputs
            )
            if node is not None and not is_read:
                uses.subtract(name for name in node.input if name)
                nodes[place] = None
        uses.update(name for name in region.inputs if name)
        nodes[last] = call

    def _call(self, region: Region, body: Sequence[NodeProto], constants: Constants) -> NodeProto:
        self._number += 1
        name = f"{region.op}_{self._number}"
        made = {output for node in body for output in node.output}
        inside = {n for node in body for n in node.input if n and n not in made}
        held = [(n, constants(n)) for n in sorted(inside - set(region.inputs))]
        formals = [given or f"absent_{i}" for i, given in enumerate(region.inputs)]
        function = FunctionProto(name=name, domain=DOMAIN, input=formals, output=region.outputs)
        function.node.extend(
            helper.make_node("Constant", [], [n], value=tensor) for n, tensor in held
        )
        function.node.extend(body)
        self.functions[DOMAIN, name, ""] = function
        call = NodeProto(op_type=name, domain=DOMAIN, name=body[-1].name)
        call.input.extend(region.inputs)
        call.output.extend(region.outputs)
        self.called[name] = region
        return call


def _require_sole_outputs(
    body: Sequence[NodeProto], outputs: Sequence[str], uses: Counter[str]
) -> None:
    """A node that makes an output of the region is replaced as a whole."""
    for node in body:
        if set(node.output) & set(outputs):
            other = [n for n in node.output if n not in outputs and uses[n]]
            if other:
                raise ForeignRegionError(f"{other[0]!r} is read elsewhere")


def _require_later_readers(
    nodes: Sequence[NodeProto], places: set[int], outputs: Sequence[str]
) -> None:
    """The call stands where the last node stood: nothing before it reads an output."""
    for place, node in enumerate(nodes):
        if place not in places and set(node.input) & set(outputs):
            raise ForeignRegionError(f"node {node.name!r} reads an output too early")


def is_small(tensor: Tensor) -> bool:
    """Whether a constant lies in the model itself and is part of digests."""
    return (
        bool(tensor.name)
        and tensor.data_location == Tensor.DEFAULT
        and (0 < len(tensor.raw_data) < SMALL)
    )


def _inner_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield attribute.g
            yield from attribute.graphs


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and all bodies in it."""
    yield graph
    for inner in _inner_graphs(graph):
        yield from graphs(inner)


def _read_names(graph: GraphProto) -> Iterator[str]:
    """Every name that is read in a graph or its bodies, as often as it is."""
    for inner in graphs(graph):
        yield from (name for node in inner.node for name in node.input if name)
        yield from (info.name for info in inner.output)
