"""From fused graph to code: lowering, kernels, object code.

Kernels that the cache lacks are compiled while the rest of the graph is still being lowered.
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
from bitwright.backends.cpu.lowering.artifact import Code, Fault
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.runtime.sizes import SizeChecks
from bitwright.ir.dim import Dim
from bitwright.ir.graph import Graph, Node
from bitwright.ir.types import TensorType
from bitwright.ir.verify import place
from bitwright.lir.schedule import ControlStep, KernelStep, Schedule
from bitwright.target import Target

assert _lowerings.__name__  # importing it registers the lowerings


def build(graph: Graph, target: Target) -> Code:
    """The graph's code for a target."""
    with hold_workers():
        return _code(_lower(graph, KernelStore(target)))


@dataclass(frozen=True)
class _Lowered:
    """A graph whose kernels may still be in the making, and its bodies."""

    graph: Graph
    lowering: Lowering
    bodies: Mapping[str, Mapping[str, _Lowered]]


def _lower(graph: Graph, store: KernelStore) -> _Lowered:
    lowering = Lowering(graph, store.target, store)
    schedule = lowering.run()
    _forget_weights(graph)
    bodies = {
        step.node: {name: _lower(body, store) for name, body in step.op.bodies.items()}
        for step in schedule.steps
        if isinstance(step, ControlStep)
    }
    return _Lowered(graph, lowering, bodies)


def _code(lowered: _Lowered) -> Code:
    graph, lowering, schedule = lowered.graph, lowered.lowering, lowered.lowering.schedule
    used = {step.kernel for step in schedule.steps if isinstance(step, KernelStep)}
    kernels = {name: lowering.kernels[name] for name in sorted(used)}
    return Code(
        schedule,
        kernels,
        tuple(kernel.code for kernel in kernels.values()),
        lowering.fault_buffer,
        {number: _fault(graph, node) for number, node in lowering.numbered.items()},
        SizeChecks.of(graph, (step.op for step in schedule.fallbacks)),
        _sizes_are_known(graph, schedule),
        {
            node: {name: _code(body) for name, body in bodies.items()}
            for node, bodies in lowered.bodies.items()
        },
    )


def _forget_weights(graph: Graph) -> None:
    """Leave the weights that lie in mapped files to the system: packed, they are read no more."""
    files = {id(file): file for node in graph.nodes if (file := _file_of(node)) is not None}
    for file in files.values():
        system.forget_pages(file)


def _file_of(node: Node) -> mmap.mmap | None:
    owner = node.attrs.get("value") if node.op == "constant" else None
    while isinstance(owner, np.ndarray):
        owner = owner.base
    while isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


def _fault(graph: Graph, node: Node) -> Fault:
    indexed = next((value.type for value in node.operands), None)
    return Fault(place(graph, node), indexed if isinstance(indexed, TensorType) else None)


def _sizes_are_known(graph: Graph, schedule: Schedule) -> bool:
    """Whether the inputs fix every size of the schedule."""
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
