"""Imports a traced program: inputs, parameters, buffers, nodes and results, with their names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from bitwright.errors import BitwrightError, ImportModelError
from bitwright.frontend.builder import TypedBuilder
from bitwright.frontend.parameters import ALIASES
from bitwright.frontend.torch.graph_importer import GraphImporter, unsupported_nodes
from bitwright.frontend.torch.guards import conditions
from bitwright.frontend.torch.locations import Problems
from bitwright.frontend.torch.names import output_names
from bitwright.frontend.torch.scalars import Ratio, kind_of
from bitwright.frontend.torch.symbols import SymbolTable
from bitwright.frontend.torch.tensors import array_of, element_type, has_data, memory_of
from bitwright.frontend.torch.trace import Traced
from bitwright.ir import Graph, TensorType, Value
from bitwright.ir.dim import Dim, Symbol
from bitwright.ir.dtype import i64
from bitwright.ir.edit import prune
from bitwright.ops.core.check import verify
from bitwright.warn import warn_once

CONDITIONS = "conditions"
"""The key in `Graph.meta` of conditions on sizes (JSON: a list of expressions)."""
_CHANGES = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION)


def import_program(traced: Traced, name: str) -> Graph:
    """The graph of a traced program, verified."""
    problems = Problems()
    for node in unsupported_nodes(traced.program.graph_module):
        problems.add(node, "the op has no mapping")
    if problems:
        raise problems.error(name)
    return ProgramImport(traced, name, problems).run()


class ProgramImport:
    def __init__(self, traced: Traced, name: str, problems: Problems) -> None:
        self.program, self.traced, self.problems = traced.program, traced, problems
        self.b = TypedBuilder(name)
        self.symbols = SymbolTable(self.program.range_constraints)
        self.nodes = {node.name: node for node in self.program.graph.nodes}
        self.changed = self._changed_targets()
        self.tensors: dict[tuple[Any, ...], Value] = {}
        self.states: dict[str, Value] = {}
        self.aliases: dict[str, str] = {}

    def run(self) -> Graph:
        boundary = self._boundary()
        b, states = self.b, self.states.values()
        inputs = [node.outputs[0] for node in b.nodes if node.op == "input"]
        known = frozenset[Symbol]().union(*(v.type.symbols for v in (*inputs, *states)))
        importer = GraphImporter(b, self.program.graph_module, known, self.problems)
        try:
            results = importer.run(boundary)
            self._outputs(importer, results)
        except BitwrightError:
            if self.problems:  # a placeholder for an unsupported op caused the error
                raise self.problems.error(b.name) from None
            raise
        if self.problems:
            raise self.problems.error(b.name)
        self._record_conditions(inputs)
        b.meta["producer"] = f"torch {torch.__version__}"
        if self.aliases:
            b.meta[ALIASES] = json.dumps(self.aliases)
        return verify(prune(b.build()))

    def _record_conditions(self, inputs: list[Value]) -> None:
        """Record the conditions on sizes that the traced branches and checks assume, and warn."""
        renamed = dict(zip(self.traced.input_names, self.input_names, strict=True))
        by_name = {v.name: v for v in inputs}
        sources = {path: by_name[name] for path, name in renamed.items() if name in by_name}
        guards = getattr(self.program, "_guards_code", ())
        if found := conditions(guards, sources, self.b.name):
            self.b.meta[CONDITIONS] = json.dumps(found)
            warn_once(
                f"module {self.b.name!r}",
                f"the graph is for sizes where {', '.join(found)}; for others it fails or computes "
                "other results than the module",
            )

    # boundary

    def _changed_targets(self) -> set[str]:
        """The parameters and buffers that the program updates."""
        returned: Any = self.program.graph.output_node().args[0]
        sources = {s.target: s.arg.name for s in self.program.graph_signature.input_specs}
        return {
            spec.target
            for spec, node in zip(self.program.graph_signature.output_specs, returned, strict=True)
            if spec.kind in _CHANGES and node.name != sources.get(spec.target)
        }

    def _boundary(self) -> list[Any]:
        """A value or number for each placeholder; inputs are the graph's first nodes."""
        specs = self.program.graph_signature.input_specs
        taken = {spec.target for spec in specs if spec.target}
        self.input_names = [
            f"{name}.input" if name in taken else name for name in self.traced.input_names
        ]
        self._name_sizes(specs)
        flat = iter(self.input_names)
        users = {
            spec.arg.name: self._input(next(flat), spec)
            for spec in specs
            if spec.kind is InputKind.USER_INPUT
        }
        return [
            users[spec.arg.name] if spec.arg.name in users else self._held(spec) for spec in specs
        ]

    def _name_sizes(self, specs: Any) -> None:
        users = [spec for spec in specs if spec.kind is InputKind.USER_INPUT]
        shapes = [getattr(self._meta(spec), "shape", ()) for spec in users]
        axis_names = zip(self.input_names, shapes, self.traced.size_names, strict=True)
        for name, shape, names in axis_names:
            for axis, given in names.items():
                if isinstance(shape[axis], int):
                    raise ImportModelError(
                        f"the module fixes axis {axis} of input {name!r} to {shape[axis]}",
                        expected=f"a dynamic size {given!r}",
                    )
                self.symbols.declare(shape[axis], given, of_root=True)
        for shape, name in zip(shapes, self.input_names, strict=True):
            for axis, size in enumerate(shape):
                self.symbols.declare(size, f"{name}.{axis}")

    def _meta(self, spec: Any) -> Any:
        node = self.nodes.get(spec.arg.name)
        return None if node is None else node.meta.get("val")

    def _input(self, name: str, spec: Any) -> Any:
        meta = self._meta(spec)
        if isinstance(meta, torch.Tensor):
            shape = tuple(self.symbols.size(size) for size in meta.shape)
            return self.b.input(name, TensorType(element_type(meta.dtype), shape))
        if isinstance(meta, torch.SymInt):
            return self.b.input(name, TensorType(i64, ()))
        return getattr(spec.arg, "value", meta)  # a constant of the trace

    def _held(self, spec: Any) -> Any:
        """A parameter, buffer or constant tensor of the module."""
        target = spec.target
        tensor = _lookup(target, self.program.state_dict, self.program.constants)
        if not isinstance(tensor, torch.Tensor):
            return None  # a script object, or a token of side effects
        value = array_of(tensor) if has_data(tensor) else None
        type_ = TensorType(element_type(tensor.dtype), tuple(map(int, tensor.shape)))
        if target in self.changed:
            self.states[target] = self.b.state(target, value, type_)
            return self.states[target]
        if spec.kind is InputKind.CONSTANT_TENSOR or (
            spec.kind is InputKind.BUFFER and not spec.persistent
        ):
            return self.b.constant(value, name=target)
        key = memory_of(tensor)
        if key in self.tensors:
            self.aliases[target] = self.tensors[key].name
            return self.tensors[key]
        trainable = spec.kind is InputKind.PARAMETER and tensor.requires_grad
        self.tensors[key] = self.b.parameter(target, value, type_, trainable)
        return self.tensors[key]

    # results

    def _outputs(self, importer: GraphImporter, results: list[Any]) -> None:
        names = iter(output_names(self.program.call_spec.out_spec))
        signature = self.program.graph_signature
        inputs = dict(zip(signature.user_inputs, self.input_names, strict=True))
        updated: dict[str, Any] = {}
        for spec, result in zip(signature.output_specs, results, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                self._output(importer, next(names), result)
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                updated[f"{inputs[spec.target]}.updated"] = result
            elif spec.target in self.states:
                self.b.update(self.states[spec.target], result)
        for name, result in updated.items():
            self._output(importer, name, result)

    def _output(self, importer: GraphImporter, name: str, result: Any) -> None:
        """Add a tensor or number as an output; None and strings are omitted."""
        if isinstance(result, (bool, int, float, Dim, Ratio)):
            result = importer.context.scalar(result, kind_of(result))
        if isinstance(result, Value):
            self.b.output(name, result)


def _lookup(target: str, *sources: Mapping[str, Any]) -> Any:
    return next((source[target] for source in sources if target in source), None)
