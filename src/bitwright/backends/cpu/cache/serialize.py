"""Compiled artifacts as JSON data and arrays, and back.

    {"graph": [name, inputs, states, outputs], "dims": [...], "buffers": [...], "views": [...],
     "steps": [...], ...}

A size is a number, or `[k]`: the k-th of `dims`, each a sum of `[coefficient, atoms]`; an atom is
`[name, bound]` or `[function, left, right]`. Buffers, views and arrays are referenced by index. A
step is a kernel call, or `["", number, ...]`: the interpreter fallback with this number in the text
`fallbacks`. Data-dependent sizes, compiled bodies, custom ops, and inputs or outputs that are not
tensors are not supported; `NotSerializable` has the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.signature import Signature, Slot
from bitwright.backends.cpu.lowering.artifact import (
    Checks,
    CompiledArtifact,
    Fault,
    KernelCode,
    new_fault_buffer,
)
from bitwright.ir.dim import UNKNOWN, Atom, Dim, Function, Size, Symbol
from bitwright.ir.dtype import DTYPES, string
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType, ValueType
from bitwright.lir.buffer import Buffer, Storage, View
from bitwright.lir.schedule import (
    ControlStep,
    InterpreterFallback,
    KernelStep,
    Schedule,
    SizeStep,
    Step,
)

Array = np.ndarray[Any, Any]


class NotSerializable(Exception):  # noqa: N818 (not an error: the artifact is used uncached)
    """The reason why an artifact cannot be serialized."""


class Encoder:
    """Encodes one artifact; `arrays` receives its arrays."""

    def __init__(self) -> None:
        self.dims: list[Any] = []
        self.views: list[Any] = []
        self.arrays: list[Array] = []
        self._buffers: dict[Buffer, int] = {}
        self._fallback_numbers: dict[InterpreterFallback, int] = {}
        self._view_numbers: dict[View, int] = {}
        self._dim_numbers: dict[Dim, int] = {}

    def encode(self, graph: Graph, artifact: CompiledArtifact) -> dict[str, Any]:
        if any(node.op == "custom" for _, node in graph.walk()):
            raise NotSerializable("the file does not define custom ops")
        schedule = artifact.schedule
        self._fallback_numbers = {step: n for n, step in enumerate(schedule.fallbacks)}
        self._buffers = {buffer: number for number, buffer in enumerate(schedule.buffers)}
        return {
            "graph": self._interface(graph),
            "buffers": [self._buffer(buffer) for buffer in schedule.buffers],
            "fallbacks": self._fallbacks(),
            "steps": [self._step(step) for step in schedule.steps],
            "outputs": self._named(schedule.outputs),
            "updates": self._named(schedule.updates),
            "kernels": {
                name: [[slot.name, slot.kind] for slot in kernel.signature.slots]
                for name, kernel in artifact.kernels.items()
            },
            "fault_buffer": self._buffers.get(artifact.fault_buffer),
            "faults": [
                [
                    number,
                    fault.where,
                    fault.indexed and self._type(fault.indexed),
                    fault.parameter,
                ]
                for number, fault in artifact.faults.items()
            ],
            "is_planned": artifact.is_planned,
            "views": self.views,
            "dims": self.dims,
        }

    def _interface(self, graph: Graph) -> list[Any]:
        inputs = [[value.name, self._type(value.type)] for value in graph.inputs]
        states = [
            [value.name, self._type(value.type), self._array(value.node.attrs.get("value"))]
            for value in graph.states
        ]
        outputs = [[name, self._type(value.type)] for name, value in graph.outputs]
        return [graph.name, inputs, states, outputs]

    def _type(self, type_: ValueType) -> list[Any]:
        if not isinstance(type_, TensorType) or type_.dtype == string:
            raise NotSerializable(f"a value is a {type_}")
        return [type_.dtype.name, self._sizes(type_.shape)]

    def _array(self, array: Array | None) -> int | None:
        if array is None:
            return None
        self.arrays.append(array)
        return len(self.arrays) - 1

    def _buffer(self, buffer: Buffer) -> list[Any]:
        count, array = self._size(buffer.count), self._array(buffer.array)
        return [buffer.name, buffer.dtype.name, count, buffer.storage.value, buffer.space, array]

    def _fallbacks(self) -> list[Any] | None:
        if not self._fallback_numbers:
            return None
        from bitwright.backends.cpu.cache.fallback_text import fallbacks_to_text

        text, blobs = fallbacks_to_text(self._fallback_numbers)
        return [text, {key: self._array(array) for key, array in blobs.items()}]

    def _step(self, step: Step) -> list[Any]:
        if isinstance(step, SizeStep):
            raise NotSerializable(f"the sizes of %{step.node} are data-dependent")
        if isinstance(step, ControlStep):
            raise NotSerializable(f"%{step.node} has bodies")
        if isinstance(step, InterpreterFallback):
            inputs, outputs = (
                [None if view is None else self._view(view) for view in views]
                for views in (step.inputs, step.outputs)
            )
            return ["", self._fallback_numbers[step], inputs, outputs, step.why]
        sizes = {name: self._size(size) for name, size in step.sizes.items()}
        reads = [self._buffers[buffer] for buffer in step.reads]
        writes = [self._buffers[buffer] for buffer in step.writes]
        pointers = self._named(step.pointers)
        return [step.kernel, step.node, pointers, sizes, reads, writes, step.why]

    def _named(self, views: Mapping[str, View]) -> dict[str, int]:
        return {name: self._view(view) for name, view in views.items()}

    def _view(self, view: View) -> int:
        if view not in self._view_numbers:
            offset, shape = self._size(view.offset), self._sizes(view.shape)
            buffer = self._buffers[view.buffer]
            self.views.append([buffer, offset, shape, self._sizes(view.strides)])
            self._view_numbers[view] = len(self.views) - 1
        return self._view_numbers[view]

    def _sizes(self, sizes: Iterable[Size]) -> list[Any]:
        return [self._size(size) for size in sizes]

    def _size(self, size: Size) -> Any:
        if not isinstance(size, Dim):
            return int(size)
        if size is UNKNOWN:
            raise NotSerializable("a size has no name")
        if size not in self._dim_numbers:
            terms = [[c, [self._atom(atom) for atom in atoms]] for atoms, c in size.terms]
            self.dims.append(terms)
            self._dim_numbers[size] = len(self.dims) - 1
        return [self._dim_numbers[size]]

    def _atom(self, atom: Atom) -> list[Any]:
        if isinstance(atom, Symbol):
            return [atom.name, atom.bound]
        return [atom.kind, *self._sizes(atom.args)]


class Decoder:
    """Decodes an artifact; malformed data raises KeyError, ValueError and the like."""

    def __init__(self, data: Mapping[str, Any], array: Callable[[int], Array]) -> None:
        self.data, self._array = data, array
        self.dims: list[Dim] = []
        for terms in data["dims"]:
            self.dims.append(Dim(tuple((tuple(map(self._atom, atoms)), c) for c, atoms in terms)))

    def interface(self) -> Graph:
        """A graph with the inputs, states and outputs of the compiled one."""
        name, inputs, states, outputs = self.data["graph"]
        nodes = [Node("input", (), {}, (self._type(type_),), (name,)) for name, type_ in inputs]
        for state, type_, number in states:
            attrs = {} if number is None else {"value": self._array(number)}
            nodes.append(Node("state", (), attrs, (self._type(type_),), (state,)))
        operands: tuple[Value, ...] = tuple(node.outputs[0] for node in nodes)
        names = tuple(output for output, _ in outputs)
        types = tuple(self._type(type_) for _, type_ in outputs)
        whole = Node("compiled", operands, {}, types, names)
        return Graph(name, (*nodes, whole), tuple(zip(names, whole.outputs, strict=True)))

    def decode(self, graph: Graph, objects: list[Any], checks: Checks) -> CompiledArtifact:
        data = self.data
        buffers = [self._buffer(*row) for row in data["buffers"]]
        views = [
            View(buffers[number], self._size(offset), self._sizes(shape), self._sizes(strides))
            for number, offset, shape, strides in data["views"]
        ]
        schedule = Schedule(graph, buffers)
        fallbacks = self._fallbacks()
        for row in data["steps"]:
            step = self._fallback if row[0] == "" else self._kernel
            schedule.steps.append(step(row, buffers, views, fallbacks))
        schedule.outputs |= {name: views[number] for name, number in data["outputs"].items()}
        schedule.updates |= {name: views[number] for name, number in data["updates"].items()}
        kernels = {
            name: KernelCode(name, Signature.of(Slot(*slot) for slot in slots))
            for name, slots in data["kernels"].items()
        }
        number = data["fault_buffer"]
        fault_buffer = new_fault_buffer() if number is None else buffers[number]
        faults = {
            key: Fault(where, indexed and self._type(indexed), parameter)
            for key, where, indexed, parameter in data["faults"]
        }
        return CompiledArtifact(
            schedule, kernels, objects, fault_buffer, faults, checks, data["is_planned"]
        )

    def _fallbacks(self) -> list[Node]:
        if self.data["fallbacks"] is None:
            return []
        from bitwright.backends.cpu.cache.fallback_text import (
            fallbacks_from_text,  # it needs the parser
        )

        text, blobs = self.data["fallbacks"]
        return fallbacks_from_text(
            text, {key: self._array(number) for key, number in blobs.items()}
        )

    def _kernel(
        self, row: list[Any], buffers: list[Buffer], views: list[View], _: list[Node]
    ) -> Step:
        kernel, node, pointers, sizes, reads, writes, why = row
        return KernelStep(
            kernel,
            node,
            {name: views[number] for name, number in pointers.items()},
            {name: self._size(size) for name, size in sizes.items()},
            tuple(buffers[number] for number in reads),
            tuple(buffers[number] for number in writes),
            why,
        )

    def _fallback(
        self, row: list[Any], _: list[Buffer], views: list[View], nodes: list[Node]
    ) -> Step:
        _, number, inputs, outputs, why = row
        read, written = (
            tuple(None if view is None else views[view] for view in numbers)
            for numbers in (inputs, outputs)
        )
        return InterpreterFallback(nodes[number], read, written, why)

    def _type(self, row: list[Any]) -> TensorType:
        return TensorType(DTYPES[row[0]], self._sizes(row[1]))

    def _buffer(
        self, name: str, element: str, count: Any, storage: str, space: str, array: int | None
    ) -> Buffer:
        held = None if array is None else self._array(array)
        return Buffer(name, DTYPES[element], self._size(count), Storage(storage), space, held)

    def _size(self, size: Any) -> Size:
        return size if isinstance(size, int) else self.dims[size[0]]

    def _sizes(self, sizes: list[Any]) -> tuple[Size, ...]:
        return tuple(map(self._size, sizes))

    def _atom(self, row: list[Any]) -> Atom:
        if len(row) == 2:
            return Symbol(*row)
        return Function(row[0], self._sizes(row[1:]))
