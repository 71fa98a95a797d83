"""The CPU backend: builds artifacts, loads them as programs and caches them on disk."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from bitwright.backends.base import Backend
from bitwright.backends.cpu.cache.models import ModelEntry, find_entry
from bitwright.backends.cpu.lowering.artifact import CompiledArtifact
from bitwright.backends.cpu.runtime.program import Program
from bitwright.ir.graph import Graph
from bitwright.target import Target, host

if TYPE_CHECKING:
    from bitwright.passes.manager import Pass

# Passes and lowerings are slow to import, and a warm start needs neither.


class CpuBackend(Backend[CompiledArtifact, Program]):
    def __init__(self, target: Target | None = None) -> None:
        """`target` None means `host()` at the time of use."""
        self._target = target

    @property
    def target(self) -> Target:
        return self._target or host()

    @property
    def passes_before_precision(self) -> tuple[Pass, ...]:
        from bitwright.backends.cpu.passes import BEFORE_PRECISION

        return BEFORE_PRECISION

    @property
    def passes(self) -> tuple[Pass, ...]:
        from bitwright.backends.cpu.passes import CPU

        return CPU

    @property
    def step_passes(self) -> tuple[Pass, ...]:
        from bitwright.backends.cpu.passes import CPU_STEP

        return CPU_STEP

    def build(self, graph: Graph) -> CompiledArtifact:
        from bitwright.backends.cpu.lowering.build import build

        return build(graph, self.target)

    def load(self, graph: Graph, artifact: CompiledArtifact, threads: int | None = None) -> Program:
        artifact.warn_of_fallbacks()
        return Program(graph, self.target, threads or self.target.cores, artifact)

    def prepare(self) -> AbstractContextManager[None]:
        from bitwright.backends.cpu.cache.kernel_store import compiler_workers

        return compiler_workers()

    def cache_entry(self, model: Path, precision: str | None) -> ModelEntry | None:
        return find_entry(model, precision)


BACKEND = CpuBackend()
