"""Graphs and name scopes during import.

A `Frame` is one graph under construction: the model's, or the body of an if / loop / scan. A
`Scope` is one set of ONNX names inside a frame: the graph's own, or those of an inlined function. A
value that a body captures becomes an explicit input, recorded in `Frame.captures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx import AttributeProto, TypeProto

from bitwright.frontend.builder import TypedBuilder
from bitwright.ir import Graph, Node, Size, Value, ValueType
from bitwright.ir.dim import Symbol
from bitwright.ops.core.builder import Builder

OnCapture = Callable[["Frame", Value], "Value | None"]


@dataclass(eq=False)
class Frame:
    b: TypedBuilder
    parent: Frame | None = None
    depth: int = 0
    inputs: list[Value] = field(default_factory=list)
    captures: dict[Value, Value] = field(default_factory=dict)
    names: dict[Value, str] = field(default_factory=dict)
    """The names that values have in the file; `finish` applies them."""
    symbols: set[Symbol] = field(default_factory=set)
    ones: dict[Size, bool] = field(default_factory=dict)
    """Whether a symbolic size is 1, for sizes where the cases of a fork determine it."""
    dequantized: dict[tuple[Value, ...], Value] = field(default_factory=dict)
    """Dequantized rows by quantized values, scales and zero points; products share them."""
    quantized_rows: dict[tuple[Value, str], tuple[Value, ...]] = field(default_factory=dict)
    """Quantized values by float value and quantization parameters; products share them."""

    def is_one(self, size: Size) -> bool | None:
        """Whether a size is 1; None if that is not known."""
        if isinstance(size, int) or size in self.ones:
            return self.ones.get(size, size == 1)
        return self.parent.is_one(size) if self.parent else None

    def add_input(self, value: Value) -> Value:
        self.inputs.append(value)
        self.symbols |= value.type.symbols
        return value

    @property
    def known_symbols(self) -> set[Symbol]:
        """The symbols that attributes may use: the inputs bind them."""
        return self.symbols | (self.parent.known_symbols if self.parent else set())

    def capture(self, outer: Value) -> Value:
        if outer not in self.captures:
            self.captures[outer] = self.add_input(self.leaf("input", outer.name, outer.type))
        return self.captures[outer]

    def leaf(self, op: str, name: str, type_: ValueType, **attrs: Any) -> Value:
        """A node without operands, under this name or a similar unused one."""
        node = Node(op, (), attrs, (type_,), (self.b.fresh_name(name),), self.b.loc)
        return self.b.append(node).outputs[0]

    def claim(self, value: Value, name: str) -> None:
        """Name a computed value, unless it has a name already."""
        if value not in self.names and value.node.op != "input":
            self.names[value] = name

    def finish(
        self,
        outputs: Iterable[tuple[str, Value]],
        inputs: Sequence[Value] | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> Graph:
        """The graph: inputs first, without dead nodes, with the names of the file."""
        outputs = list(outputs)
        first = [value.node for value in (self.inputs if inputs is None else inputs)]
        live = _live_nodes(self.b.nodes, [value for _, value in outputs])
        nodes = [*first, *(n for n in self.b.nodes if n in live and n.op != "input")]
        return _renamed(self.b.name, nodes, outputs, self.names, meta or {})


def live_inputs(frame: Frame, outputs: Iterable[Value]) -> set[Value]:
    """The inputs of a frame that its outputs depend on."""
    live = _live_nodes(frame.b.nodes, outputs)
    return {value for value in frame.inputs if value.node in live}


def _live_nodes(nodes: Sequence[Node], results: Iterable[Value]) -> set[Node]:
    live = {value.node for value in results}
    for node in reversed(nodes):
        if node in live:
            live.update(value.node for value in node.operands)
    return live


def _renamed(
    name: str,
    nodes: Sequence[Node],
    outputs: list[tuple[str, Value]],
    names: Mapping[Value, str],
    meta: Mapping[str, str],
) -> Graph:
    taken = {v.name for n in nodes if n.op == "input" for v in n.outputs}
    final: dict[Value, str] = {}
    for value in (v for n in nodes for v in n.outputs if n.op != "input"):
        if value in names and names[value] not in taken:
            final[value] = names[value]
            taken.add(names[value])
    fresh = Builder(name)
    for used in taken:
        fresh.fresh_name(used)
    moved: dict[Value, Value] = {}
    for node in nodes:
        labels = tuple(
            v.name if node.op == "input" else final.get(v) or fresh.fresh_name(v.name)
            for v in node.outputs
        )
        operands = tuple(None if v is None else moved[v] for v in node.inputs)
        again = node.with_(inputs=operands, names=labels)
        moved.update(zip(node.outputs, again.outputs, strict=True))
        fresh.nodes.append(again)
    results = tuple((label, moved[value]) for label, value in outputs)
    return Graph(name, tuple(fresh.nodes), results, (), dict(meta))


@dataclass(eq=False)
class Scope:
    frame: Frame
    opsets: Mapping[str, int]
    outer: Scope | None = None
    """The enclosing scope of a body, where other names are looked up; a function has none."""
    values: dict[str, Value] = field(default_factory=dict)
    pending: dict[str, Callable[[], Value]] = field(default_factory=dict)
    """Initializers that no node has read yet."""
    bound: Mapping[str, AttributeProto] = field(default_factory=dict)
    declared: Mapping[str, TypeProto] = field(default_factory=dict)
    calls: tuple[tuple[str, str, str], ...] = ()
    """The functions that are being inlined, outermost first."""

    def find(self, name: str, on_capture: OnCapture) -> Value | None:
        """The value with this name; one from an enclosing graph is captured."""
        if name in self.values:
            return self.values[name]
        if name in self.pending:
            self.values[name] = self.pending.pop(name)()
            return self.values[name]
        outer = self.outer.find(name, on_capture) if self.outer else None
        if outer is None or (self.outer and self.outer.frame is self.frame):
            return outer
        self.values[name] = on_capture(self.frame, outer) or self.frame.capture(outer)
        return self.values[name]

    def defines(self, name: str) -> bool:
        return name in self.values or name in self.pending
