"""Builds the artifact of a fused graph: schedule, kernels, object code.

Kernels that are not in the cache are compiled while the rest of the graph is lowered.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

import bitwright.backends.cpu.lowering.registered as _lowerings
from bitwright import system
from bitwright.backends.cpu.cache.kernel_store import KernelStore
from bitwright.backends.cpu.codegen.compilers import hold_workers
from bitwright.backends.cpu.lowering.artifact import CompiledArtifact, Fault
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.runtime.sizes import SizeChecks
from bitwright.ir.dim import Dim
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.ir.verify import place
from bitwright.lir.schedule import ControlStep, KernelStep, Schedule
from bitwright.target import Target

assert _lowerings.__name__  # importing it registers the lowerings


def build(graph: Graph, target: Target) -> CompiledArtifact:
    """The artifact of a graph for a target."""
    with hold_workers():
        return _artifact(_lower(graph, KernelStore(target)))


@dataclass(frozen=True)
class _Lowered:
    """A lowered graph whose kernels may still be compiling, and its bodies."""

    graph: Graph
    lowering: Lowering
    bodies: Mapping[str, Mapping[str, _Lowered]]


def _lower(graph: Graph, store: KernelStore) -> _Lowered:
    lowering = Lowering(graph, store.target, store)
    schedule = lowering.run()
    _drop_weight_pages(graph)
    bodies = {
        step.node: {name: _lower(body, store) for name, body in step.op.bodies.items()}
        for step in schedule.steps
        if isinstance(step, ControlStep)
    }
    return _Lowered(graph, lowering, bodies)


def _artifact(lowered: _Lowered) -> CompiledArtifact:
    graph, lowering, schedule = lowered.graph, lowered.lowering, lowered.lowering.schedule
    used = {step.kernel for step in schedule.steps if isinstance(step, KernelStep)}
    kernels = {name: lowering.kernels[name] for name in sorted(used)}
    return CompiledArtifact(
        schedule,
        kernels,
        tuple(kernel.code for kernel in kernels.values()),
        lowering.fault_buffer,
        {number: fault_report(graph, *found) for number, found in lowering.numbered.items()},
        SizeChecks.of(graph, (step.op for step in schedule.fallbacks)),
        has_static_sizes(graph, schedule),
        {
            node: {name: _artifact(body) for name, body in bodies.items()}
            for node, bodies in lowered.bodies.items()
        },
    )


def _drop_weight_pages(graph: Graph) -> None:
    """Release the pages of memory-mapped weights, which are packed by now."""
    files = {id(file): file for node in graph.nodes if (file := _mapped_file(node)) is not None}
    for file in files.values():
        system.drop_pages(file)


def _mapped_file(node: Node) -> mmap.mmap | None:
    owner = node.attrs.get("value") if node.op == "constant" else None
    while isinstance(owner, np.ndarray):
        owner = owner.base
    while isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


def fault_report(graph: Graph, node: Node, indexed: Value | None) -> Fault:
    type_ = None if indexed is None else indexed.type
    parameter = next(node.operands).name if node.attrs.get("require_finite") else ""
    return Fault(place(graph, node), type_ if isinstance(type_, TensorType) else None, parameter)


def has_static_sizes(graph: Graph, schedule: Schedule) -> bool:
    """Whether the inputs determine every size of the schedule."""
    known = {s.name for s in graph.input_symbols}
    sizes = [b.count for b in schedule.buffers]
    sizes += [
        s for step in schedule.steps if isinstance(step, KernelStep) for s in step.sizes.values()
    ]
    return all(
        {s.name for s in size.symbols} <= known for size in sizes if isinstance(size, Dim)
    ) and all(
        {s.name for s in v.type.symbols} <= known
        for n in graph.nodes
        for v in n.outputs
        if isinstance(v.type, TensorType)
    )
