"""Structural rules every graph obeys at every stage; what an op demands is checked in `ops.check`.

Values are defined before they are read, names are unique, constants fit their types, updates belong
to states, and every symbolic size is bound by an input, a state, an operand or the node itself.
"""

from __future__ import annotations

from bitwright.errors import GraphError
from bitwright.ir.dim import UNKNOWN, Symbol
from bitwright.ir.dtype import dtype
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.printer import attr_symbols
from bitwright.ir.types import TensorType, compatible


def place(graph: Graph, node: Node) -> str:
    """How an error names a node: graph, op, value and source location."""
    source = f" (from {node.loc})" if node.loc else ""
    return f"graph {graph.name!r}, {node.op} %{node.name}{source}"


def verify_structure(graph: Graph, outer: frozenset[Symbol] = frozenset()) -> None:
    """Raise a `GraphError` that names node, operand, expected and found."""
    known = outer | graph.input_symbols
    defined: set[Value] = set()
    names: set[str] = set()
    for node in graph.nodes:
        where = place(graph, node)
        for position, operand in enumerate(node.inputs):
            if operand is not None and operand not in defined:
                raise GraphError(
                    f"operand {position} ({operand}) is not defined before this node",
                    where=where,
                    hint="Nodes must stand in topological order, without a cycle, in one graph.",
                )
        for value in node.outputs:
            if value.name in names:
                raise GraphError(f"the name {value} is taken already", where=where)
            names.add(value.name)
            defined.add(value)
            if any(size is UNKNOWN for size in getattr(value.type, "shape", ())):
                raise GraphError(f"{value} has an unnamed size", where=where, found=value.type)
        _check_boundary(node, where)
        _check_symbols(node, known, where)
        for body in node.bodies.values():
            symbols = frozenset(s for v in node.operands for s in v.type.symbols)
            verify_structure(body, known | symbols)
    _check_results(graph, defined)


def _check_boundary(node: Node, where: str) -> None:
    if not node.is_boundary:
        return
    if node.inputs or len(node.types) != 1:
        raise GraphError("takes no operand and gives one value", where=where)
    value = node.attrs.get("value")
    if value is None:
        if node.op == "constant":
            raise GraphError("has no value", where=where)
        return
    found = TensorType(dtype(value.dtype), tuple(value.shape))
    if not compatible(found, node.types[0]):
        raise GraphError("the value does not fit", where=where, expected=node.types[0], found=found)


def _check_symbols(node: Node, known: frozenset[Symbol], where: str) -> None:
    used = frozenset().union(*(attr_symbols(v) for v in node.attrs.values()))
    available = known.union(*(v.type.symbols for v in node.operands))
    if missing := used - available:
        raise GraphError(
            f"size {min(missing).name!r} in its attributes is bound by no input and no operand",
            where=where,
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
