"""A loaded graph: schedule, machine code, memory and threads.

A run sets the addresses of inputs and outputs in prepared step tables (`plans`) and calls the
native runner once per segment of kernel calls between Python steps. Inputs whose types and shapes
were seen before are not checked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.backends.base import Profile
from bitwright.backends.cpu.codegen.jit import Library
from bitwright.backends.cpu.lowering.artifact import CompiledArtifact
from bitwright.backends.cpu.runtime.fallback import object_of, read_sizes, run_node_step
from bitwright.backends.cpu.runtime.memory import Memory, new_array, new_zeros
from bitwright.backends.cpu.runtime.plans import (
    LoadedCode,
    PreparedRun,
    RunPlans,
    SizeMismatchError,
    concrete,
)
from bitwright.backends.cpu.runtime.pool import shared_pool
from bitwright.backends.cpu.runtime.run_lock import RunLock
from bitwright.backends.cpu.runtime.states import States, token_of
from bitwright.backends.cpu.runtime.steps import KernelSegment, StepTable
from bitwright.backends.outputs import check_out, disjoint_from
from bitwright.errors import BitwrightError, NonFiniteError, RunError
from bitwright.ir.allocation import require_room
from bitwright.ir.arrays import as_array
from bitwright.ir.feeds import bind_inputs
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import Buffer, Storage
from bitwright.lir.schedule import InterpreterFallback, PythonStep, SizeStep
from bitwright.target import Target

if TYPE_CHECKING:
    from bitwright.backends.cpu.profile.steps import Stopwatch  # it imports the emitter
    from bitwright.ops.core.interpret import Observer

Array = np.ndarray[Any, Any]


SMALL = 1 << 10
"""Inputs of at most this many bytes are copied, which is faster than new addresses in all steps."""


class Program:
    """Runs one compiled graph on one target with a fixed number of threads."""

    def __init__(
        self, graph: Graph, target: Target, threads: int, artifact: CompiledArtifact
    ) -> None:
        self.graph, self.target, self.artifact = graph, target, artifact
        self.schedule, self.kernels = artifact.schedule, artifact.kernels
        self._library = Library(artifact.objects, target)
        addresses = {name: self._library.address(name) for name in self.kernels}
        self._code = LoadedCode(artifact, addresses)
        self._input_is_tensor = [(v, isinstance(v.type, TensorType)) for v in graph.inputs]
        buffers = {b.name: b for b in self.schedule.buffers if b.storage is Storage.INPUT}
        self._input_buffers = [buffers.get(value.name) for value in graph.inputs]
        self._fault_buffer = artifact.fault_buffer
        self._state_buffers = [
            b
            for b in self.schedule.buffers
            if b.storage is Storage.STATE and b is not self._fault_buffer
        ]
        self.states: dict[str, Array] = States()
        self.observe: Observer | None = None
        """Receives the values inside bodies; the interpreter then runs the bodies."""
        self._shown = {view.buffer for view in self.schedule.outputs.values()}
        """Buffers of outputs; one of them may be that of an input."""
        self._is_planned = artifact.is_planned
        self._has_only_buffers = len(self.schedule.outputs) == len(graph.outputs)
        self._bodies = {
            node: {
                name: Program(graph.values[node].node.attrs[name], target, threads, body)
                for name, body in bodies.items()
            }
            for node, bodies in artifact.bodies.items()
        }
        self._pool = shared_pool(threads)
        self._calls_users = any(_is_custom(step.op) for step in artifact.fallbacks)
        """Whether a run calls a custom op, which may run this program again."""
        self._lock = RunLock()
        self._reset_memory()

    @property
    def description(self) -> str:
        """Where the graph runs, for people."""
        threads = self._pool.threads
        return f"on the CPU with {threads} thread{'s' if threads > 1 else ''}"

    @property
    def fallbacks(self) -> Iterator[InterpreterFallback]:
        """The interpreter fallbacks of the graph and its bodies."""
        return self.artifact.fallbacks

    @property
    def memory_bytes(self) -> int:
        """Bytes of object code, constants and, after a run, the arena; bodies included."""
        inner = sum(
            body.memory_bytes for bodies in self._bodies.values() for body in bodies.values()
        )
        return self.artifact.nbytes + int(self._plans.arena.nbytes) + inner

    def copy(self) -> Program:
        """A program with the same code, its own arena and its own states."""
        twin = Program(self.graph, self.target, self._pool.threads, self.artifact)
        with self._lock.held():
            twin.states.update({name: array.copy() for name, array in self.states.items()})
        return twin

    def run(
        self,
        feeds: Mapping[str, Any],
        out: Mapping[str, Array] | None = None,
        watch: Stopwatch | None = None,
        outer: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Outputs by name. Arrays in `out` are written in place and returned.

        `outer` holds the sizes of the graph around a body.
        """
        given = [
            as_array(feeds[v.name]) if is_tensor else feeds[v.name]
            for v, is_tensor in self._input_is_tensor
        ]
        if not self._lock.acquire(waits=bool(self._state_buffers) or not self._calls_users):
            return self._run_nested(feeds, out, watch, outer)
        try:
            return self._run_locked(given, out or {}, watch, outer or {})
        except MemoryError:
            raise RunError("there is not enough memory for the run") from None
        finally:
            self._lock.release()

    def profile(self, feeds: Mapping[str, Any], rounds: int) -> Profile:
        """The time of each step; states do not change."""
        from bitwright.backends.cpu.profile.steps import Stopwatch

        before = {name: array.copy() for name, array in self.states.items()}
        watch, whole = Stopwatch(self._pool, rounds), []
        for _ in range(rounds):
            for _ in range(3):  # consecutive runs, so that threads and caches are warm
                begin = time.perf_counter()
                self.run(feeds)
                whole.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            self.run(feeds, watch=watch)
            watch.end_run(time.perf_counter() - begin)
        self.states.clear()
        self.states.update(before)
        outside = min(whole) - sum(timed.seconds for timed in watch.steps)
        overhead = min(watch.overhead, max(0.0, outside))  # a busy machine increases both
        facts = watch.barrier, self._pool.threads, watch.bindings
        return Profile(watch.steps, min(whole), overhead, *facts)

    # choosing the memory of a run

    def _run_locked(
        self,
        given: Sequence[Any],
        out: Mapping[str, Array],
        watch: Stopwatch | None,
        outer: Mapping[str, int],
    ) -> dict[str, Any]:
        if self._lock.was_interrupted:
            self._reset_memory()
        shapes = self._shapes(given, outer)
        run = self._prepared(shapes, given, outer)
        try:
            return self._run(run, given, out, watch)
        except (SizeMismatchError, BitwrightError):
            if not run.is_speculative:
                raise
            self._plans.drop(shapes)
        return self._run(self._prepared(shapes, given, outer), given, out, watch)

    def _run_nested(
        self,
        feeds: Mapping[str, Any],
        out: Mapping[str, Array] | None,
        watch: Stopwatch | None,
        outer: Mapping[str, int] | None,
    ) -> dict[str, Any]:
        """A run while another one is in progress; it uses separate memory."""
        if self._state_buffers:
            raise RunError(
                "a run of this executable is under way in this thread and uses its state",
                where=f"graph {self.graph.name!r}",
                hint="Compile the model again for runs that one of its custom ops starts.",
            )
        program = self._spares.pop() if self._spares else self._twin()
        program.observe = self.observe
        try:
            return program.run(feeds, out, watch, outer)
        finally:
            self._spares.append(program)

    def _twin(self) -> Program:
        """A program with the same code and its own memory."""
        twin = copy(self)
        twin._lock = RunLock()
        twin._reset_memory()
        return twin

    def _reset_memory(self) -> None:
        """Replace all memory except states."""
        self._lock.was_interrupted = False
        self._fault = np.zeros(2, np.int64)
        self._plans = RunPlans(self._code, bool(self._state_buffers))
        self._spares: list[Program] = []
        """Programs with the same code for nested runs."""

    def _shapes(self, given: Sequence[Any], outer: Mapping[str, int]) -> Any:
        """The key of a prepared run: types and shapes of inputs, and sizes from outside."""
        key: tuple[Any, ...] = tuple(
            [
                (array.dtype, array.shape) if is_tensor else None
                for array, (_, is_tensor) in zip(given, self._input_is_tensor, strict=True)
            ]
        )
        return (key, *sorted(outer.items())) if outer else key

    def _prepared(self, shapes: Any, given: Sequence[Any], outer: Mapping[str, int]) -> PreparedRun:
        found = self._plans.find(shapes)
        if found is None:
            bindings = dict(outer)
            bind_inputs(self.graph.inputs, given, bindings)
            found = self._plans.add(shapes, bindings, self._pool)
        return found

    # running

    def _run(
        self,
        run: PreparedRun,
        given: Sequence[Any],
        out: Mapping[str, Array],
        watch: Stopwatch | None,
    ) -> dict[str, Any]:
        objects: dict[Value, Any] = dict(zip(self.graph.inputs, given, strict=True))
        memory = run.memory
        checked: set[Node] = set()
        self._set_inputs(memory, given)
        results = self._set_outputs(run, disjoint_from(out, given) if out else {})
        for segment in run.segments:
            if isinstance(segment, StepTable):
                self._run_native(segment, memory, watch)
            elif isinstance(segment, KernelSegment):
                self._code.checks.ready(memory.bindings, checked)
                self._run_native(self._fill_table(segment, memory), memory, watch)
            else:
                begin = time.perf_counter()
                self._run_in_python(segment, run, objects)
                if watch is not None:
                    watch.add(segment, time.perf_counter() - begin)
        if watch is not None:
            watch.bindings = dict(memory.bindings)
        if not self._is_planned and not run.is_speculative:
            self._plans.record(run, self._pool)
        if not out and self._is_planned and self._has_only_buffers:
            return results
        return self._collect(memory, objects, results, out)

    def _set_inputs(self, memory: Memory, given: Sequence[Any]) -> None:
        for array, buffer in zip(given, self._input_buffers, strict=True):
            if buffer is None:
                continue
            if array.nbytes <= SMALL and buffer not in self._shown:
                memory.give_small(buffer, array)
            else:
                memory.give(buffer, np.ascontiguousarray(array))
        token = token_of(self.states)
        if memory.states_token is not token:
            for buffer in self._state_buffers:
                memory.give(buffer, self._state(buffer, memory))
            memory.states_token = token_of(self.states)
        memory.give(self._fault_buffer, self._fault)

    def _state(self, buffer: Buffer, memory: Memory) -> Array:
        """The array of a state: kernels write to it, so it must be what they expect."""
        value = self.graph.values[buffer.name]
        shape = value.tensor.concrete(memory.bindings)
        found = self.states.get(buffer.name)
        if found is None:
            return self._new_state(buffer, shape)
        if found.shape != shape or found.dtype != buffer.dtype.numpy:
            raise RunError(
                f"state {buffer.name!r} has another type than this run needs",
                where=f"graph {self.graph.name!r}",
                expected=f"{buffer.dtype}{list(shape)}",
                found=f"{found.dtype}{list(found.shape)}",
                hint="`reset()` starts again from the initial values.",
            )
        if not (found.flags.c_contiguous and found.flags.writeable):
            found = self.states[buffer.name] = np.array(found, order="C")
        return found

    def _new_state(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        initial = self.graph.values[buffer.name].node.attrs.get("value")
        require_room(shape, buffer.dtype.numpy.itemsize, f"state {buffer.name!r}")
        array = self.states[buffer.name] = new_zeros(shape, buffer.dtype.numpy)
        if initial is not None:
            array[...] = initial
        return array

    def _set_outputs(self, run: PreparedRun, out: Mapping[str, Array]) -> dict[str, Any]:
        """Arrays for the outputs, set as their buffers."""
        arrays: dict[str, Any] = {}
        for name, buffer, shape, element in run.outputs:
            array = out.get(name)
            if array is None:
                array = new_array(shape, element)
            else:
                check_out(name, array, shape, element)
            run.memory.give(buffer, array)
            arrays[name] = array
        return arrays

    def _run_native(self, table: StepTable, memory: Memory, watch: Stopwatch | None) -> None:
        table.set_addresses()
        if watch is None:
            self._pool.run(table.address, table.count, table.is_alone)
        else:
            watch.run(table)
        if self._fault[0]:
            raise self._take_fault(memory.bindings)

    def _take_fault(self, bindings: Mapping[str, int]) -> RunError:
        """The error that a kernel recorded."""
        fault = self.artifact.faults[int(self._fault[0])]
        index, self._fault[:] = int(self._fault[1]), 0
        if fault.parameter:
            return NonFiniteError(f"the gradient of {fault.parameter!r} is not finite")
        expected = None
        if fault.indexed is not None:
            expected = f"an index of a tensor of shape {list(fault.indexed.concrete(bindings))}"
        return RunError(f"index {index} is outside", where=fault.where, expected=expected)

    def _fill_table(self, segment: KernelSegment, memory: Memory) -> StepTable:
        """The table of steps whose sizes are known by now; allocates their outputs."""
        for step in segment.steps:
            for buffer in step.writes:
                if buffer.storage is Storage.OUTPUT:
                    outputs = self.schedule.outputs.items()
                    name, view = next(pair for pair in outputs if pair[1].buffer is buffer)
                    shape = concrete(view.shape, memory.bindings)
                    require_room(shape, buffer.dtype.numpy.itemsize, f"output {name!r}")
                    memory.give(buffer, new_array(shape, buffer.dtype.numpy))
        return StepTable(segment, memory, self._pool.small_bytes())

    def _run_in_python(self, step: PythonStep, run: PreparedRun, objects: dict[Value, Any]) -> None:
        if isinstance(step, SizeStep):
            read_sizes(step, run)
            return
        runners = {} if self.observe is not None else self._bodies.get(step.node, {})
        run_node_step(step, run, objects, self._is_planned, self.observe, runners)

    def _collect(
        self,
        memory: Memory,
        objects: Mapping[Value, Any],
        results: Mapping[str, Array],
        out: Mapping[str, Array],
    ) -> dict[str, Any]:
        """All outputs by name; copies those that could not be written to `out` directly."""
        answer: dict[str, Any] = {}
        for name, value in self.graph.outputs:
            view = self.schedule.outputs.get(name)
            if view is None:
                answer[name] = object_of(value, objects)
            else:
                found = results[name] if name in results else memory.array(view)
                if name in out and found is not out[name]:
                    check_out(name, out[name], found.shape, found.dtype)
                    out[name][...] = found
                answer[name] = out.get(name, found)
        return answer


def _is_custom(node: Node) -> bool:
    """Whether a node is a custom op or has one in a body."""
    inner = (n for body in node.bodies.values() for n in body.nodes)
    return node.op == "custom" or any(map(_is_custom, inner))
