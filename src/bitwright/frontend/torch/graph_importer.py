"""Imports the nodes of a traced program, in order, with a builder."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from bitwright.errors import BitwrightError, ImportModelError
from bitwright.frontend.builder import TypedBuilder
from bitwright.frontend.torch.context import Context
from bitwright.frontend.torch.locations import Problems, location_of, module_path, target_name
from bitwright.frontend.torch.registry import UnmappedError, all_mappings
from bitwright.frontend.torch.scalars import compute, function_name
from bitwright.frontend.torch.tensors import array_of, element_type
from bitwright.ir import Graph, TensorType, Value
from bitwright.ir.dim import UNKNOWN, Symbol
from bitwright.ir.dtype import DType, bool_, f64, i64
from bitwright.ir.naming import in_module

# Arguments about the storage of a tensor, not its elements.
_STORAGE = {"device", "layout", "pin_memory", "memory_format", "generator", "non_blocking"}
# Checks of data-dependent symbols that torch adds; the imported ops check their operands.
_CHECKS = ("_assert", "sym_constrain_range", "_check")


class GraphImporter:
    """Imports one graph of a program: the whole, or a body with its own builder."""

    def __init__(
        self,
        b: TypedBuilder,
        module: fx.GraphModule,
        known_symbols: frozenset[Symbol],
        problems: Problems,
    ) -> None:
        self.b, self.module, self.problems = b, module, problems
        self.known_symbols = known_symbols
        self.context = Context(self)
        self.values: dict[fx.Node, Any] = {}

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """The flat outputs of the graph for these placeholders."""
        nodes = list(self.module.graph.nodes)
        given = iter(inputs)
        needed = _needed(nodes)
        for node in nodes:
            if node.op == "placeholder":
                self.values[node] = next(given)
            elif node.op == "get_attr" and node in needed:
                self.values[node] = self._attribute(node)
            elif node.op == "call_function" and node in needed:
                self.values[node] = self._call(node, needed)
            elif node.op == "output":
                outputs = self.resolve(node.args[0])
                return outputs if isinstance(outputs, list) else [outputs]
        return []

    def resolve(self, argument: Any) -> Any:
        """An argument of a node, converted for mappings."""
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self.resolve(item) for item in argument]
        if isinstance(argument, torch.dtype):
            return element_type(argument)
        return argument

    def _attribute(self, node: fx.Node) -> Any:
        found: Any = self.module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return self.b.constant(array_of(found)) if isinstance(found, torch.Tensor) else found

    def _call(self, node: fx.Node, needed: set[fx.Node]) -> Any:
        if node.target is operator.getitem:
            return self._result(node)
        ctx = self.context
        ctx.results = _element_types(node.meta.get("val"))
        ctx.wanted = frozenset(
            index
            for user in node.users
            if user.target is operator.getitem and user in needed
            if isinstance(index := user.args[1], int)
        )
        ctx.common = _common_type(node)
        try:
            with self.b.at(in_module(target_name(node.target), module_path(node))):
                return self._apply(ctx, node)
        except UnmappedError as error:
            self.problems.add(node, error.what)
            return self._placeholder(node.meta.get("val"))
        except BitwrightError as error:
            raise ImportModelError(str(error), where=location_of(node)) from error
        except (TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            raise ImportModelError(
                f"this use of {target_name(node.target)} is not supported: {error}",
                where=location_of(node),
            ) from error

    def _result(self, node: fx.Node) -> Any:
        """One of several results; a mapping may compute only some."""
        source, index = (self.resolve(argument) for argument in node.args)
        if source[index] is None and isinstance(node.meta.get("val"), torch.Tensor):
            self.problems.add(node.all_input_nodes[0], f"result {index} is not computed")
            return self._placeholder(node.meta["val"])
        return source[index]

    def _apply(self, ctx: Context, node: fx.Node) -> Any:
        if name := function_name(node.target):
            return compute(ctx, name, tuple(self.resolve(node.args)))
        mapping = all_mappings()[target_name(node.target)]
        if not isinstance(node.target, torch._ops.OpOverload):
            return mapping(ctx, *self.resolve(node.args))
        positional, keywords = _bind(node)
        return mapping(
            ctx,
            *(self.resolve(argument) for argument in positional),
            **{key: self.resolve(argument) for key, argument in keywords.items()},
        )

    def _placeholder(self, meta: Any) -> Any:
        """A placeholder of the right type, so that the import finds further problems."""
        if isinstance(meta, (list, tuple)):
            return [self._placeholder(item) for item in meta]
        if not isinstance(meta, torch.Tensor):
            return 1
        shape = [size if isinstance(size, int) else UNKNOWN for size in meta.shape]
        named = self.b._name_unknown(TensorType(element_type(meta.dtype), tuple(shape)))
        return self.b.input(self.b.fresh_name("missing.") + "input", named)

    # nested graphs

    def inline(self, module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a nested graph, whose nodes are inlined."""
        return GraphImporter(self.b, module, self.known_symbols, self.problems).run(inputs)

    def body(
        self, module: fx.GraphModule, operands: Sequence[Any], header: Sequence[TensorType] = ()
    ) -> Body:
        """A nested graph as a body; its tensor operands are its inputs.

        The inputs in `header`, which the nested graph does not read, come first.
        """
        b = TypedBuilder("body", parent=self.b)
        for i, type_ in enumerate(header):
            b.input(f"step{i}", type_)
        types = [operand.type if isinstance(operand, Value) else operand for operand in operands]
        inputs = [
            b.input(f"in{i}", type_) if isinstance(type_, TensorType) else type_
            for i, type_ in enumerate(types)
        ]
        symbols = self.known_symbols.union(
            *(type_.symbols for type_ in types if isinstance(type_, TensorType))
        )
        importer = GraphImporter(b, module, symbols, self.problems)
        return Body(importer, inputs, importer.run(inputs))


class Body:
    """An imported nested graph, without named results yet."""

    def __init__(self, importer: GraphImporter, inputs: list[Any], outputs: list[Any]) -> None:
        self.importer, self.inputs, self.outputs = importer, inputs, outputs

    def build(self, results: Sequence[Value]) -> Graph:
        for i, value in enumerate(results):
            self.importer.b.output(f"out{i}", value)
        return self.importer.b.build()


def _needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that the outputs depend on; the operands of checks are not needed."""
    needed: set[fx.Node] = set()
    for node in reversed(list(nodes)):
        is_check = node.op == "call_function" and _is_check(node)
        if node.op == "output" or (node in needed and not is_check):
            needed.update(node.all_input_nodes)
    return needed


def _is_check(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").startswith(_CHECKS)


def unsupported_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes without a mapping, in nested graphs too."""
    mapped = all_mappings()
    found: list[fx.Node] = []
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            nodes = list(part.graph.nodes)
            needed = _needed(nodes)
            found += [
                node
                for node in nodes
                if node.op == "call_function"
                and node in needed
                and node.target is not operator.getitem
                and function_name(node.target) is None
                and target_name(node.target) not in mapped
            ]
    return found


def _bind(node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of an ATen op in the order of its schema, defaults filled in."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    target: Any = node.target  # an OpOverload
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in _STORAGE:
            continue
        if index < len(node.args):
            value: Any = node.args[index]
        else:
            value = node.kwargs.get(argument.name, argument.default_value)
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return positional, keywords


def _element_types(meta: Any) -> tuple[DType | None, ...]:
    items = meta if isinstance(meta, (list, tuple)) else (meta,)
    return tuple(_element_type(item) for item in items)


def _element_type(meta: Any) -> DType | None:
    if isinstance(meta, torch.Tensor):
        return element_type(meta.dtype)
    kinds = ((bool, bool_), (torch.SymBool, bool_), (int, i64), (torch.SymInt, i64))
    for kind, element in (*kinds, (float, f64), (torch.SymFloat, f64)):
        if isinstance(meta, kind):
            return element
    return None


def _common_type(node: fx.Node) -> DType | None:
    """The promoted type of the first two arguments, if they are tensors or numbers."""
    operands = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args[:2]]
    numbers = (torch.Tensor, int, float, bool, complex, torch.SymInt, torch.SymFloat)
    if len(operands) < 2 or not all(isinstance(o, numbers) for o in operands):
        return None
    if not any(isinstance(o, torch.Tensor) for o in operands):
        return None
    plain: list[Any] = [
        1 if isinstance(o, torch.SymInt) else 1.0 if isinstance(o, torch.SymFloat) else o
        for o in operands
    ]
    return element_type(torch.result_type(*plain))
