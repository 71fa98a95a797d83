"""Prepared runs: memory and step tables for one set of sizes, cached.

If the inputs fix all sizes, the arena is planned and every step table is filled before the first
run with these sizes. If some sizes are data-dependent, tables are filled during the run; after two
consecutive runs with the same sizes, the next run is prepared for them speculatively.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.signature import Signature
from bitwright.backends.cpu.lowering.artifact import CompiledArtifact
from bitwright.backends.cpu.runtime.memory import DynamicMemory, Memory, PlannedMemory, allocate
from bitwright.backends.cpu.runtime.pool import Pool
from bitwright.backends.cpu.runtime.steps import KernelSegment, StepTable, segments_of
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.allocation import require_bytes, require_room
from bitwright.ir.dim import Size, Sizes, evaluate
from bitwright.lir.buffer import Buffer
from bitwright.lir.plan import Plan, Planner
from bitwright.lir.schedule import PythonStep

MAX_PLANS = 16
MAX_LAYOUTS = 4
Segment = PythonStep | KernelSegment | StepTable
Output = tuple[str, Buffer, tuple[int, ...], np.dtype[Any]]
"""Name, buffer, shape and element type."""


class SizeMismatchError(Exception):
    """The data-dependent sizes differ from those that the run was prepared for."""


@dataclass(frozen=True)
class PreparedRun:
    memory: Memory
    segments: Sequence[Segment]
    outputs: Sequence[Output]
    key: Any = None
    is_speculative: bool = False
    """Whether the data may still produce other sizes."""


class LoadedCode:
    """The parts of an artifact that all runs share: kernel addresses, segments, live ranges."""

    def __init__(self, artifact: CompiledArtifact, addresses: Mapping[str, int]) -> None:
        self.schedule, self.checks = artifact.schedule, artifact.checks
        self.is_planned, self.addresses = artifact.is_planned, addresses
        self.signatures: dict[str, Signature] = {
            name: kernel.signature for name, kernel in artifact.kernels.items()
        }

    @cached_property
    def segments(self) -> list[PythonStep | KernelSegment]:
        """Runs of kernel calls, and the other steps between them."""
        return [
            KernelSegment(steps, self.addresses, self.signatures)
            if isinstance(steps, list)
            else steps
            for steps in segments_of(self.schedule)
        ]

    @cached_property
    def planner(self) -> Planner:
        return Planner(self.schedule)


class RunPlans:
    """Prepared runs in one arena, cached by sizes and by the shapes of inputs."""

    def __init__(self, code: LoadedCode, has_states: bool) -> None:
        self._code, self._has_states = code, has_states
        self.arena = allocate(0)
        self.tables: OrderedDict[Any, tuple[PlannedMemory, list[Segment]]] = OrderedDict()
        """Memory and step tables by sizes, the least recently used first."""
        self.by_shapes: dict[Any, PreparedRun] = {}
        self._layouts: list[Plan] = []
        """The last memory plans."""
        self._last_sizes: dict[Any, dict[str, int]] = {}
        """Data-dependent sizes of the last run, by the types and shapes of its inputs."""

    def find(self, shapes: Any) -> PreparedRun | None:
        """The run that was prepared for inputs of these types and shapes."""
        found = self.by_shapes.get(shapes)
        if found is not None:
            self.tables.move_to_end(found.key)
        return found

    def add(self, shapes: Any, bindings: dict[str, int], pool: Pool) -> PreparedRun:
        """Prepare a run. `bindings` holds the sizes that the inputs fix."""
        if not self._code.is_planned:
            return PreparedRun(DynamicMemory(bindings), self._code.segments, (), shapes)
        prepared = self.by_shapes[shapes] = self._prepare(bindings, pool)
        self.tables.move_to_end(prepared.key)
        return prepared

    def drop(self, shapes: Any) -> None:
        del self.by_shapes[shapes]

    def record(self, run: PreparedRun, pool: Pool) -> None:
        """Prepare the next run for the sizes of this one, if the run before it had the same."""
        sizes = dict(run.memory.bindings)
        if self._last_sizes.get(run.key) == sizes and not self._has_states:
            with suppress(RunError):  # one arena for all buffers may exceed the memory limit
                prepared = self._prepare(sizes, pool)
                self.by_shapes[run.key] = replace(prepared, is_speculative=True)
        while len(self._last_sizes) >= MAX_PLANS:
            del self._last_sizes[next(iter(self._last_sizes))]
        self._last_sizes[run.key] = sizes

    def _prepare(self, bindings: dict[str, int], pool: Pool) -> PreparedRun:
        code, key = self._code, tuple(sorted(bindings.items()))
        if key not in self.tables:
            bindings = Sizes(bindings)
            code.checks.verify(bindings)
            self._check_outputs(bindings)
            layout = self._layout(bindings)
            if layout.total > self.arena.nbytes:
                self.arena = allocate(layout.total)
                self.tables.clear()  # they hold addresses of the old arena
                self.by_shapes.clear()
            memory = PlannedMemory(bindings, layout, self.arena)
            self.tables[key] = memory, self._segments(memory, pool)
            while len(self.tables) > MAX_PLANS:
                self.tables.popitem(last=False)
            self.by_shapes.clear()  # it may refer to dropped tables
        planned, segments = self.tables[key]
        outputs = [
            (name, view.buffer, concrete(view.shape, bindings), view.dtype.numpy)
            for name, view in code.schedule.outputs.items()
        ]
        return PreparedRun(planned, segments, outputs, key)

    def _layout(self, bindings: Sizes) -> Plan:
        """A memory plan in which all buffers have room.

        An earlier plan is used again if it has enough. The sizes of a second plan are rounded up,
        because other lengths will follow.
        """
        planner = self._code.planner
        found = next((plan for plan in self._layouts if planner.fits(plan, bindings)), None)
        if found is None and self._layouts:
            rounded = {name: 1 << max(0, size - 1).bit_length() for name, size in bindings.items()}
            with suppress(BitwrightError):
                roomy = planner.plan(Sizes(rounded))
                require_bytes(roomy.total, "a run")
                found = roomy if planner.fits(roomy, bindings) else None
        if found is None:
            found = planner.plan(bindings)
        if found not in self._layouts:
            self._layouts = [found, *self._layouts][:MAX_LAYOUTS]
        return found

    def _segments(self, memory: PlannedMemory, pool: Pool) -> list[Segment]:
        """The segments with filled tables; like those of another run in the same layout."""
        others = ((m, s) for m, s in reversed(self.tables.values()) if m.plan is memory.plan)
        found = next((s for m, s in others if m.arena is memory.arena), self._code.segments)
        small = pool.small_bytes()
        return [
            StepTable(s, memory, small, like if isinstance(like, StepTable) else None)
            if isinstance(s, KernelSegment)
            else s
            for s, like in zip(self._code.segments, found, strict=True)
        ]

    def _check_outputs(self, bindings: Mapping[str, int]) -> None:
        """Raise a `RunError` if an output exceeds the largest tensor size."""
        for name, view in self._code.schedule.outputs.items():
            shape = concrete(view.shape, bindings)
            require_room(shape, view.dtype.numpy.itemsize, f"output {name!r}")


def concrete(shape: tuple[Size, ...], bindings: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, bindings) for size in shape)
