"""Size checks: shape constraints that symbolic inference assumed, checked with a run's sizes.

Inference accepts a symbol against a constant (n against 4: n must be 4, or 1 to broadcast), which
only a run can verify. Kernels would read out of bounds otherwise, so before the first run with new
sizes, every node with such an assumption is inferred again with concrete sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bitwright.errors import BitwrightError, RunError
from bitwright.ir.dim import Dim, evaluate
from bitwright.ir.graph import Graph, Node, Value, symbols_in
from bitwright.ir.naming import take_name
from bitwright.ir.parser import parse
from bitwright.ir.printer import to_text
from bitwright.ir.size_list import SizeList
from bitwright.ir.types import TensorType, ValueType
from bitwright.ir.verify import place
from bitwright.ops.core.opdef import Kind, OpDef
from bitwright.ops.core.registry import get

# Ops of one operand that accept any size.
_UNCHECKED = frozenset(
    {"identity", "optimization_barrier", "transpose", "cast", "softmax", "log_softmax"}
    | {"shape_of", "sizes"}
    | {f"reduce_{kind}" for kind in ("max", "min", "mean", "sum", "prod", "l1", "l2")}
)


@dataclass(frozen=True)
class Check:
    """A node to check, and its location for errors."""

    node: Node
    where: str

    @cached_property
    def opdef(self) -> OpDef:
        return get(self.node.op)

    @cached_property
    def types(self) -> list[ValueType | None]:
        """The operand types of the inference rule; None for absent operands."""
        given = [None if value is None else value.type for value in self.node.inputs]
        fixed = sum(not operand.variadic for operand in self.opdef.operands)
        return given + [None] * (fixed - len(given))

    @cached_property
    def attrs(self) -> dict[str, Any]:
        return self.opdef.call_attrs(self.node.attrs)

    @cached_property
    def sized_attrs(self) -> list[str]:
        """The names of attributes that contain symbolic sizes."""
        return [name for name, value in self.attrs.items() if symbols_in(value)]


class SizeChecks:
    """The size checks of a graph."""

    def __init__(self, checks: Iterable[Check]) -> None:
        """Equivalent checks are deduplicated."""
        found: dict[Any, Check] = {}
        for check in checks:
            found.setdefault(_check_key(check.node), check)
        self.checks = tuple(found.values())

    @classmethod
    def of(cls, graph: Graph, without: Iterable[Node] = ()) -> SizeChecks:
        skipped = set(without)
        return cls(
            Check(inner, place(graph, node))
            for node in graph.nodes
            if not node.is_boundary and node not in skipped
            for inner in _members(node)
            if _needs_check(inner)
        )

    @cached_property
    def _types(self) -> _TypeList:
        return _TypeList()

    @cached_property
    def _numbered(self) -> list[tuple[Check, list[int], list[int]]]:
        """Checks with the numbers of the types of their operands and results."""
        add = self._types.add
        return [
            (check, [add(t) for t in check.types], [add(v.type) for v in check.node.outputs])
            for check in self.checks
        ]

    def verify(self, bindings: Mapping[str, int]) -> None:
        """Raise a `RunError` if these sizes are inconsistent."""
        numbered, checker = self._numbered, _Checker(bindings)
        types = self._types.concrete(bindings)
        for check, operands, results in numbered:
            checker.infer(check, [types[n] for n in operands], [types[n] for n in results])

    def ready(self, bindings: Mapping[str, int], seen: set[Node]) -> None:
        """`verify` for nodes whose sizes are all bound and that are not in `seen`."""
        known, checker = bindings.keys(), _Checker(bindings)
        for check in self.checks:
            if check.node not in seen and all(s.name in known for s in _symbols(check.node)):
                seen.add(check.node)
                checker.check(check)


def checks_text(checks: SizeChecks) -> tuple[str, list[str]]:
    """The text of a graph of the checked nodes, and the location of each."""
    nodes: list[Node] = []
    names: set[str] = set()

    def leaf(value: Value) -> Value:
        nodes.append(Node("input", (), {}, (value.type,), (take_name("x", names),)))
        return nodes[-1].outputs[0]

    for check in checks.checks:
        inputs = tuple(None if value is None else leaf(value) for value in check.node.inputs)
        outputs = tuple(take_name(name, names) for name in check.node.names)
        nodes.append(check.node.with_(inputs=inputs, names=outputs))
    return to_text(Graph("sizes", tuple(nodes), ())), [check.where for check in checks.checks]


def checks_from_text(text: str, locations: Sequence[str]) -> SizeChecks:
    nodes = (node for node in parse(text).nodes if not node.is_boundary)
    return SizeChecks(Check(node, where) for node, where in zip(nodes, locations, strict=True))


class _TypeList:
    """Types that are made concrete together, each distinct type once."""

    def __init__(self) -> None:
        self._numbers: dict[ValueType | None, int] = {}
        self._sizes = SizeList()
        self._shapes: list[list[int] | None] = []
        """The numbers of the sizes of symbolic types; None for other types."""

    def add(self, type_: ValueType | None) -> int:
        """The number of a type."""
        if type_ not in self._numbers:
            self._numbers[type_] = len(self._numbers)
            shape = None
            if isinstance(type_, TensorType) and type_.symbols:
                shape = [self._sizes.add(size) for size in type_.shape]
            self._shapes.append(shape)
        return self._numbers[type_]

    def concrete(self, bindings: Mapping[str, int]) -> list[ValueType | None]:
        """The types, by their numbers, with the sizes that these values give."""
        sizes = self._sizes.values(bindings)
        return [
            TensorType(type_.dtype, tuple([sizes[n] for n in shape]))
            if shape is not None and isinstance(type_, TensorType)
            else type_
            for type_, shape in zip(self._numbers, self._shapes, strict=True)
        ]


class _Checker:
    """Infers nodes with one set of sizes; caches concrete types."""

    def __init__(self, bindings: Mapping[str, int]) -> None:
        self.bindings = bindings
        self._types: dict[ValueType, ValueType] = {}

    def check(self, check: Check) -> None:
        """Raise a `RunError` if the node's sizes are inconsistent."""
        types = [None if type_ is None else self._type(type_) for type_ in check.types]
        self.infer(check, types, [self._type(value.type) for value in check.node.outputs])

    def infer(
        self, check: Check, types: list[ValueType | None], expects: list[ValueType | None]
    ) -> None:
        """The same with concrete types of operands and results."""
        attrs = check.attrs
        if check.sized_attrs:
            attrs = attrs | {k: self._attr(attrs[k]) for k in check.sized_attrs}
        try:
            result = check.opdef.infer(*types, **attrs)
        except BitwrightError as error:
            raise RunError(str(error), where=check.where) from None
        found = result if isinstance(result, tuple) else (result,)
        for value, type_, expected in zip(check.node.outputs, found, expects, strict=True):
            if isinstance(type_, TensorType) and not _agree(expected, type_):
                raise RunError(
                    f"result {value} has another shape than inferred",
                    where=check.where,
                    expected=f"{value.type} with {dict(self.bindings)}",
                    found=type_,
                )

    def _type(self, type_: ValueType) -> ValueType:
        """The type with concrete sizes."""
        if not type_.symbols or not isinstance(type_, TensorType):
            return type_
        if type_ not in self._types:
            self._types[type_] = type_.with_shape(type_.concrete(self.bindings))
        return self._types[type_]

    def _attr(self, item: Any) -> Any:
        if isinstance(item, Dim):
            return evaluate(item, self.bindings)
        if isinstance(item, (tuple, list)):
            return tuple(self._attr(part) for part in item)
        return item


def _check_key(node: Node) -> Any:
    """A key that is equal for nodes whose checks are equivalent."""
    types = tuple(None if v is None else v.type for v in node.inputs)
    key = node.op, types, tuple(sorted(node.attrs.items())), node.types
    try:
        hash(key)
    except TypeError:  # an unhashable attribute, such as an array
        return node
    return key


def _members(node: Node) -> Iterable[Node]:
    if node.op != "fused":
        return (node,)
    return (inner for inner in node.attrs["body"].nodes if not inner.is_boundary)


def _symbols(node: Node) -> set[Any]:
    """The symbols of a node's types and of its attributes, such as the start of a slice."""
    types = [value.type for value in (*node.operands, *node.outputs)]
    found = {s for type_ in types if isinstance(type_, TensorType) for s in type_.symbols}
    return found.union(*map(symbols_in, node.attrs.values()))


def _needs_check(node: Node) -> bool:
    types = [value.type for value in (*node.operands, *node.outputs)]
    if node.op in _UNCHECKED or not _symbols(node):
        return False
    if any(not isinstance(type_, TensorType) for type_ in types):
        return False  # only interpreter fallbacks take it
    opdef = get(node.op)
    if any(attr.kind == "graph" for attr in opdef.attrs.values()):
        return False
    if opdef.kind is not Kind.ELEMENTWISE:
        return True
    shape = node.outputs[0].shape
    return any(
        size not in (1, whole)
        for value in node.operands
        for size, whole in zip(reversed(value.shape), reversed(shape), strict=False)
    )


def _agree(expected: ValueType | None, found: TensorType) -> bool:
    """Whether shapes are equal; a data-dependent size matches any."""
    if not isinstance(expected, TensorType) or len(expected.shape) != len(found.shape):
        return False
    return expected.shape == found.shape or all(
        isinstance(b, Dim) or a == b for a, b in zip(expected.shape, found.shape, strict=True)
    )
