"""The graph: immutable nodes in topological order, and the values they produce.

Boundary values are nodes too: `input`, `parameter`, `constant` and `state`. A parameter is named
and trainable, and only inference pipelines fold it. A state is named and lives across runs:
`Graph.updates` names the value that replaces it when a run ends. Bodies of if / loop / scan are
graphs in attributes; outer values that they read are operands of the node.
"""

from __future__ import annotations

import difflib
import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ExportError, GraphError
from bitwright.ir.dim import Dim, Symbol
from bitwright.ir.dtype import DType, string
from bitwright.ir.payload import blob_key
from bitwright.ir.types import TensorType, ValueType

# Formats of `Graph.save`; the module of a format is imported on first use.
WRITERS = {
    ".onnx": "bitwright.export.onnx:export_onnx",
    ".bw": "bitwright.ir.container:save",
    ".txt": "bitwright.ir.container:save_text",
}
_NO_SYMBOLS: frozenset[Symbol] = frozenset()
BOUNDARY = ("input", "parameter", "constant", "state")


class Value:
    """One result of a node."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int) -> None:
        self.node, self.index = node, index

    @property
    def type(self) -> ValueType:
        return self.node.types[self.index]

    @property
    def tensor(self) -> TensorType:
        """The type as a `TensorType`; a `GraphError` for an opaque value."""
        type_ = self.type
        if not isinstance(type_, TensorType):
            raise GraphError(f"{self} is a {type_}, not a tensor")
        return type_

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.tensor.shape

    @property
    def rank(self) -> int:
        return len(self.tensor.shape)

    @property
    def name(self) -> str:
        return self.node.names[self.index]

    @property
    def is_constant(self) -> bool:
        return self.node.op == "constant"

    def __str__(self) -> str:
        return f"%{self.name}"

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


@dataclass(frozen=True, eq=False)
class Node:
    op: str
    inputs: tuple[Value | None, ...]
    attrs: Mapping[str, Any]
    types: tuple[ValueType, ...]
    names: tuple[str, ...]
    loc: str = ""
    outputs: tuple[Value, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.types) != len(self.names):
            raise GraphError(
                f"node {self.op} has {len(self.types)} types and {len(self.names)} names"
            )
        object.__setattr__(self, "outputs", tuple([Value(self, i) for i in range(len(self.types))]))

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.op

    @property
    def is_boundary(self) -> bool:
        return self.op in BOUNDARY

    @property
    def operands(self) -> Iterator[Value]:
        """The inputs that are present."""
        return (value for value in self.inputs if value is not None)

    @cached_property
    def bodies(self) -> Mapping[str, Graph]:
        return {key: value for key, value in self.attrs.items() if isinstance(value, Graph)}

    @cached_property
    def attr_symbols(self) -> frozenset[Symbol]:
        """The symbols of sizes in the attributes, without those of bodies."""
        return symbols_in(tuple(self.attrs.values()))

    @cached_property
    def attrs_text(self) -> str:
        """A key that is equal for equal attributes; large arrays compare by memory address."""
        return repr(sorted([(name, _comparable(value)) for name, value in self.attrs.items()]))

    def with_(self, **changes: Any) -> Node:
        """A copy with these changes; values cached for unchanged attributes are kept."""
        if not changes.keys() <= _GIVEN:
            raise TypeError(f"a node has no {min(changes.keys() - _GIVEN)!r}")
        made = object.__new__(Node)
        made.__dict__.update(self.__dict__, **changes)
        if "attrs" in changes:
            for name in _OF_ATTRS:
                made.__dict__.pop(name, None)
        made.__post_init__()
        return made

    def __str__(self) -> str:
        return f"{self.op} %{self.name}"


_GIVEN = {"op", "inputs", "attrs", "types", "names", "loc"}
_OF_ATTRS = ("bodies", "attr_symbols", "attrs_text")
HASHED_BYTES = 1 << 16  # larger arrays are equal only if they share their memory


def _comparable(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == string.numpy:
        return tuple(map(str, value.reshape(-1)))
    if value.nbytes <= HASHED_BYTES:
        return blob_key(value)
    return value.__array_interface__["data"], value.shape, value.strides, str(value.dtype)


@dataclass(frozen=True, eq=False)
class Graph:
    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, Value], ...]
    updates: tuple[tuple[Value, Value], ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)

    def _boundary(self, op: str) -> tuple[Value, ...]:
        return tuple(node.outputs[0] for node in self.nodes if node.op == op)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        return self._boundary("input")

    @cached_property
    def parameters(self) -> tuple[Value, ...]:
        return self._boundary("parameter")

    @cached_property
    def constants(self) -> tuple[Value, ...]:
        return self._boundary("constant")

    @cached_property
    def states(self) -> tuple[Value, ...]:
        return self._boundary("state")

    @cached_property
    def results(self) -> tuple[Value, ...]:
        """The values that a run must keep: outputs, then state updates."""
        return (*(value for _, value in self.outputs), *(value for _, value in self.updates))

    @cached_property
    def values(self) -> Mapping[str, Value]:
        return {value.name: value for node in self.nodes for value in node.outputs}

    @cached_property
    def uses(self) -> Counter[Value]:
        """How many times each value is read, results included."""
        counts = Counter([v for node in self.nodes for v in node.inputs if v is not None])
        counts.update(self.results)
        return counts

    @cached_property
    def input_symbols(self) -> frozenset[Symbol]:
        """The symbols of sizes that inputs and states bind."""
        return frozenset().union(*(v.type.symbols for v in (*self.inputs, *self.states)))

    def value(self, name: str) -> Value:
        if name not in self.values:
            raise GraphError(
                f"graph {self.name!r} has no value {name!r}", hint=nearest(name, self.values)
            )
        return self.values[name]

    def walk(self) -> Iterator[tuple[Graph, Node]]:
        """Every node with its graph, nodes of bodies included."""
        stack = [self]
        while stack:
            graph = stack.pop()
            for node in graph.nodes:
                yield graph, node
                stack.extend(node.bodies.values())

    def with_(self, **changes: Any) -> Graph:
        return replace(self, **changes)

    def save(self, path: str | Path, **options: Any) -> None:
        """Write the graph in the format of the suffix: .onnx, .bw (bytes) or .txt."""
        writer = WRITERS.get(Path(path).suffix)
        if writer is None:
            raise ExportError(
                f"no format is known for {Path(path).name!r}", expected=" or ".join(WRITERS)
            )
        module, function = writer.split(":")
        getattr(importlib.import_module(module), function)(self, path, **options)

    def __str__(self) -> str:
        from bitwright.ir.printer import to_text  # it imports this module

        return to_text(self, data=False).rstrip("\n")

    def __repr__(self) -> str:
        return f"<graph {self.name!r}: {self.interface_text}, {len(self.nodes)} nodes>"

    @property
    def interface_text(self) -> str:
        """Inputs and outputs in one line, a few of each."""
        sides = ([(v.name, v) for v in self.inputs], self.outputs)
        return " -> ".join(_in_one_line(side) for side in sides)

    def _repr_html_(self) -> str:
        from bitwright.ir.html import table

        ops = Counter(node.op for _, node in self.walk() if not node.is_boundary)
        weights = [v for v in (*self.parameters, *self.constants) if "value" in v.node.attrs]
        nbytes = sum(v.dtype.nbytes(v.node.attrs["value"].size) for v in weights)
        facts = ", ".join(f"{op} {count}" for op, count in ops.most_common())
        return table(
            f"graph {self.name}",
            ("", "name", "type"),
            [
                *(("input", v.name, v.type) for v in self.inputs),
                *(("state", v.name, v.type) for v in self.states),
                *(("output", name, v.type) for name, v in self.outputs),
            ],
            [f"weights: {nbytes / 1e6:.2f} MB", f"ops: {facts or 'none'}"],
        )

    def __reduce__(self) -> Any:
        from bitwright.ir import container  # it imports this module

        return container.from_bytes, (container.to_bytes(self),)


def _in_one_line(values: Iterable[tuple[str, Value]], most: int = 4) -> str:
    found = [f"{name} {value.type}" for name, value in values]
    more = [f"… {len(found) - most} more"] if len(found) > most else []
    return ", ".join([*found[:most], *more]) or "nothing"


def symbols_in(item: Any) -> frozenset[Symbol]:
    """The symbols of an attribute that is a size or a (nested) sequence of sizes."""
    if isinstance(item, Dim):
        return item.symbols
    if isinstance(item, (tuple, list)):
        found = [symbols_in(part) for part in item if isinstance(part, (Dim, tuple, list))]
        return _NO_SYMBOLS.union(*found)
    return _NO_SYMBOLS


def constant_value(value: Value | None) -> np.ndarray | None:
    """The array of a constant, or None for any other value."""
    return value.node.attrs["value"] if value is not None and value.is_constant else None


def sorted_nodes(results: Iterable[Value], keep: Iterable[Node] = ()) -> tuple[Node, ...]:
    """The nodes that `results` need, operands first; nodes in `keep` come first and always stay."""
    order: dict[Node, None] = dict.fromkeys(keep)
    for result in results:
        if result.node in order:
            continue
        stack: list[tuple[Node, Iterator[Value]]] = [(result.node, result.node.operands)]
        open_nodes = {result.node}
        while stack:
            node, rest = stack[-1]
            operand = next(rest, None)
            if operand is None:
                stack.pop()
                order[node] = None
                open_nodes.discard(node)
            elif operand.node in open_nodes:
                raise GraphError(f"a cycle runs through {operand.node}", where=operand.node.loc)
            elif operand.node not in order:
                open_nodes.add(operand.node)
                stack.append((operand.node, operand.node.operands))
    return tuple(order)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint with the closest existing names."""
    close = difflib.get_close_matches(name, list(names), 3, 0.5)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
