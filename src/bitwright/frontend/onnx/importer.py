"""Imports an ONNX model, node by node.

Each node becomes the first of these that exists: a model-local function (inlined), the result of a
mapping in this folder, the function body in ONNX's schema (inlined), an interpreter fallback to
ONNX's reference implementation. Nested graphs become bodies whose captures are operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto

from bitwright.errors import BitwrightError, GraphError, ImportModelError, UnsupportedError
from bitwright.frontend.builder import TypedBuilder
from bitwright.frontend.onnx import bitwright_ops, functions
from bitwright.frontend.onnx.context import Body, Context, Inputs
from bitwright.frontend.onnx.fallback import fallback_call
from bitwright.frontend.onnx.fold import ConstantFolder
from bitwright.frontend.onnx.fork import Fork, Tail, import_cases
from bitwright.frontend.onnx.frame import Frame, Scope
from bitwright.frontend.onnx.initializers import Initializers
from bitwright.frontend.onnx.node import OnnxNode, normal_domain, read_attributes, require_text
from bitwright.frontend.onnx.read import ModelFile
from bitwright.frontend.onnx.regions import PROOF_KEY, Regions
from bitwright.frontend.onnx.registry import UnmappedError, all_mappings
from bitwright.frontend.onnx.valuetypes import SymbolNames, value_type
from bitwright.ir import Dim, Graph, OpaqueType, Value, ValueType
from bitwright.ops.core.symbolic import SizeEvaluator

MAX_DEPTH = 24
MIN_NODE_LIMIT = 20_000
GROWTH_LIMIT = 50
ACCEPT_OPAQUE = frozenset(
    {
        *("Identity", "If", "Loop", "Scan"),
        *("Optional", "OptionalGetElement", "OptionalHasElement"),
        *("SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert", "SequenceLength"),
        "ConcatFromSequence",
    }
)
"""Ops whose mappings accept sequences, optionals and tensors of unknown rank."""


class Importer:
    def __init__(self, file: ModelFile) -> None:
        self.file, self.proto = file, file.proto
        self.opsets = _opsets(self.proto.opset_import)
        self.names = SymbolNames()
        self.evaluator, self.folder = SizeEvaluator(), ConstantFolder()
        self.regions = Regions(self.proto)
        self.functions = functions.functions_by_name(self.proto) | self.regions.functions
        self.initializers = Initializers(file)
        self.carried_sizes: set[Dim] = set()
        """Sizes of carried values that may change from one iteration to the next."""
        self.sequences: dict[Value, list[Value]] = {}
        """The elements of sequences, where they are known."""
        self.forks = 0
        self.nodes_left = max(MIN_NODE_LIMIT, GROWTH_LIMIT * _count_nodes(self.proto))

    def graph(self) -> Graph:
        proto = self.proto.graph
        frame = Frame(TypedBuilder(proto.name or "model"))
        scope = Scope(frame, self.opsets, declared=_declared(proto))
        self.initializers.add_to(scope, proto, root=True)
        for info in proto.input:
            if info.name in scope.pending:
                continue  # an input with a default value becomes a parameter
            require_text(info.name)
            where = f"input {info.name!r}"
            if scope.defines(info.name):
                raise ImportModelError("two inputs have this name", where=where)
            type_ = value_type(info.type, self.names, info.name, where)
            scope.values[info.name] = frame.add_input(frame.b.input(info.name, type_))
        frame.b.reserve_symbols(self.names.taken)
        self.run(scope, self.regions.nodes(proto), [o.name for o in proto.output])
        require_text(proto.name, *(o.name for o in proto.output))
        # a repeated name is one output, as in ONNX Runtime
        outputs = {o.name: self.output(scope, o.name) for o in proto.output}
        return frame.finish(outputs.items(), meta=self._meta())

    def _meta(self) -> dict[str, str]:
        opsets = ", ".join(f"{domain or 'ai.onnx'}:{v}" for domain, v in self.opsets.items())
        meta = {
            "onnx.producer": f"{self.proto.producer_name} {self.proto.producer_version}".strip(),
            "onnx.opset": opsets,
            "onnx.ir_version": str(self.proto.ir_version),
            "onnx.doc": self.proto.doc_string,
        }
        entries = [p for p in self.proto.metadata_props if p.key != PROOF_KEY]
        meta.update({f"onnx.meta.{p.key}": p.value for p in entries})
        return {key: text for key, text in meta.items() if text}

    def output(self, scope: Scope, name: str) -> Value:
        value = scope.find(name, self.on_capture)
        if value is None:
            raise ImportModelError(f"output {name!r} is computed by no node")
        return value

    # nodes

    def run(self, scope: Scope, nodes: Sequence[NodeProto], wanted: Sequence[str]) -> None:
        """Import nodes in order; their outputs become values of the scope.

        `wanted` are the outputs that the scope needs. After a fork only these are defined, because
        the nodes after it are in the bodies of an `if`.
        """
        ctx = Context(self, scope)
        for index, proto in enumerate(nodes):
            self.nodes_left -= 1
            if self.nodes_left < 0:
                raise UnsupportedError(
                    "the model's functions and loops expand to too many nodes",
                    expected=f"at most {GROWTH_LIMIT} times the nodes in the file",
                )
            try:
                self._node(ctx, scope, proto)
            except Fork as fork:
                import_cases(self, scope, fork, Tail(fork.node, nodes[index + 1 :], wanted))
                return

    def _node(self, ctx: Context, scope: Scope, proto: NodeProto) -> None:
        require_text(proto.op_type, proto.domain, proto.name, *proto.input, *proto.output)
        domain = normal_domain(proto.domain)
        version = scope.opsets.get(domain, 1 if domain else 0)
        attrs = read_attributes(proto, self.file, scope.bound)
        node = OnnxNode(proto, version, attrs)
        if not domain and not version:
            raise ImportModelError("the model imports no opset of the default domain")
        inputs = Inputs(self._operand(scope, node, name) for name in proto.input)
        with ctx.b.at(node.loc):
            try:
                results = self._results(ctx, scope, node, inputs)
            except RecursionError:
                raise UnsupportedError("is nested too deeply", where=node.where) from None
            except ImportModelError as error:
                raise _with_location(error, node) from None
            except GraphError as error:
                raise ImportModelError(str(error), where=node.where) from None
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
                raise ImportModelError(
                    f"cannot be imported: {type(error).__name__}: {error}", where=node.where
                ) from error
        self.bind(scope, node, results)

    def _operand(self, scope: Scope, node: OnnxNode, name: str) -> Value | None:
        if not name:
            return None
        value = scope.find(name, self.on_capture)
        if value is None:
            raise ImportModelError(
                f"it reads {name!r}, which no earlier node computes",
                where=node.where,
                hint="The nodes of a model must be in topological order.",
            )
        return value

    def bind(self, scope: Scope, node: OnnxNode, results: Sequence[Value | None]) -> None:
        for index, name in enumerate(node.proto.output):
            if not name:
                continue
            value = results[index] if index < len(results) else None
            if value is None:
                raise UnsupportedError(
                    f"output {index} ({name!r}) is not computed", where=node.where
                )
            if scope.defines(name):
                raise ImportModelError(f"{name!r} is computed twice", where=node.where)
            scope.values[name] = value
            scope.frame.claim(value, name)

    def _results(
        self, ctx: Context, scope: Scope, node: OnnxNode, inputs: Inputs
    ) -> Sequence[Value | None]:
        key = (node.domain, node.op_type, node.proto.overload)
        if key in self.functions:
            known = bitwright_ops.import_call(ctx, node, inputs)
            return known or self.call(scope, self.functions[key], node, inputs)
        functions.check_arity(node)
        reason = ""
        mapping = all_mappings().get((node.domain, node.op_type))
        has_opaque = any(v is not None and isinstance(v.type, OpaqueType) for v in inputs)
        if mapping and (not has_opaque or node.op_type in ACCEPT_OPAQUE):
            try:
                results = mapping(ctx, node, inputs)
                return [results] if isinstance(results, Value) else list(results)
            except UnmappedError as error:
                reason = str(error)
        function = None if has_opaque else functions.from_schema(node, inputs, scope)
        if function is not None:
            try:
                return self.call(scope, function, node, inputs)
            except UnsupportedError as error:
                reason = reason or str(error)
        return self.fallback(scope, node, inputs, reason)

    def fallback(
        self, scope: Scope, node: OnnxNode, inputs: Inputs, reason: str = ""
    ) -> list[Value | None]:
        """The results of an interpreter fallback to ONNX's reference implementation."""
        return fallback_call(Context(self, scope), node, inputs, reason)

    # functions and nested graphs

    def call(
        self, scope: Scope, function: FunctionProto, node: OnnxNode, inputs: Inputs
    ) -> list[Value | None]:
        """Inline a function in its own name scope; its nodes go into the caller's graph."""
        key = (normal_domain(function.domain), function.name, function.overload)
        if key in scope.calls or len(scope.calls) >= MAX_DEPTH:
            raise UnsupportedError(
                f"function {function.name!r} calls itself or is nested too deeply", where=node.where
            )
        if len(inputs) > len(function.input):
            raise ImportModelError(
                f"function {function.name!r} has {len(function.input)} inputs",
                where=node.where,
                found=len(inputs),
            )
        bound: dict[str, AttributeProto] = {a.name: a for a in function.attribute_proto}
        for attribute in node.proto.attribute:
            if not attribute.ref_attr_name:
                bound[attribute.name] = attribute
            elif attribute.ref_attr_name in scope.bound:
                bound[attribute.name] = scope.bound[attribute.ref_attr_name]
        opsets = _opsets(function.opset_import) or scope.opsets
        inner = Scope(scope.frame, opsets, bound=bound, calls=(*scope.calls, key))
        given = dict(zip(function.input, inputs, strict=False))
        inner.values.update({name: value for name, value in given.items() if value is not None})
        absent = set(function.input) - set(inner.values)
        nodes = [_without_inputs(n, absent) for n in function.node]
        self.run(inner, nodes, function.output)
        return [inner.find(name, self.on_capture) for name in function.output]

    def body(
        self, scope: Scope, graph: GraphProto, types: Sequence[ValueType], first: int = 0
    ) -> Body:
        """A nested graph in its own frame, with inputs of these types.

        The first input of a loop's body is the iteration number; the body sees it plus `first`.
        """
        inner = self.nested_scope(scope, graph.name or "body", graph)
        frame = inner.frame
        inputs = []
        for info, type_ in zip(graph.input, types, strict=True):
            value = frame.add_input(frame.leaf("input", info.name or "input", type_))
            inner.values[info.name] = value
            inputs.append(value)
        if first:
            start = frame.b.constant(np.array(first, np.int64))
            inner.values[graph.input[0].name] = frame.b.add(inputs[0], start)
        self.run(inner, self.regions.nodes(graph), [o.name for o in graph.output])
        outputs = [(o.name, self.output(inner, o.name)) for o in graph.output]
        return Body(frame, inputs, outputs)

    def inline(self, scope: Scope, graph: GraphProto, inputs: Sequence[Value]) -> list[Value]:
        if len(scope.calls) >= MAX_DEPTH:
            raise UnsupportedError("graphs are nested too deeply", where=f"graph {graph.name!r}")
        inner = Scope(
            scope.frame,
            scope.opsets,
            outer=scope,
            bound=scope.bound,
            declared=_declared(graph),
            calls=(*scope.calls, ("", graph.name, "inline")),
        )
        self.initializers.add_to(inner, graph, root=False)
        for info, value in zip(graph.input, inputs, strict=True):
            inner.values[info.name] = value
        self.run(inner, self.regions.nodes(graph), [o.name for o in graph.output])
        return [self.output(inner, o.name) for o in graph.output]

    def nested_scope(self, scope: Scope, name: str, graph: GraphProto | None = None) -> Scope:
        """A scope in its own frame, inside this scope."""
        depth = scope.frame.depth + 1
        if depth > MAX_DEPTH:
            raise UnsupportedError("graphs are nested too deeply", where=f"graph {name!r}")
        frame = Frame(TypedBuilder(name, scope.frame.b), scope.frame, depth)
        inner = Scope(frame, scope.opsets, outer=scope, bound=scope.bound, calls=scope.calls)
        if graph is not None:
            inner.declared = _declared(graph)
            self.initializers.add_to(inner, graph, root=False)
        return inner

    def on_capture(self, frame: Frame, outer: Value) -> Value | None:
        """A copy of a constant or size inside the body, in place of a captured operand."""
        if outer.is_constant:
            return frame.leaf("constant", outer.name, outer.type, value=outer.node.attrs["value"])
        sizes = self.evaluator.sizes(outer)
        if sizes is None:
            return None
        ctx = Context(self, Scope(frame, self.opsets))
        if outer.dtype.name != "i64" or not ctx.usable(sizes):
            return None
        shape = tuple(int(size) for size in outer.shape)
        return ctx.b.sizes(values=sizes, shape=shape)


def _opsets(imports: Iterable[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in imports:
        domain, version = normal_domain(entry.domain), entry.version
        newest = onnx.defs.onnx_opset_version()
        if not domain and not 1 <= version <= newest:
            raise UnsupportedError(
                f"opset {version} of ai.onnx is not known", expected=f"1 to {newest}"
            )
        found[domain] = version
    return found


def _declared(graph: GraphProto) -> dict[str, Any]:
    return {info.name: info.type for info in (*graph.value_info, *graph.output)}


def _without_inputs(node: NodeProto, absent: set[str]) -> NodeProto:
    """The node without the operands that the caller of its function omitted."""
    if not any(name in absent for name in node.input):
        return node
    copy = NodeProto()
    copy.CopyFrom(node)
    for index, name in enumerate(node.input):
        if name in absent:
            copy.input[index] = ""
    return copy


def _with_location(error: ImportModelError, node: OnnxNode) -> BitwrightError:
    if error.where:
        return error
    return type(error)(str(error), where=node.where)


def _count_nodes(proto: onnx.ModelProto) -> int:
    return len(proto.graph.node) + sum(len(f.node) for f in proto.functions)
