"""The graph builder.

    b = Builder("mlp")
    x = b.input("x", "f32[batch, 784]")
    y = b.relu(b.matmul(x, b.parameter("w", w)))
    graph = b.build(logits=y)

Every op of the registry is a method; a name that is a Python keyword takes a trailing underscore
(`b.and_`, `b.if_`). Python numbers and numpy arrays among the operands become constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, GraphError, InferenceError
from bitwright.ir.dim import RESERVED, UNKNOWN, symbol
from bitwright.ir.dtype import DType, bool_, dtype
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.parser import parse_type
from bitwright.ir.types import OpaqueType, TensorType, ValueType
from bitwright.ops.core.opdef import OpDef
from bitwright.ops.core.registry import get

Operand = Value | np.ndarray | float | int | bool | None


class Builder:
    def __init__(self, name: str = "graph", parent: Builder | None = None) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.outputs: dict[str, Value] = {}
        self.updates: list[tuple[Value, Value]] = []
        self.meta: dict[str, str] = {}
        self.loc = ""
        self._names: dict[str, int] = {}
        self._symbols: dict[str, int] = parent._symbols if parent else {}

    @classmethod
    def of(cls, graph: Graph) -> Builder:
        """A builder that continues a graph: its nodes, outputs, updates and names."""
        b = cls(graph.name)
        b.outputs, b.updates = dict(graph.outputs), list(graph.updates)
        b.meta = dict(graph.meta)
        for node in graph.nodes:
            b.append(node)
        symbols = (s.name for _, node in graph.walk() for t in node.types for s in t.symbols)
        b.reserve_symbols(symbols)
        return b

    # names

    def fresh_name(self, hint: str) -> str:
        """`hint`, or `hint_1`, `hint_2`, … if it is taken."""
        if hint not in self._names:
            self._names[hint] = 0
            return hint
        while True:
            self._names[hint] += 1
            name = f"{hint}_{self._names[hint]}"
            if name not in self._names:
                self._names[name] = 0
                return name

    def _fresh_symbol(self) -> str:
        while True:
            self._symbols["u"] = self._symbols.get("u", -1) + 1
            name = f"u{self._symbols['u']}"
            if name not in RESERVED:  # u8 is an element type
                return name

    def reserve_symbols(self, names: Iterable[str]) -> None:
        """Reserve `u0`, `u1`, … of an existing graph, so that new symbols differ."""
        taken = [int(name[1:]) for name in names if name[0] == "u" and name[1:].isdigit()]
        if taken:
            self._symbols["u"] = max(self._symbols.get("u", -1), *taken)

    @contextmanager
    def at(self, loc: str) -> Iterator[None]:
        """Nodes made inside get this source location."""
        before, self.loc = self.loc, loc
        try:
            yield
        finally:
            self.loc = before

    # boundary

    def input(self, name: str, type_: str | ValueType) -> Value:
        return self._boundary("input", name, _as_type(type_), {})

    def parameter(
        self,
        name: str,
        value: Any = None,
        type_: str | ValueType | None = None,
        trainable: bool = True,
    ) -> Value:
        return self._valued("parameter", name, value, type_, {"trainable": trainable})

    def state(self, name: str, value: Any = None, type_: str | ValueType | None = None) -> Value:
        return self._valued("state", name, value, type_, {})

    def constant(
        self, value: Any, element: str | DType | None = None, name: str = "const"
    ) -> Value:
        array = np.asarray(value)
        if element is not None and array.dtype != dtype(element).numpy:
            array = array.astype(dtype(element).numpy)
        return self._valued("constant", self.fresh_name(name), array, None, {}, unique=False)

    def _valued(
        self,
        op: str,
        name: str,
        value: Any,
        type_: str | ValueType | None,
        attrs: dict[str, Any],
        unique: bool = True,
    ) -> Value:
        if value is not None:
            array = np.asarray(value)
            attrs = {"value": array, **attrs}
            if type_ is None:
                type_ = TensorType(dtype(array.dtype), array.shape)
        if type_ is None:
            raise GraphError(f"{op} {name!r} has neither a value nor a type")
        return self._boundary(op, name, _as_type(type_), attrs, unique)

    def _boundary(
        self, op: str, name: str, type_: ValueType, attrs: Mapping[str, Any], unique: bool = True
    ) -> Value:
        if unique and name in self._names:
            raise GraphError(f"the name {name!r} is taken already", where=f"{op} of {self.name!r}")
        self._names.setdefault(name, 0)
        return self.append(Node(op, (), attrs, (type_,), (name,), self.loc)).outputs[0]

    # nodes

    def append(self, node: Node) -> Node:
        self.nodes.append(node)
        for name in node.names:
            self._names.setdefault(name, 0)
        return node

    def op(
        self,
        op: str,
        *operands: Operand,
        name: str | None = None,
        outputs: Iterable[str] | None = None,
        **attrs: Any,
    ) -> Any:
        """Append a node and return its value, or a tuple if it has several results."""
        node = self.node(op, operands, attrs, [name] if name else list(outputs or ()))
        return node.outputs[0] if len(node.outputs) == 1 else node.outputs

    def node(
        self, op: str, operands: Iterable[Operand], attrs: Mapping[str, Any], names: list[str]
    ) -> Node:
        opdef = get(op)
        inputs = self._as_values(list(operands))
        try:
            normal, types = infer_types(opdef, inputs, attrs)
        except BitwrightError as error:
            where = f"{op}({', '.join('none' if v is None else repr(v) for v in inputs)})"
            if self.loc:
                where += f" (from {self.loc})"
            raise InferenceError(str(error), where=where) from None
        types = tuple(self._name_unknown(t) for t in types)
        names = [self.fresh_name(n) for n in names]
        names += [
            self.fresh_name(op if len(types) == 1 else f"{op}.{i}")
            for i in range(len(names), len(types))
        ]
        return self.append(Node(op, inputs, normal, types, tuple(names[: len(types)]), self.loc))

    def _as_values(self, operands: list[Operand]) -> tuple[Value | None, ...]:
        while operands and operands[-1] is None:
            operands.pop()
        values = [v for v in operands if isinstance(v, Value)]
        return tuple(
            v if v is None or isinstance(v, Value) else self._scalar(v, values) for v in operands
        )

    def _scalar(self, value: Any, others: list[Value]) -> Value:
        """A constant; a Python number takes the type of the first operand that can hold it."""
        if isinstance(value, (np.ndarray, np.generic)):
            return self.constant(value)
        elements = [v.dtype for v in others if isinstance(v.type, TensorType)]
        if not isinstance(value, bool):
            elements = [e for e in elements if e != bool_]
        return self.constant(value, elements[0] if elements else None)

    def _name_unknown(self, type_: ValueType) -> ValueType:
        if isinstance(type_, TensorType) and any(size is UNKNOWN for size in type_.shape):
            return type_.with_shape(
                symbol(self._fresh_symbol()) if size is UNKNOWN else size for size in type_.shape
            )
        return type_

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        op = get(name.removesuffix("_")).name
        return lambda *operands, **attrs: self.op(op, *operands, **attrs)

    # results

    def output(self, name: str, value: Value) -> None:
        if name in self.outputs:
            raise GraphError(f"two outputs are named {name!r}", where=f"graph {self.name!r}")
        self.outputs[name] = value

    def update(self, state: Value, value: Value) -> None:
        """Replace `state` by `value` when a run ends."""
        self.updates.append((state, value))

    def build(self, *outputs: Value, **named: Value) -> Graph:
        for value in outputs:
            self.output(value.name, value)
        for name, value in named.items():
            self.output(name, value)
        return Graph(
            self.name,
            tuple(self.nodes),
            tuple(self.outputs.items()),
            tuple(self.updates),
            self.meta,
        )


def _as_type(type_: str | ValueType) -> ValueType:
    return parse_type(type_) if isinstance(type_, str) else type_


def infer_types(
    opdef: OpDef, inputs: tuple[Value | None, ...], attrs: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[ValueType, ...]]:
    """Normal attributes and result types of an op on these operands."""
    opdef.check_operands([v is not None for v in inputs])
    normal = opdef.normal_attrs(attrs)
    types = [None if v is None else v.type for v in inputs]
    fixed = [operand for operand in opdef.operands if not operand.variadic]
    types += [None] * (len(fixed) - len(types))
    try:
        result = opdef.infer(*types, **opdef.call_attrs(normal))
    except AttributeError:  # an opaque value has no dtype and shape
        opaque = next((v for v in inputs if v is not None and isinstance(v.type, OpaqueType)), None)
        if opaque is None:
            raise
        raise InferenceError("takes tensors only", found=repr(opaque)) from None
    return normal, result if isinstance(result, tuple) else (result,)
