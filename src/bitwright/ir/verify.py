"""Structural rules of graphs at every stage; `ops.core.check` adds the rules of each op.

Values are defined before they are read, names are unique, constants have their declared types,
updates belong to states, and every symbolic size is bound by an input, a state, an operand or the
node itself.
"""

from __future__ import annotations

from collections.abc import Container

from bitwright.errors import GraphError
from bitwright.ir.dim import UNKNOWN, Symbol
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType, compatible


def place(graph: Graph, node: Node) -> str:
    """The text that names a node in errors: graph, op, value and source location."""
    source = f" (from {node.loc})" if node.loc else ""
    return f"graph {graph.name!r}, {node.op} %{node.name}{source}"


def verify_structure(
    graph: Graph, outer: frozenset[Symbol] = frozenset(), settled: Container[Node] = ()
) -> None:
    """Raise a `GraphError` that names node, operand, expected and found.

    Nodes in `settled` passed before; only their position in the graph is checked.
    """
    known = outer | graph.input_symbols
    defined: set[Value] = set()
    names: set[str] = set()
    for node in graph.nodes:
        for operand in node.inputs:
            if operand is not None and operand not in defined:
                raise GraphError(
                    f"operand {node.inputs.index(operand)} ({operand}) is not defined before "
                    "this node",
                    where=place(graph, node),
                    hint="Nodes must stand in topological order, without a cycle, in one graph.",
                )
        for name in node.names:
            if name in names:
                raise GraphError(f"the name %{name} is taken already", where=place(graph, node))
            names.add(name)
        defined.update(node.outputs)
        if node not in settled:
            _check_node(graph, node, known)
        if node.bodies:
            symbols = frozenset(s for v in node.operands for s in v.type.symbols)
            for body in node.bodies.values():
                verify_structure(body, known | symbols, settled)
    _check_results(graph, defined)


def depends_on_graph(node: Node) -> bool:
    """Whether the validity of a node depends on its graph, because it refers to sizes."""
    return bool(node.bodies or node.attr_symbols)


def _check_node(graph: Graph, node: Node, known: frozenset[Symbol]) -> None:
    for value, type_ in zip(node.outputs, node.types, strict=True):
        if type_.symbols and isinstance(type_, TensorType) and UNKNOWN in type_.shape:
            raise GraphError(f"{value} has an unnamed size", where=place(graph, node), found=type_)
    if node.is_boundary:
        _check_boundary(graph, node)
    used = node.attr_symbols
    if used and (missing := used - known.union(*(v.type.symbols for v in node.operands))):
        raise GraphError(
            f"size {min(missing).name!r} in its attributes is bound by no input and no operand",
            where=place(graph, node),
        )


def _check_boundary(graph: Graph, node: Node) -> None:
    if node.inputs or len(node.types) != 1:
        raise GraphError("takes no operand and gives one value", where=place(graph, node))
    value = node.attrs.get("value")
    if value is None:
        if node.op == "constant":
            raise GraphError("has no value", where=place(graph, node))
        return
    found = TensorType(dtype(value.dtype), tuple(value.shape))
    if not compatible(found, node.types[0]):
        raise GraphError(
            "the value does not fit", where=place(graph, node), expected=node.types[0], found=found
        )


def _check_results(graph: Graph, defined: set[Value]) -> None:
    where = f"graph {graph.name!r}"
    names = [name for name, _ in graph.outputs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise GraphError(f"two outputs are named {twice!r}", where=where)
    for name, value in graph.outputs:
        if value not in defined:
            raise GraphError(f"output {name!r} ({value}) is not a value of the graph", where=where)
    for state, value in graph.updates:
        if state.node.op != "state" or state not in defined:
            raise GraphError(f"the update of {state} does not name a state", where=where)
        if value not in defined:
            raise GraphError(f"the update of {state} is not a value of the graph", where=where)
        if not compatible(state.type, value.type):
            raise GraphError(
                f"the update of {state} changes its type",
                where=where,
                expected=state.type,
                found=value.type,
            )
