"""Regions: standard nodes that implement one op of bitwright.

The exporter writes an op that no single ONNX node expresses as several standard nodes, and records
the region in the model's metadata: op, attributes, names of operands and outputs, names of other
values that the nodes read (mostly sizes), and a digest of the nodes.

    "bitwright.regions": [{"op": ..., "attrs": {...}, "operands": [...], "reads": [...],
                           "outputs": [...], "digest": ...}, ...]

The importer replaces the region by a call of a model-local function with the same body, which
`frontend.onnx.bitwright_ops` imports as the op. If another tool changed the nodes, the digest does
not match, and the nodes are imported one by one.
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
PROOF_KEY = "bitwright.proof"
"""Metadata that describes one file (`bitwright.proof`): importers leave it out."""
DOMAIN = "bitwright"
SMALL = 1024
"""Smaller constants, in bytes, are part of the digest; larger ones are inputs of the region."""
VISITS = 50
"""Limit on visited nodes, as a multiple of the nodes of the model."""

Constants = Callable[[str], Tensor | None]
"""The small constant of this name, or None."""


@dataclass(frozen=True)
class Region:
    op: str
    attrs: Mapping[str, Any]
    operands: Sequence[str]
    """Names of values; empty for an absent operand."""
    reads: Sequence[str]
    outputs: Sequence[str]
    digest: str

    @property
    def inputs(self) -> list[str]:
        return [*self.operands, *self.reads]


class ForeignRegionError(Exception):
    """The nodes do not form the recorded region."""


def to_json(regions: Iterable[Region]) -> str:
    return json.dumps([asdict(region) for region in regions], separators=(",", ":"))


def recorded_regions(model: ModelProto) -> list[Region]:
    """The regions in the metadata; none if it is malformed."""
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
        self.index = {name: i for i, n in enumerate(self.nodes) for name in n.output if name}

    def between(
        self, inputs: Sequence[str], outputs: Sequence[str], constants: Constants
    ) -> tuple[list[int], str]:
        """The indices of all nodes between inputs and outputs, in order, and their digest."""
        given = {name for name in inputs if name}
        indices: set[int] = set()
        small: dict[str, Tensor] = {}
        left = list(outputs)
        while left:
            name = left.pop()
            if not name or name in given or name in small:
                continue
            index = self.index.get(name)
            if index is None:
                constant = constants(name)
                if constant is None:
                    raise ForeignRegionError(f"{name!r} is neither an input nor a small constant")
                small[name] = constant
            elif index not in indices:
                indices.add(index)
                left += self.nodes[index].input
        order = sorted(indices)
        return order, _digest([self.nodes[i] for i in order], inputs, outputs, small)


def _digest(
    nodes: Iterable[NodeProto],
    inputs: Sequence[str],
    outputs: Sequence[str],
    small: Mapping[str, Tensor],
) -> str:
    """A hash of the nodes that does not depend on the names of values."""
    labels = {name: f"input {i}" for i, name in enumerate(inputs) if name}
    for name, tensor in small.items():
        content = f"{tensor.data_type} {list(tensor.dims)} {tensor.raw_data.hex()}"
        labels[name] = f"constant {content}"
    lines: list[str] = []
    for index, node in enumerate(nodes):
        labels.update({name: f"{index}.{i}" for i, name in enumerate(node.output) if name})
        read = ", ".join(labels.get(name, "") for name in node.input)
        attrs = sorted(a.SerializeToString(deterministic=True).hex() for a in node.attribute)
        lines.append(f"{node.domain}:{node.op_type}({read}) {attrs}")
    lines.append(", ".join(labels[name] for name in outputs))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


class Regions:
    """The nodes of a model's graphs, with function calls in place of the recorded regions."""

    def __init__(self, model: ModelProto) -> None:
        self.functions: dict[tuple[str, str, str], FunctionProto] = {}
        self.called: dict[str, Region] = {}
        """The regions by the names of their functions."""
        self._left = recorded_regions(model)
        self._number = len(model.functions)
        self._steps = VISITS * sum(len(graph.node) for graph in graphs(model.graph))
        self._calls: dict[int, tuple[GraphProto, list[NodeProto]]] = {}
        """By the id of a graph; the entry keeps the graph alive."""
        if self._left:
            self._replace_regions(model.graph, {})

    def nodes(self, graph: GraphProto) -> Sequence[NodeProto]:
        """The nodes of a graph of the model."""
        changed = self._calls.get(id(graph))
        return list(graph.node) if changed is None else changed[1]

    def _replace_regions(self, graph: GraphProto, around: Mapping[str, Tensor]) -> None:
        small = {t.name: t for t in graph.initializer if is_small(t)}
        known = {**around, **small}
        producers = Producers(graph)
        nodes: list[NodeProto | None] = list(graph.node)
        uses = Counter(_read_names(graph))
        is_changed = False
        for region in [r for r in self._left if r.outputs[-1] in producers.index]:
            self._left.remove(region)
            with suppress(ForeignRegionError, BitwrightError, ValueError, TypeError):
                self._replace(region, producers, nodes, uses, known.get)
                is_changed = True
        if is_changed:
            self._calls[id(graph)] = graph, [node for node in nodes if node is not None]
        for inner in _inner_graphs(graph):
            self._replace_regions(inner, known)

    def _replace(
        self,
        region: Region,
        producers: Producers,
        nodes: list[NodeProto | None],
        uses: Counter[str],
        constants: Constants,
    ) -> None:
        indices, digest = producers.between(region.inputs, region.outputs, constants)
        self._steps -= len(indices)
        if digest != region.digest or self._steps < 0 or not indices:
            raise ForeignRegionError("other nodes")
        last = indices[-1]
        body = [producers.nodes[index] for index in indices]
        _require_sole_outputs(body, region.outputs, uses)
        _require_later_readers(producers.nodes[: last + 1], set(indices), region.outputs)
        call = self._call(region, body, constants)
        for index in reversed(indices):
            node = nodes[index]
            is_read = node is not None and any(
                uses[name] for name in node.output if name not in region.outputs
            )
            if node is not None and not is_read:
                uses.subtract(name for name in node.input if name)
                nodes[index] = None
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
    """Raise if a replaced node has further outputs that are read."""
    for node in body:
        if set(node.output) & set(outputs):
            other = [n for n in node.output if n not in outputs and uses[n]]
            if other:
                raise ForeignRegionError(f"{other[0]!r} is read elsewhere")


def _require_later_readers(
    nodes: Sequence[NodeProto], indices: set[int], outputs: Sequence[str]
) -> None:
    """Raise if a node before the position of the call reads an output."""
    for index, node in enumerate(nodes):
        if index not in indices and set(node.input) & set(outputs):
            raise ForeignRegionError(f"node {node.name!r} reads an output too early")


def is_small(tensor: Tensor) -> bool:
    """Whether a constant is inside the model and part of digests."""
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
    """Every name that a graph or its bodies read, with repetitions."""
    for inner in graphs(graph):
        yield from (name for node in inner.node for name in node.input if name)
        yield from (info.name for info in inner.output)
