"""Casts of parameters, constants, inputs and outputs move into their types.

    parameter p: f32 ─ cast bf16 ─ …      ->      parameter p: bf16 ─ …
    input x: f32 ─ cast bf16 ─ …          ->      input x: bf16 ─ …            (if `io`)
    … ─ y: bf16 ─ cast f32 ─ output       ->      … ─ y: bf16 ─ output         (if `io`)

A value changes its type only if every reader casts it to the same half type. A parameter that has a
reader in full precision keeps its type and its casts.
"""

from __future__ import annotations

from bitwright.ir.dtype import DType, f32
from bitwright.ir.edit import map_bodies, prune, rebuilt, renewed
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.math.cast import cast
from bitwright.passes.precision.plan import HALVES, is_changeable


def settle_casts(graph: Graph, io: bool = False) -> Graph:
    """The graph with parameters and constants in the type of their readers; with `io`, inputs and
    outputs too."""
    graph = map_bodies(graph, lambda body: settle_casts(body))
    ops = ("parameter", "constant", "input") if io else ("parameter", "constant")
    wanted = _wanted(graph, ops)
    replaced: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        new = renewed(node, replaced)
        element = wanted.get(node.outputs[0]) if node.outputs else None
        if element is not None:
            new = _converted(node, element)
        elif node.op == "cast" and (x := new.inputs[0]) is not None and x.type == node.types[0]:
            replaced[node.outputs[0]] = x
            continue
        nodes.append(new)
        if new is not node:
            replaced.update(zip(node.outputs, new.outputs, strict=True))
    made = rebuilt(graph, nodes, replaced)
    if io:
        made = made.with_(outputs=tuple((name, _before_cast(v)) for name, v in made.outputs))
    return prune(made)


def _wanted(graph: Graph, ops: tuple[str, ...]) -> dict[Value, DType]:
    """The half type that all readers of a value cast it to."""
    readers: dict[Value, set[DType | None]] = {}
    for node in graph.nodes:
        for value in node.operands:
            to = node.attrs["to"] if node.op == "cast" else None
            readers.setdefault(value, set()).add(to if to in HALVES else None)
    for value in graph.results:
        readers.setdefault(value, set()).add(None)
    found: dict[Value, DType] = {}
    for value, types in readers.items():
        type_ = next(iter(types)) if len(types) == 1 else None
        if type_ is not None and value.node.op in ops and is_changeable(value):
            found[value] = type_
    return found


def _converted(node: Node, element: DType) -> Node:
    attrs = dict(node.attrs)
    if attrs.get("value") is not None:
        attrs["value"] = cast(attrs["value"], element)
    return node.with_(types=(node.outputs[0].tensor.with_dtype(element),), attrs=attrs)


def _before_cast(value: Value) -> Value:
    source = value.node.inputs[0] if value.node.op == "cast" else None
    is_back = source is not None and is_changeable(source) and source.dtype in HALVES
    return source if source is not None and is_back and value.dtype == f32 else value
