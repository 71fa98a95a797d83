"""The compiled artifact of a graph for a GPU: schedule, kernel sources, size checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bitwright.backends.cpu.lowering.artifact import Fault
from bitwright.backends.cpu.runtime.sizes import SizeChecks
from bitwright.backends.gpu.codegen.source import KernelSource
from bitwright.lir.buffer import Buffer
from bitwright.lir.schedule import InterpreterFallback, Schedule
from bitwright.warn import warn_once


@dataclass(frozen=True)
class GpuArtifact:
    schedule: Schedule
    sources: Mapping[str, KernelSource]
    checks: SizeChecks
    is_planned: bool
    """Whether the inputs determine every size."""
    fault_buffer: Buffer
    faults: Mapping[int, Fault]
    """By the number that kernels record (`Lowering.number`)."""

    @property
    def fallbacks(self) -> Iterator[InterpreterFallback]:
        return self.schedule.fallbacks

    @property
    def kernels(self) -> Mapping[str, KernelSource]:
        return self.sources

    def warn_of_fallbacks(self) -> None:
        """Warn about each op without a kernel, once per process."""
        for step in self.fallbacks:
            warn_once(f"op {step.op.op} on the GPU", f"runs on the CPU: {step.why}")
