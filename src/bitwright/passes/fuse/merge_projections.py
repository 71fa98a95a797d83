"""Matmuls of one input with several weights become one matmul, split afterwards.

    x @ wq + bq, x @ wk + bk, x @ wv + bv  ->  split(x @ [wq wk wv] + [bq bk bv])

The same for quantized weights of one kind: those of `dequant_matmul`, or dequantized ones with a
scale per column. The split costs nothing (its parts are views), the input is read once, and threads
share one large product. A product whose result feeds an activation or a quantize stays, because the
split would separate it from its epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.edit import prune, rebuilt, renewed
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import is_elementwise
from bitwright.rewrite.trace import Trace

Array = np.ndarray[Any, Any]
_NAMES = ("weight", "scale", "zero", "added")
"""Names of the operands of a product besides its input."""


@dataclass(frozen=True)
class Projection:
    """A product with a constant weight, and its bias."""

    matmul: Node
    weights: tuple[Value | None, ...]
    """Constants to concatenate in the merged product."""
    dequantize: Node | None
    """The node that dequantizes the weight, if there is one."""
    add: Node | None
    bias: Value | None

    @property
    def result(self) -> Value:
        return (self.add or self.matmul).outputs[0]

    @property
    def family(self) -> tuple[Any, ...]:
        """What products must have in common to be merged."""
        kinds = [None if v is None else v.dtype for v in self.weights]
        maker = self.dequantize or self.matmul
        return self.matmul.inputs[0], maker.op, maker.attrs.get("block"), *kinds

    @property
    def width(self) -> int:
        return int(self.matmul.outputs[0].shape[-1])


def merge_projections(graph: Graph, trace: Trace) -> Graph:
    groups: dict[tuple[Any, ...], list[Projection]] = {}
    consumers = _consumers(graph)
    for node in graph.nodes:
        if found := _projection(graph, node, consumers, trace):
            groups.setdefault(found.family, []).append(found)
    merged = {group[0].matmul: group for group in groups.values() if len(group) > 1}
    return _rebuild(graph, merged, trace) if merged else graph


def _consumers(graph: Graph) -> dict[Value, list[Node]]:
    found: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.operands):
            found.setdefault(value, []).append(node)
    return found


def _projection(
    graph: Graph, node: Node, consumers: dict[Value, list[Node]], trace: Trace
) -> Projection | None:
    if node.op not in ("matmul", "dequant_matmul"):
        return None
    x, *weights = node.inputs
    dequantize = None
    if weights[0] is not None and _has_column_scales(weights[0]):
        dequantize = weights[0].node
        weights = list(dequantize.inputs)
    if x is None or x.is_constant or not all(v is None or v.is_constant for v in weights):
        return None
    if weights[0] is None or weights[0].rank != 2:
        return None
    readers = consumers.get(node.outputs[0], [])
    add = bias = None
    is_read_once = graph.uses[node.outputs[0]] == 1  # results of the graph count as readers
    if is_read_once and readers and readers[0].op == "add":
        other = [v for v in readers[0].operands if v is not node.outputs[0]]
        vector = constant_value(other[0]) if len(other) == 1 else None
        if vector is not None and vector.shape == node.outputs[0].shape[-1:]:
            add, bias = readers[0], other[0]
    result = (add or node).outputs[0]
    if any(is_elementwise(r) or r.op == "quantize" for r in consumers.get(result, [])):
        trace.refused(
            "merge-projections", node.name, "it has an activation or a quantize as its epilogue"
        )
        return None
    return Projection(node, tuple(weights), dequantize, add, bias)


def _has_column_scales(weight: Value) -> bool:
    """Whether a weight is dequantized with a scale per column."""
    axis = weight.node.attrs.get("axis")
    if weight.node.op != "dequantize" or weight.rank != 2 or axis is None:
        return False
    return normalize_axis(axis, 2) == 1 and not weight.node.attrs.get("block")


def _rebuild(graph: Graph, merged: dict[Node, list[Projection]], trace: Trace) -> Graph:
    replaced: dict[Value, Value] = {}
    nodes: list[Node] = []
    names = {name for node in graph.nodes for name in node.names}
    for node in graph.nodes:
        if group := merged.get(node):
            made = _merged(group, replaced, names)
            nodes += made
            for part, projection in zip(made[-1].outputs, group, strict=True):
                replaced[projection.result] = part
                replaced.setdefault(
                    projection.matmul.outputs[0], part
                )  # the add was its only reader
            trace.fired("merge-projections", node.name, [p.result.name for p in group])
        if any(value in replaced for value in node.outputs):
            continue
        new = renewed(node, replaced)
        nodes.append(new)
        if new is not node:
            replaced.update(zip(node.outputs, new.outputs, strict=True))
    return prune(rebuilt(graph, nodes, replaced))


def _merged(group: list[Projection], replaced: dict[Value, Value], names: set[str]) -> list[Node]:
    """The constants, product, sum and split that replace the group."""
    first = group[0].matmul
    b = Builder()
    b.loc = first.loc
    stem = f"{first.name}.merged"
    while any(name.startswith(stem) for name in names):
        stem += "_"
    x = renewed(first, replaced).inputs[0]
    weights: list[Value | None] = []
    for place, value in enumerate(group[0].weights):
        if value is None:
            weights.append(None)
            continue
        arrays = [_array(p.weights[place]) for p in group]
        joined = np.concatenate(arrays, axis=-1 if first.op == "matmul" else 0)
        weights.append(b.constant(joined, name=f"{stem}.{_NAMES[place]}"))
    if node := group[0].dequantize:
        weights = list(b.node("dequantize", weights, dict(node.attrs), [f"{stem}.real"]).outputs)
    y = b.node(first.op, [x, *weights], dict(first.attrs), [stem]).outputs[0]
    if any(p.bias is not None for p in group):
        vectors = [
            np.zeros(p.width, y.dtype.numpy) if p.bias is None else _array(p.bias) for p in group
        ]
        y = b.add(y, b.constant(np.concatenate(vectors), name=f"{stem}.bias"), name=f"{stem}.sum")
    b.node(
        "split",
        [y],
        {"axis": y.rank - 1, "sizes": [p.width for p in group]},
        [p.result.name for p in group],
    )
    return b.nodes


def _array(value: Value | None) -> Array:
    found = constant_value(value)
    assert found is not None
    return found
