"""Builds the artifact of a fused graph for a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import bitwright.backends.gpu.lowering.registered as _lowerings
from bitwright.backends.cpu.lowering.build import fault_report, has_static_sizes
from bitwright.backends.cpu.runtime.sizes import SizeChecks
from bitwright.backends.gpu.lowering.artifact import GpuArtifact
from bitwright.backends.gpu.lowering.context import GpuLowering, Machine
from bitwright.backends.gpu.lowering.merge import merge_small
from bitwright.ir.dim import product
from bitwright.ir.graph import Graph
from bitwright.lir.buffer import Storage
from bitwright.lir.schedule import InterpreterFallback, KernelStep

assert _lowerings.__name__  # importing it registers the lowerings


def build(graph: Graph, machine: Machine, refused: Mapping[str, str] | None = None) -> GpuArtifact:
    """The artifact of a graph; nodes in `refused` run on the CPU, for the reasons given."""
    lowering = GpuLowering(graph, machine, refused)
    schedule = lowering.run()
    for buffer in schedule.buffers:
        if buffer.storage is not Storage.CONSTANT:
            buffer.space = "device"
    schedule.steps = [
        replace(step, why=f"{step.why}; {transfer(step)}")
        if isinstance(step, InterpreterFallback)
        else step
        for step in schedule.steps
    ]
    schedule.steps, merged = merge_small(schedule.steps, lowering.sources)
    lowering.sources |= merged
    used = {step.kernel for step in schedule.steps if isinstance(step, KernelStep)}
    return GpuArtifact(
        schedule,
        {name: source for name, source in lowering.sources.items() if name in used},
        SizeChecks.of(graph, (step.op for step in schedule.fallbacks)),
        has_static_sizes(graph, schedule),
        lowering.fault_buffer,
        {number: fault_report(graph, *found) for number, found in lowering.numbered.items()},
    )


def transfer(step: InterpreterFallback) -> str:
    """What a node on the CPU moves between host and device, for people."""
    views = [view for view in (*step.inputs, *step.outputs) if view is not None]
    sizes = [(product(view.shape), view.dtype.numpy.itemsize) for view in views]
    known = sum(size * item for size, item in sizes if isinstance(size, int))
    unknown = [f"{item} * {size}" for size, item in sizes if not isinstance(size, int)]
    return f"{' + '.join([f'{known:,}', *unknown])} bytes to the CPU and back"
