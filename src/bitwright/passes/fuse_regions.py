"""Neighbouring nodes become regions that one kernel computes without going through memory.

A region has at most one *anchor*, an op with a loop of its own (matmul, convolution, norm, softmax,
reduction, attention), and elementwise nodes around it:

    epilogue   elementwise nodes that read the anchor's result, of the same shape
    prologue   elementwise nodes that make what a row anchor (norm, softmax) reads

A value inside a region is read nowhere else, so every path out of a region starts at its last node:
regions can be computed in the order of their last nodes, and fusing never makes a cycle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bitwright.ir.dtype import (
    bf16,
    bool_,
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
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import TensorType
from bitwright.ops.opdef import Kind
from bitwright.ops.registry import get
from bitwright.rewrite.driver import map_bodies, prune
from bitwright.rewrite.trace import Trace

# Anchors whose kernels apply a scalar expression where they store.
EPILOGUE = frozenset(
    {
        "matmul",
        "conv",
        "integer_matmul",
        "integer_conv",
        "attention",
        "layer_norm",
        "rms_norm",
        "softmax",
        "log_softmax",
        "group_norm",
        "instance_norm",
    }
)
# Anchors that work row by row and can compute what they read.
PROLOGUE = frozenset({"layer_norm", "rms_norm", "softmax", "log_softmax"})


# Element types that kernels compute with; what has others stands alone, for a host step.
COMPUTED = frozenset({f64, f32, f16, bf16, i64, i32, i16, i8, u64, u32, u16, u8, bool_})


def is_elementwise(node: Node) -> bool:
    """Whether a node has a scalar form that a kernel can inline; a cast is one by itself."""
    if node.is_boundary or len(node.outputs) != 1:
        return False
    if get(node.op).scalar is None and node.op != "cast":
        return False
    return all(
        isinstance(value.type, TensorType) and value.dtype in COMPUTED
        for value in (*node.operands, node.outputs[0])
    )


@dataclass
class Region:
    nodes: list[Node] = field(default_factory=list)
    anchor: Node | None = None

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @property
    def takes_epilogue(self) -> bool:
        return self.anchor is None or self.anchor.op in EPILOGUE


class Fusion:
    """Assigns every node of a graph to a region, in topological order."""

    def __init__(self, graph: Graph, trace: Trace) -> None:
        self.graph, self.trace = graph, trace
        self.home: dict[Node, Region] = {}
        for node in graph.nodes:
            if not node.is_boundary:
                self._place(node)

    def _place(self, node: Node) -> None:
        if is_elementwise(node):
            region = self._join(node)
        elif node.op in PROLOGUE:
            region = self._with_prologue(node)
        else:
            region = Region([node], None if get(node.op).kind is Kind.MOVEMENT else node)
        self.home[node] = region

    def _join(self, node: Node) -> Region:
        """Regions that end in an operand of this node, all in one with it."""
        found: list[Region] = []
        for operand in dict.fromkeys(node.operands):
            region = self.home.get(operand.node)
            if region is None or region in found:
                continue
            if reason := self._refusal(node, operand, region):
                self.trace.refused("fuse-epilogue", node.name, f"into {operand}: {reason}")
            else:
                found.append(region)
        anchored = [region for region in found if region.anchor is not None]
        for region in anchored[:-1]:  # the later anchor keeps the node; the others store
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

    def _with_prologue(self, node: Node) -> Region:
        operand = node.inputs[0]
        region = self.home.get(operand.node) if operand is not None else None
        if operand is None or region is None or not is_elementwise(operand.node):
            return Region([node], node)
        reason = self._refusal(node, operand, region)
        if region.anchor is not None:
            reason = f"it is computed where {region.anchor.op} stores"
        if reason:
            self.trace.refused("fuse-prologue", node.name, f"{operand}: {reason}")
            return Region([node], node)
        merged = Region([*region.nodes, node], node)
        for member in merged.nodes:
            self.home[member] = merged
        self.trace.fired("fuse-prologue", node.name, [node.name])
        return merged

    def _refusal(self, node: Node, operand: Value, region: Region) -> str:
        if operand.node is not region.last:
            return "it is inside another region"
        if not region.takes_epilogue or not (region.anchor or is_elementwise(operand.node)):
            return f"{operand.node.op} takes no epilogue"
        if self.graph.uses[operand] != sum(v is operand for v in node.operands):
            return "it is read elsewhere too"
        if operand.shape != node.outputs[0].shape:
            return f"shape {list(operand.shape)} is broadcast to {list(node.outputs[0].shape)}"
        return ""

    def _position(self, node: Node) -> int:
        if not hasattr(self, "_order"):
            self._order = {n: i for i, n in enumerate(self.graph.nodes)}
        return self._order[node]

    def regions(self) -> list[Region]:
        """Every region once, in the order of their last nodes."""
        return sorted(
            {id(r): r for r in self.home.values()}.values(), key=lambda r: self._position(r.last)
        )


def fuse_regions(graph: Graph, trace: Trace) -> Graph:
    graph = map_bodies(graph, lambda body: fuse_regions(body, trace))
    regions = {region.last: region for region in Fusion(graph, trace).regions()}
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
            inputs = tuple(None if v is None else replaced[v] for v in node.inputs)
            new = node if inputs == node.inputs else node.with_(inputs=inputs)
        nodes.append(new)
        replaced.update(zip(node.outputs, new.outputs, strict=True))
    return prune(
        graph.with_(
            nodes=tuple(nodes),
            outputs=tuple((name, replaced[v]) for name, v in graph.outputs),
            updates=tuple((replaced[s], replaced[v]) for s, v in graph.updates),
        )
    )


MAX_WHOLE = 16
"""Larger whole numbers are zero points and the like, which differ from layer to layer."""


def _is_plain_number(value: Value) -> bool:
    """Whether a constant is part of a formula (0, 6, 0.5) rather than a weight of one layer.

    Weights stay operands, so that layers of the same form share one kernel.
    """
    array = constant_value(value)
    if array is None or array.size != 1 or array.dtype == object or array.dtype.kind == "c":
        return False
    number = float(array.reshape(-1)[0])
    if array.dtype.kind in "iu":
        return abs(number) <= MAX_WHOLE
    return math.isinf(number) or (abs(number) <= 1024 and (number * 16).is_integer())


def _fused_node(region: Region, replaced: dict[Value, Value]) -> Node:
    """One node whose body is the region; plain numbers move inside."""
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
                operands.append(replaced[value])
            boundary.append(entry)
            inner[value] = entry.outputs[0]
    body_nodes = list(boundary)
    for node in region.nodes:
        copy = node.with_(inputs=tuple(None if v is None else inner[v] for v in node.inputs))
        inner.update(zip(node.outputs, copy.outputs, strict=True))
        body_nodes.append(copy)
    last = region.last
    outputs = tuple((v.name, inner[v]) for v in last.outputs)
    body = Graph(last.name, tuple(body_nodes), outputs)
    return Node("fused", tuple(operands), {"body": body}, last.types, last.names, last.loc)
