"""Groups nodes into regions that one kernel computes without intermediate stores.

A region has at most one *anchor*, an op with its own loop nest (matmul, convolution, norm, softmax,
reduction, attention), and elementwise nodes around it:

    epilogue   elementwise nodes that read the anchor's result, of the same shape
    prologue   elementwise nodes that compute the input of a row anchor (norm, softmax)
    quantize   quantization of the rows of a norm, dynamic or (`Kernels.shows_rows`) static

Values inside a region have no readers outside of it, so every path out of a region starts at its
last node: regions can run in the order of their last nodes, and fusion never creates a cycle. The
only exception are the rows of a norm that is quantized: the region may return them as a second
result (`shown`), and its nodes are moved right behind the norm (`_quantize_first`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from bitwright.ir.dtype import (
    bf16,
    bool_,
    f8e4m3fn,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from bitwright.ir.edit import map_bodies, prune, rebuild, replace_inputs
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import TensorType
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import get
from bitwright.rewrite.trace import Trace

# Element types that kernels compute with; other nodes are interpreter fallbacks.
COMPUTED = frozenset({f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, bool_})
F8 = (f8e4m3fn, f8e5m2)
PRODUCTS = frozenset({"integer_conv", "integer_matmul", "conv", "matmul", "f8_matmul"})
MAX_NODES = 128
"""Nodes per region: the compile time of a kernel grows faster than its size."""


def is_elementwise(node: Node) -> bool:
    """Whether a kernel can inline a node: it has a scalar form, or is a cast."""
    if node.is_boundary or len(node.outputs) != 1:
        return False
    if get(node.op).scalar is None and node.op != "cast":
        return False
    return all(
        isinstance(value.type, TensorType) and value.dtype in COMPUTED
        for value in (*node.operands, node.outputs[0])
    )


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a target do beyond what all targets do."""

    casts_f8: bool = False
    """They store float8 (`cast` with saturation) at the end of a region."""
    quantizes_halves: bool = False
    """`dynamic_quantize` reads f16 and bf16 rows of a norm."""
    shows_rows: bool = False
    """A norm stores its rows, and a product its result, beside their static quantization."""
    widens_late: bool = False
    """Halves are stored as such, and widened to f32 where they are read."""

    def inlines(self, node: Node) -> bool:
        """Whether a kernel can inline a node."""
        if is_elementwise(node):
            return True
        if not self.casts_f8 or node.op != "cast" or node.attrs["to"] not in F8:
            return False
        (x,) = node.operands
        return x.dtype in (f32, f16, bf16) and bool(node.attrs.get("saturate", True))

    def quantizes(self, node: Node) -> bool:
        """Whether a node is a quantization that the kernel of a norm can take."""
        if node.op == "dynamic_quantize":
            return True
        if not self.shows_rows or len(node.outputs) != 1 or not self.inlines(node):
            return False
        return node.op in ("requantize", "cast") and node.outputs[0].dtype in (i8, u8, *F8)


@dataclass
class Region:
    nodes: list[Node] = field(default_factory=list)
    anchor: Node | None = None
    shown: Value | None = None
    """A value inside the region that has other readers."""

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @property
    def takes_epilogue(self) -> bool:
        return self.anchor is None or get(self.anchor.op).takes_epilogue

    @property
    def results(self) -> tuple[Value, ...]:
        return self.last.outputs if self.shown is None else (*self.last.outputs, self.shown)


class Fusion:
    """Assigns every node of a graph to a region, in topological order."""

    def __init__(self, graph: Graph, trace: Trace, kernels: Kernels = Kernels()) -> None:
        self.graph, self.trace, self.kernels = graph, trace, kernels
        self.home: dict[Node, Region] = {}
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if not node.is_boundary:
                self._place(node)
        if kernels.widens_late:
            for region in self.regions():
                self._widen_late(region)

    def _place(self, node: Node) -> None:
        opdef = get(node.op)
        if self.kernels.inlines(node):
            region = self._with_anchor(node) or self._show_half(node) or self._join(node)
        elif opdef.takes_prologue or (opdef.reads_cast and _is_cast(node.inputs[0])):
            region = self._with_anchor(node) or self._with_prologue(node)
        else:
            region = Region([node], None if opdef.kind is Kind.MOVEMENT else node)
        self.home[node] = region

    def _join(self, node: Node) -> Region:
        """Merges the node with the regions that end in one of its operands."""
        found: list[Region] = []
        count = 1
        for operand in dict.fromkeys(node.operands):
            region = self.home.get(operand.node)
            if region is None or region in found:
                continue
            if reason := self._why_not_fuse(node, operand, region, count):
                self.trace.refused("fuse-epilogue", node.name, f"into {operand}: {reason}")
            else:
                found.append(region)
                count += len(region.nodes)
        self._absorb_shared(node, found)
        anchored = [region for region in found if region.anchor is not None]
        for region in anchored[:-1]:  # the last anchor takes the node as its epilogue
            found.remove(region)
            reason = f"{anchored[-1].last} has an anchor too"
            self.trace.refused("fuse-epilogue", node.name, f"into %{region.last.name}: {reason}")
        merged = Region([n for region in found for n in region.nodes] + [node])
        merged.anchor = anchored[-1].anchor if anchored else None
        merged.nodes.sort(key=self._position)
        for member in merged.nodes:
            self.home[member] = merged
        if found:
            self.trace.fired("fuse-epilogue", node.name, [merged.last.name])
        return merged

    def _show_half(self, node: Node) -> Region | None:
        """The region that shows the operand of a cast to half, if the cast is the only other
        reader: it shows the half."""
        if node.op != "cast" or node.attrs["to"] not in (f16, bf16):
            return None
        (x,) = node.operands
        region = self.home.get(x.node)
        if region is None or region.shown is not x or region.anchor is None:
            return None
        inside = sum(v is x for n in region.nodes for v in n.operands)
        if region.anchor.op not in PRODUCTS or self.graph.uses[x] != inside + 1:
            return None
        region.nodes.insert(region.nodes.index(x.node) + 1, node)
        (region.shown,) = node.outputs
        return region

    def _widen_late(self, region: Region) -> None:
        """Moves a cast of halves to f32 from the end of a region into the region that reads it."""
        cast = region.last
        if cast.op != "cast" or cast.attrs["to"] != f32 or region.shown is not None:
            return
        (x,), (y,) = cast.operands, cast.outputs
        reader = next((n for n in self.graph.nodes if y in n.operands), None)
        if self.home.get(x.node) is not region or x.dtype not in (f16, bf16) or reader is None:
            return
        opdef, home = get(reader.op), self.home.get(reader)
        is_first = reader.inputs[0] is y and (opdef.takes_prologue or opdef.reads_cast)
        if home is None or self.graph.uses[y] != 1 or not (is_elementwise(reader) or is_first):
            return
        region.nodes.remove(cast)
        home.nodes.insert(home.nodes.index(reader), cast)
        self.home[cast] = home

    def _absorb_shared(self, node: Node, found: list[Region]) -> None:
        """Adds elementwise regions whose result has several readers, all of them inside by now."""
        nodes = [node, *(n for region in found if region.anchor is None for n in region.nodes)]
        while True:
            count = len(nodes) + sum(len(r.nodes) for r in found if r.anchor is not None)
            reads = Counter(value for n in nodes for value in n.operands)
            shared = (
                self.home[value.node]
                for value, times in reads.items()
                if times > 1
                and times == self.graph.uses[value]
                and value.shape == node.outputs[0].shape
                and is_elementwise(value.node)
                and value.node is self.home[value.node].last
            )
            fitting = (r for r in shared if r.anchor is None and count + len(r.nodes) <= MAX_NODES)
            region = next((r for r in fitting if r not in found), None)
            if region is None:
                return
            self.trace.fired("fuse-shared", region.last.name, [node.name])
            found.append(region)
            nodes += region.nodes

    def _with_prologue(self, node: Node) -> Region:
        operand = node.inputs[0]
        region = self.home.get(operand.node) if operand is not None else None
        if operand is None or region is None or not is_elementwise(operand.node):
            return Region([node], node)
        reason = self._why_not_fuse(node, operand, region)
        if region.anchor is not None:
            reason = f"it is in the epilogue of {region.anchor.op}"
        if reason:
            self.trace.refused("fuse-prologue", node.name, f"{operand}: {reason}")
            return Region([node], node)
        merged = Region([*region.nodes, node], node)
        for member in merged.nodes:
            self.home[member] = merged
        self.trace.fired("fuse-prologue", node.name, [node.name])
        return merged

    def _with_anchor(self, node: Node) -> Region | None:
        """The region of a norm or product with the quantization of its result, or None.

        A static quantization that is the only reader is an epilogue (`_join`). Elementwise nodes in
        between must read only the norm and constants.
        """
        if not self.kernels.quantizes(node):
            return None
        operand = node.inputs[0]
        assert operand is not None
        between: list[Node] = []
        source = operand
        region = self.home.get(operand.node)
        if region is not None and region.anchor is None and region.last is operand.node:
            found = _source_of(region)
            if found is None or self.graph.uses[operand] != 1:
                return None
            between, source = region.nodes, found
            region = self.home.get(source.node)
        if region is None or region.anchor is None:
            return None
        is_static = node.op != "dynamic_quantize"
        opdef, is_row = get(region.anchor.op), is_static and region.anchor.op in PRODUCTS
        if opdef.quantizes_rows:
            is_row = region.anchor.attrs["axis"] in (-1, source.rank - 1)
        if (
            region.shown is not None
            or region.last is not source.node
            or source.shape != operand.shape
            or not is_row
        ):
            return None
        halves = (f16, bf16) if self.kernels.quantizes_halves else ()
        if source.dtype not in (f32, *halves) or source.node.outputs != (source,):
            return None
        reads = sum(v is source for n in (*between, node) for v in n.operands)
        others = [v for v in node.operands if v is not operand]
        if is_static and (
            self.graph.uses[source] == reads or not all(v.is_constant for v in others)
        ):
            return None
        merged = Region([*region.nodes, *between, node], region.anchor)
        merged.shown = source if self.graph.uses[source] != reads else None
        for member in merged.nodes:
            self.home[member] = merged
        self.trace.fired("fuse-quantize", node.name, [node.name])
        return merged

    def _why_not_fuse(self, node: Node, operand: Value, region: Region, count: int = 1) -> str:
        """Why a region cannot take a node, which brings `count` nodes with it."""
        if len(region.nodes) + count > MAX_NODES:
            return f"it would hold more than {MAX_NODES} nodes"
        if operand.node is not region.last:
            return "it is inside another region"
        if not region.takes_epilogue or not (region.anchor or is_elementwise(operand.node)):
            return f"{operand.node.op} takes no epilogue"
        if self.graph.uses[operand] != sum(v is operand for v in node.operands):
            return "it has another reader"
        if region.shown is not None or any(
            self.graph.uses[v] for v in operand.node.outputs if v is not operand
        ):
            return f"other results of {operand.node.op} have readers"
        if operand.shape != node.outputs[0].shape and not get(node.op).reads_cast:
            return f"shape {list(operand.shape)} is broadcast to {list(node.outputs[0].shape)}"
        return ""

    def _position(self, node: Node) -> int:
        return self._order[node]

    def regions(self) -> list[Region]:
        """All regions in the order of their last nodes."""
        return sorted(
            {id(r): r for r in self.home.values()}.values(), key=lambda r: self._position(r.last)
        )


def _is_cast(value: Value | None) -> bool:
    return value is not None and value.node.op == "cast"


def _source_of(region: Region) -> Value | None:
    """The only value that the nodes of a region read besides constants."""
    made = {value for node in region.nodes for value in node.outputs}
    read = {v for node in region.nodes for v in node.operands if v not in made}
    sources = [value for value in read if not value.is_constant]
    return sources[0] if len(sources) == 1 else None


def _quantize_first(graph: Graph, kernels: Kernels) -> Graph:
    """Moves each quantization, with elementwise nodes before it, right behind its source.

    Other readers of a norm's rows then come after the region that computes both.
    """
    chains: dict[Node, list[Node]] = {}
    moved: set[Node] = set()
    for node in graph.nodes:
        if not kernels.quantizes(node):
            continue
        source, *others = node.operands
        if not all(value.node.is_boundary for value in others):
            continue  # a zero point that is computed, maybe behind the source
        chain = [node]
        while is_elementwise(source.node) and graph.uses[source] == 1:
            inputs = [value for value in source.node.operands if not value.is_constant]
            if len(inputs) != 1:
                break
            chain.append(source.node)
            (source,) = inputs
        if not source.node.is_boundary:
            chains.setdefault(source.node, []).extend(reversed(chain))
            moved.update(chain)
    if not moved:
        return graph
    order = [node for node in graph.nodes if node.is_boundary]
    for node in graph.nodes:
        if not node.is_boundary and node not in moved:
            order += [node, *chains.get(node, ())]
    return graph.with_(nodes=tuple(order))


def fuse_regions(graph: Graph, trace: Trace) -> Graph:
    return fuse_for(graph, trace, Kernels())


def fuse_for(graph: Graph, trace: Trace, kernels: Kernels) -> Graph:
    """`fuse_regions` for a target."""
    graph = map_bodies(graph, lambda body: fuse_for(body, trace, kernels))
    graph = _quantize_first(graph, kernels)
    regions = {region.last: region for region in Fusion(graph, trace, kernels).regions()}
    inside = {n for region in regions.values() for n in region.nodes if n is not region.last}
    replaced: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node in inside:
            continue
        region = regions.get(node)
        if region is not None and len(region.nodes) > 1:
            new = _fused_node(region, replaced)
        else:
            new = replace_inputs(node, replaced)
        nodes.append(new)
        if new is not node:
            made = node.outputs if region is None else region.results
            replaced.update(zip(made, new.outputs, strict=True))
    return prune(rebuild(graph, nodes, replaced))


MAX_INTEGER = 16
"""Larger integers are zero points and the like, which differ between layers."""


def _is_plain_number(value: Value) -> bool:
    """Whether a constant is part of a formula (0, 6, 0.5) rather than a parameter of one layer.

    Parameters stay operands, so that layers of the same shape share one kernel.
    """
    array = constant_value(value)
    if array is None or array.size != 1 or array.dtype == object or array.dtype.kind == "c":
        return False
    number = float(array.reshape(-1)[0])
    if array.dtype.kind in "iu":
        return abs(number) <= MAX_INTEGER
    return math.isinf(number) or (abs(number) <= 1024 and (number * 16).is_integer())


def _fused_node(region: Region, replaced: dict[Value, Value]) -> Node:
    """The `fused` node of a region; plain numbers move into its body."""
    members = set(region.nodes)
    inner: dict[Value, Value] = {}
    boundary: list[Node] = []
    operands: list[Value] = []
    for node in region.nodes:
        for value in node.operands:
            if value.node in members or value in inner:
                continue
            if _is_plain_number(value):
                entry = value.node.with_()
            else:
                entry = Node("input", (), {}, (value.type,), (value.name,))
                operands.append(replaced.get(value, value))
            boundary.append(entry)
            inner[value] = entry.outputs[0]
    body_nodes = list(boundary)
    for node in region.nodes:
        copy = node.with_(inputs=tuple(None if v is None else inner[v] for v in node.inputs))
        inner.update(zip(node.outputs, copy.outputs, strict=True))
        body_nodes.append(copy)
    last = region.last
    outputs = tuple((v.name, inner[v]) for v in region.results)
    body = Graph(last.name, tuple(body_nodes), outputs)
    types, names = (tuple(getattr(v, k) for v in region.results) for k in ("type", "name"))
    return Node("fused", tuple(operands), {"body": body}, types, names, last.loc)
