"""The GPU backend: builds schedules of Triton kernels and loads them as programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.backends.base import Backend
from bitwright.backends.gpu.lowering.artifact import GpuArtifact
from bitwright.backends.gpu.runtime.device import current_device
from bitwright.backends.gpu.runtime.program import GpuProgram
from bitwright.ir.graph import Graph

if TYPE_CHECKING:
    from bitwright.passes.manager import Pass
    from bitwright.passes.precision.policy import Policy


class GpuBackend(Backend[GpuArtifact, GpuProgram]):
    """Compiles for the current CUDA device."""

    @property
    def passes_before_precision(self) -> tuple[Pass, ...]:
        from bitwright.backends.gpu.passes import BEFORE_PRECISION

        current_device()  # a machine without a GPU fails here, before the passes run
        return BEFORE_PRECISION

    def passes_after_precision(self, policy: Policy) -> tuple[Pass, ...]:
        from bitwright.backends.gpu.passes import after_precision

        return after_precision(policy)

    @property
    def passes(self) -> tuple[Pass, ...]:
        from bitwright.backends.gpu.passes import GPU

        current_device()
        return GPU

    def build(self, graph: Graph) -> GpuArtifact:
        from bitwright.backends.gpu.lowering.build import build

        return build(graph, current_device().machine)

    def load(self, graph: Graph, artifact: GpuArtifact, threads: int | None = None) -> GpuProgram:
        """`threads` has no meaning on a GPU."""
        artifact.warn_of_fallbacks()
        return GpuProgram(graph, current_device(), artifact)


BACKEND = GpuBackend()
