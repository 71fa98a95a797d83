"""A loaded graph on one device: constants, arena, launches, states.

A *signature* is the types and shapes of all inputs. For each one, a `PreparedRun` holds the sizes,
the memory plan and
the bound launches; the least recently used ones are dropped. Runs of one program are serialized by
a lock; several
programs share the device.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from bitwright.backends.base import Profile
from bitwright.backends.cpu.profile.peaks import Level, Peaks
from bitwright.backends.cpu.runtime.run_lock import RunLock
from bitwright.backends.gpu.lowering.artifact import GpuArtifact
from bitwright.backends.gpu.profile.peaks import peaks
from bitwright.backends.gpu.runtime.arguments import Given, Results, fault_error, read_inputs
from bitwright.backends.gpu.runtime.device import Device
from bitwright.backends.gpu.runtime.direct import DirectRun, key_of
from bitwright.backends.gpu.runtime.kernels import KernelError, KernelTable
from bitwright.backends.gpu.runtime.memory import (
    ALIGN,
    DeviceMemory,
    DeviceMemoryError,
    allocate,
    is_out_of_memory,
)
from bitwright.backends.gpu.runtime.prepared import PreparedRun
from bitwright.backends.gpu.runtime.queue import FaultRecord, RunQueue
from bitwright.backends.gpu.runtime.states import DeviceStates
from bitwright.backends.gpu.runtime.tensors import to_raw
from bitwright.backends.gpu.runtime.tuning import tuner_of
from bitwright.errors import RunError
from bitwright.ir.graph import Graph
from bitwright.lir.buffer import Buffer, Storage
from bitwright.lir.plan import Planner
from bitwright.lir.schedule import InterpreterFallback, Schedule
from bitwright.warn import warn_once

Array = np.ndarray[Any, Any]
SIGNATURES = 8
"""Prepared runs that a program keeps."""


class GpuProgram:
    """Runs one compiled graph on one device."""

    def __init__(
        self,
        graph: Graph,
        device: Device,
        artifact: GpuArtifact,
        shared: Mapping[Buffer, Any] | None = None,
    ) -> None:
        self.graph, self.device, self.artifact = graph, device, artifact
        self._input_names = tuple(value.name for value in graph.inputs)
        self._lock = RunLock()
        self._queue = RunQueue(device)
        self._refused: dict[str, str] = {}
        """Reasons by the names of nodes whose kernels failed."""
        self._load(shared)

    def _load(self, shared: Mapping[Buffer, Any] | None = None) -> None:
        device, artifact = self.device.torch_device, self.artifact
        self.kernels = KernelTable(artifact.sources, tuner_of(self.device.machine))
        self._planner = Planner(artifact.schedule, ALIGN) if artifact.is_planned else None
        self._constants = shared if shared is not None else self._upload_constants()
        self._fault = FaultRecord(self.device)
        self.states: Any = DeviceStates(self.graph, artifact, device, self._queue.finish)
        self._prepared: OrderedDict[Any, PreparedRun] = OrderedDict()
        self._direct: dict[Any, DirectRun] = {}
        self._has_states = any(
            b.storage is Storage.STATE and b is not artifact.fault_buffer
            for b in artifact.schedule.buffers
        )
        self.input_buffers = tuple(
            b for b in artifact.schedule.buffers if b.storage is Storage.INPUT
        )

    @property
    def schedule(self) -> Schedule:
        return self.artifact.schedule

    @property
    def fallbacks(self) -> Iterator[InterpreterFallback]:
        return self.artifact.fallbacks

    @property
    def description(self) -> str:
        """Where the graph runs, for people."""
        return f"on {self.device.machine.name}"

    @property
    def memory_bytes(self) -> int:
        """Bytes of constants and of all arenas on the device."""
        held = sum(int(raw.numel()) for raw in self._constants.values())
        return held + sum(
            int(run.memory.arena.numel())
            for run in self._prepared.values()
            if run.memory.arena is not None
        )

    @property
    def direct_runs(self) -> tuple[DirectRun, ...]:
        """The forms of repeated runs on tensors."""
        return tuple(self._direct.values())

    def copy(self) -> GpuProgram:
        """A program with the same code and constants, its own memory and states."""
        twin = GpuProgram(self.graph, self.device, self.artifact, self._constants)
        with self._lock.held():
            twin.states.update(dict(self.states))
        return twin

    def run(self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Outputs by name, of the kind that the inputs are: numpy arrays or torch tensors."""
        if self._direct and not out:
            try:
                found = self._run_direct(feeds)
            except DeviceMemoryError:
                if self._has_states:
                    raise
                found = None  # again, without the memory of other sizes
            if found is not None:
                return found
        given = read_inputs(self.graph, feeds, self.device.torch_device)
        retries = len(self._prepared) > 0 and not self._has_states
        try:
            return self._run_given(given, feeds, out or {})
        except DeviceMemoryError:
            if not retries:
                raise
        return self._run_given(given, feeds, out or {})  # without the memory of other sizes

    def _run_given(
        self, given: Given, feeds: Mapping[str, Any], out: Mapping[str, Any]
    ) -> dict[str, Any]:
        with self._running():
            self._raise_late_fault(must_wait=not given.on_device)
            return self._run_prepared(given, feeds, out)

    @contextmanager
    def _running(self) -> Iterator[None]:
        if not self._lock.acquire():
            raise RunError("a run of this executable is under way in this thread")
        try:
            yield
        except DeviceMemoryError:
            self._forget()
            raise
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._forget()
            what = "the GPU has not enough memory for the run"
            raise DeviceMemoryError(what, found=str(error)) from None
        finally:
            self._lock.release()

    def _run_direct(self, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
        """The run by a direct form; None if there is none for these inputs."""
        tensors, key = key_of(self._input_names, feeds, self.device.torch_device)
        direct = self._direct.get(key)
        if direct is None or not self._queue.is_current:
            return None
        with self._running():
            if self._direct.get(key) is not direct or not self.states.is_settled:
                return None
            self._raise_late_fault(must_wait=False)
            self._prepared.move_to_end(direct.signature)
            self._queue.begin()
            try:
                found = direct.run(tensors)
            finally:
                self._queue.end()
            self._fault.bindings = direct.bindings
            return found

    def _run_prepared(
        self, given: Given, feeds: Mapping[str, Any], out: Mapping[str, Any]
    ) -> dict[str, Any]:
        with self._queue.turn():
            while True:
                run = self._prepare(given)
                self._fill(run, given)
                try:
                    run.run()
                    break
                except KernelError as error:
                    self._without(error)
            self.kernels.tuner.save()
            results = Results(self, run, given).collect(out)
            self._fault.bindings = dict(run.memory.bindings)
            self._add_direct(run, given.signature, feeds)
            return results

    def _add_direct(self, run: PreparedRun, signature: Any, feeds: Mapping[str, Any]) -> None:
        """Keep the direct form of a run on tensors, if it has one."""
        _, key = key_of(self._input_names, feeds, self.device.torch_device)
        if key is None or key in self._direct:
            return
        direct = DirectRun.of(self, run, signature, feeds)
        if direct is not None:
            self._direct[key] = direct

    def _forget(self) -> None:
        """Drop all prepared runs and their memory."""
        self._prepared.clear()
        self._direct.clear()

    def _without(self, error: KernelError) -> None:
        """Compile again with the failed kernel's node on the CPU."""
        from bitwright.backends.gpu.lowering.build import build

        if error.node not in {node.name for node in self.graph.nodes} - set(self._refused):
            raise RunError(
                f"kernel {error.kernel} cannot run", where=error.node, found=error.reason
            ) from None
        warn_once(error.kernel, f"does not compile, {error.node!r} runs on the CPU: {error.reason}")
        self._refused[error.node] = f"its kernel does not compile: {error.reason}"
        states = dict(self.states)
        self.artifact = build(self.graph, self.device.machine, self._refused)
        self._load()
        self.states.update(states)

    def _raise_late_fault(self, must_wait: bool) -> None:
        """Raise the error of an earlier run on tensors, which nobody waited for."""
        if not self.artifact.faults:
            return
        if must_wait:
            self._queue.finish()
        if self._fault.is_set:
            self.raise_fault(self._fault.bindings)

    def profile(self, feeds: Mapping[str, Any], rounds: int) -> Profile:
        from bitwright.backends.gpu.profile.steps import profile

        return profile(self, feeds, rounds)

    def roof(self) -> Peaks:
        """The measured rates of the device: 16-bit and 8-bit products, copies."""
        found = peaks(self.device)
        if found is None:
            raise RunError(
                "kernels run in Triton's interpreter, whose times say nothing about a GPU",
                expected="a CUDA device",
            )
        rates = found.operations
        floats = max((rates[k] for k in ("bf16", "f16", "f32") if k in rates), default=1.0)
        eights = max((rates[k] for k in ("int8", "f8e4m3fn") if k in rates), default=None)
        memory = Level("device memory", math.inf, found.bytes_per_second)
        return Peaks(1, floats, eights, (memory,))

    def run_steps(
        self, feeds: Mapping[str, Any], around: Callable[[Any, Callable[[], None]], None]
    ) -> dict[str, int]:
        """Run each step by `around(step, call)`; the sizes of the run."""
        given = read_inputs(self.graph, feeds, self.device.torch_device)
        with self._lock.held(), self._queue.turn():
            run = self._prepare(given)
            self._fill(run, given)
            run.run(around)
            return dict(run.memory.bindings)

    # preparing

    def _upload_constants(self) -> dict[Buffer, Any]:
        device = self.device.torch_device
        found = {}
        for buffer in self.schedule.buffers:
            if buffer.storage is Storage.CONSTANT and buffer.array is not None:
                found[buffer] = to_raw(buffer.array, device)
        return found

    def _prepare(self, given: Given) -> PreparedRun:
        changed = self.states.prepare(given.bindings)
        if changed:  # addresses that graphs hold are gone
            self._forget()
        run = self._prepared.get(given.signature)
        if run is None:
            run = self._new_run(given)
            if self.artifact.is_planned:
                self._prepared[given.signature] = run
                while len(self._prepared) > SIGNATURES:
                    self._prepared.popitem(last=False)
                    self._direct.clear()  # some of them would keep the memory
        else:
            self._prepared.move_to_end(given.signature)
        return run

    def _new_run(self, given: Given) -> PreparedRun:
        if self.artifact.is_planned:
            self.artifact.checks.verify(given.bindings)
        plan = arena = None
        device = self.device.torch_device
        if self._planner is not None:
            plan = self._planner.plan(given.bindings)
            arena = allocate(plan.total, device, "intermediate values")
        shared = {
            **self._constants,
            **self.states.buffers,
            self.artifact.fault_buffer: self._fault.raw,
        }
        memory = DeviceMemory(device, dict(given.bindings), shared, plan, arena)
        planned = self.artifact.is_planned
        captures = planned and not self.device.is_interpreted
        checks = self.artifact.checks
        return PreparedRun(self.schedule, self.kernels, memory, captures, planned, checks)

    def _fill(self, run: PreparedRun, given: Given) -> None:
        """Copy the inputs into the run's buffers."""
        run.objects = dict(given.objects)
        for buffer in self.input_buffers:
            raw = given.raw[buffer.name]
            if raw.numel():
                # pinned memory of the caller must be read before a run on tensors returns
                waits = given.on_device and not raw.is_cuda
                run.memory.raw(buffer)[: raw.numel()].copy_(raw, non_blocking=not waits)

    def raise_fault(self, bindings: Mapping[str, int]) -> None:
        """Raise the error that a kernel recorded, if any."""
        error = fault_error(self.artifact, self._fault.raw, bindings)
        if error is not None:
            self._fault.clear()
            raise error
