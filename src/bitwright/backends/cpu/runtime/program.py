"""A compiled graph: its schedule, its machine code, and how a run goes.

For one set of sizes everything is prepared once: the arena is planned and every kernel call's slots
are filled. A run then sets the addresses of inputs and outputs and calls the native runner, once
per stretch of kernel calls between host steps; inputs of types and shapes that were seen before are
not checked again. Where the data decides sizes, the steps behind are prepared as the sizes get
known; once two runs in a row found the same sizes, the next is prepared for them, and begins anew
without if it finds others.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.backends.cpu.codegen.jit import Library
from bitwright.backends.cpu.lowering.artifact import Code
from bitwright.backends.cpu.runtime.memory import Grown, Memory, Planned, allocate, new_array
from bitwright.backends.cpu.runtime.pool import shared_pool
from bitwright.backends.cpu.runtime.steps import KernelSegment, StepTable, segments_of
from bitwright.backends.cpu.runtime.turns import Turns
from bitwright.backends.outputs import apart_from, check_out
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.allocation import require_room
from bitwright.ir.arrays import as_array
from bitwright.ir.dim import Sizes, evaluate
from bitwright.ir.feeds import bind_input, solve
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import Buffer, Place
from bitwright.lir.plan import Planner
from bitwright.lir.schedule import InterpreterFallback, NodeStep, SizeStep
from bitwright.target import Target

if TYPE_CHECKING:
    from bitwright.backends.cpu.profile.steps import Profile, Stopwatch  # it imports the emitter
    from bitwright.ops.core.interpret import Observer

Array = np.ndarray[Any, Any]
KEPT_PLANS = 16


@dataclass(frozen=True)
class _Ready:
    """What is known of a run before it begins."""

    memory: Memory
    segments: Sequence[Any]
    outputs: Sequence[tuple[str, Buffer, tuple[int, ...], np.dtype[Any]]]
    key: Any = None
    is_guess: bool = False
    """Whether the data may still decide other sizes."""


class _OtherSizesError(Exception):
    """The data decided other sizes than the run was prepared for."""


class Program:
    """Runs one graph on one target with a fixed number of threads."""

    def __init__(
        self, graph: Graph, target: Target, threads: int, code: Code | None = None
    ) -> None:
        """`code` is what the graph was lowered to before; without it, that is done now."""
        if code is None:
            from bitwright.backends.cpu.lowering.build import (
                build,  # the compiler is slow to import
            )

            code = build(graph, target)
        self.graph, self.target, self.code = graph, target, code
        self.schedule, self.kernels = code.schedule, code.kernels
        self._library = Library(code.objects, target)
        self._addresses = {name: self._library.address(name) for name in self.kernels}
        self._signatures = {name: kernel.signature for name, kernel in self.kernels.items()}
        self._fed = [(value, isinstance(value.type, TensorType)) for value in graph.inputs]
        entered = {b.name: b for b in self.schedule.buffers if b.place is Place.INPUT}
        self._entered = [entered.get(value.name) for value in graph.inputs]
        self._fault_buffer = code.fault_buffer
        self._held = [
            b
            for b in self.schedule.buffers
            if b.place is Place.STATE and b is not self._fault_buffer
        ]
        self.states: dict[str, Array] = {}
        self.observe: Observer | None = None  # sees what host steps make inside their bodies
        self._is_planned, self._sizes = code.is_planned, code.checks
        self._is_plain = self._is_planned and len(self.schedule.outputs) == len(graph.outputs)
        self._bodies = {
            node: {
                name: Program(graph.values[node].node.attrs[name], target, threads, body)
                for name, body in bodies.items()
            }
            for node, bodies in code.bodies.items()
        }
        self._pool = shared_pool(threads)
        self._calls_users = any(_is_custom(step.op) for step in code.fallbacks)
        """Whether a run calls functions that users wrote, which may run this program again."""
        self._turns = Turns()
        self._forget_runs()

    @property
    def place(self) -> str:
        """Where it runs, in words."""
        threads = self._pool.threads
        return f"on the CPU with {threads} thread{'s' if threads > 1 else ''}"

    def copy(self) -> Program:
        """The same code with an arena and states of its own."""
        twin = Program(self.graph, self.target, self._pool.threads, self.code)
        with self._turns.held():
            twin.states.update({name: array.copy() for name, array in self.states.items()})
        return twin

    def run(
        self,
        feeds: Mapping[str, Any],
        out: Mapping[str, Array] | None = None,
        watch: Stopwatch | None = None,
        outer: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Outputs by name. Arrays in `out` are written in place and given back.

        `outer` holds the sizes of the graph around a body.
        """
        given = [
            as_array(feeds[v.name]) if is_tensor else feeds[v.name] for v, is_tensor in self._fed
        ]
        if not self._turns.begin(waits=bool(self._held) or not self._calls_users):
            return self._beside(feeds, out, watch, outer)
        try:
            return self._alone(given, out or {}, watch, outer or {})
        except MemoryError:
            raise RunError("there is not enough memory for the run") from None
        finally:
            self._turns.end()

    def _alone(
        self,
        given: Sequence[Any],
        out: Mapping[str, Array],
        watch: Stopwatch | None,
        outer: Mapping[str, int],
    ) -> dict[str, Any]:
        """A run while no other one uses this program's memory."""
        if self._turns.was_cut_off:
            self._forget_runs()
        shapes = self._shapes(given, outer)
        ready = self._ready_for(shapes, given, outer)
        try:
            return self._run(ready, given, out, watch)
        except (_OtherSizesError, BitwrightError):
            if not ready.is_guess:
                raise
            del self._ready[shapes]
        ready = self._ready_for(shapes, given, outer)
        return self._run(ready, given, out, watch)

    def _beside(
        self,
        feeds: Mapping[str, Any],
        out: Mapping[str, Array] | None,
        watch: Stopwatch | None,
        outer: Mapping[str, int] | None,
    ) -> dict[str, Any]:
        """A run inside or beside another one, in memory of its own."""
        if self._held:
            raise RunError(
                "a run of this executable is under way in this thread, and its state belongs to it",
                where=f"graph {self.graph.name!r}",
                hint="Compile the model again for runs that a custom op of its own starts.",
            )
        program = self._spares.pop() if self._spares else self._twin()
        program.observe = self.observe
        try:
            return program.run(feeds, out, watch, outer)
        finally:
            self._spares.append(program)

    def _twin(self) -> Program:
        """A program of the same code with memory of its own."""
        twin = copy(self)
        twin._turns = Turns()
        twin._forget_runs()
        return twin

    def _forget_runs(self) -> None:
        """Begin with fresh memory, as if nothing had run yet; states stay."""
        self._turns.was_cut_off = False
        self._fault = np.zeros(2, np.int64)
        self._arena = allocate(0)
        self._prepared: OrderedDict[Any, tuple[Planned, list[Any]]] = OrderedDict()
        self._ready: dict[Any, _Ready] = {}
        self._found: dict[Any, dict[str, int]] = {}
        """Sizes that the last run found, by types and shapes of its inputs."""
        self._spares: list[Program] = []
        """Programs of the same code for runs beside a run of this one."""

    def _run(
        self,
        ready: _Ready,
        given: Sequence[Any],
        out: Mapping[str, Array],
        watch: Stopwatch | None,
    ) -> dict[str, Any]:
        objects: dict[Value, Any] = dict(zip(self.graph.inputs, given, strict=True))
        memory = ready.memory
        seen: set[Node] = set()
        self._enter(ready, given)
        results = self._outputs(ready, apart_from(out, given) if out else {})
        for segment in ready.segments:
            if isinstance(segment, StepTable):
                self._native(segment, memory, watch)
            elif isinstance(segment, (NodeStep, SizeStep)):
                begin = time.perf_counter()
                self._in_python(segment, ready, objects)
                if watch is not None:
                    watch.took(segment, time.perf_counter() - begin)
            else:
                self._sizes.ready(memory.bindings, seen)
                self._native(self._lazy_table(segment, memory), memory, watch)
        if watch is not None:
            watch.bindings = dict(memory.bindings)
        if not self._is_planned and not ready.is_guess:
            self._remember(ready)
        if not out and self._is_plain:
            return results  # type: ignore[return-value]
        return self._finish(memory, objects, results, out)

    def profile(self, feeds: Mapping[str, Any], rounds: int) -> Profile:
        """How long each step takes; states are afterwards what they were before."""
        from bitwright.backends.cpu.profile.steps import Profile, Stopwatch

        before = {name: array.copy() for name, array in self.states.items()}
        watch, whole = Stopwatch(self._pool, rounds), []
        for _ in range(rounds):
            for _ in range(3):  # behind each other, so that threads and caches are awake
                begin = time.perf_counter()
                self.run(feeds)
                whole.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            self.run(feeds, watch=watch)
            watch.ended(time.perf_counter() - begin)
        self.states.clear()
        self.states.update(before)
        beside = min(whole) - sum(timed.seconds for timed in watch.steps)
        overhead = min(watch.overhead, max(0.0, beside))  # both err upwards on a busy machine
        facts = watch.meeting, self._pool.threads, watch.bindings
        return Profile(watch.steps, min(whole), overhead, *facts)

    @property
    def fallbacks(self) -> Iterator[InterpreterFallback]:
        """What runs in the interpreter, in the graph and in bodies."""
        return self.code.fallbacks

    # preparing

    @cached_property
    def _segments(self) -> list[NodeStep | SizeStep | KernelSegment]:
        """Runs of kernel calls, and the other steps between them."""
        return [
            KernelSegment(steps, self._addresses, self._signatures)
            if isinstance(steps, list)
            else steps
            for steps in segments_of(self.schedule)
        ]

    @cached_property
    def _planner(self) -> Planner:
        return Planner(self.schedule)

    def _shapes(self, given: Sequence[Any], outer: Mapping[str, int]) -> Any:
        """What inputs have in common that need the same preparation."""
        key: tuple[Any, ...] = tuple(
            [
                (array.dtype, array.shape) if is_tensor else None
                for array, (_, is_tensor) in zip(given, self._fed, strict=True)
            ]
        )
        if outer:  # a body's inputs need not fix sizes that the graph around it fixes
            key = (key, *sorted(outer.items()))
        return key

    def _ready_for(self, shapes: Any, given: Sequence[Any], outer: Mapping[str, int]) -> _Ready:
        """What these inputs need; looked at closely where one has another type or shape."""
        ready = self._ready.get(shapes)
        if ready is None:
            bindings = dict(outer)
            for _ in range(2):  # a second look checks sizes that a later input fixed
                for array, (value, _) in zip(given, self._fed, strict=True):
                    bind_input(value, array, bindings)
            if not self._is_planned:
                return _Ready(Grown(bindings), self._segments, (), shapes)
            ready = self._prepare(bindings)
            self._ready[shapes] = ready
        self._prepared.move_to_end(ready.key)
        return ready

    def _remember(self, ready: _Ready) -> None:
        """Prepare for the sizes that a run found, if the run before it found the same."""
        found = dict(ready.memory.bindings)
        if self._found.get(ready.key) == found and not self._held:
            with suppress(RunError):  # one arena for all of it may be more than there is
                self._ready[ready.key] = replace(self._prepare(found), is_guess=True)
        while len(self._found) >= KEPT_PLANS:
            del self._found[next(iter(self._found))]
        self._found[ready.key] = found

    def _prepare(self, bindings: dict[str, int]) -> _Ready:
        key = tuple(sorted(bindings.items()))
        if key not in self._prepared:
            bindings = Sizes(bindings)
            self._sizes.verify(bindings)
            self._check_outputs(bindings)
            layout = self._planner.plan(bindings)
            if layout.total > self._arena.nbytes:
                self._arena = allocate(layout.total)
                self._prepared.clear()  # they point into the arena that was
                self._ready.clear()
            memory = Planned(bindings, layout, self._arena)
            self._prepared[key] = (
                memory,
                [
                    self._table(s, memory) if isinstance(s, KernelSegment) else s
                    for s in self._segments
                ],
            )
            while len(self._prepared) > KEPT_PLANS:
                self._prepared.popitem(last=False)
            self._ready.clear()  # what was dropped must not be used again
        memory, segments = self._prepared[key]
        outputs = [
            (name, view.buffer, _concrete(view.shape, bindings), view.dtype.numpy)
            for name, view in self.schedule.outputs.items()
        ]
        return _Ready(memory, segments, outputs, key)

    def _check_outputs(self, bindings: Mapping[str, int]) -> None:
        """Raise a `RunError` if a result is larger than a tensor may be."""
        for name, view in self.schedule.outputs.items():
            shape = _concrete(view.shape, bindings)
            require_room(shape, view.dtype.numpy.itemsize, f"output {name!r}")

    def _table(self, segment: KernelSegment, memory: Memory) -> StepTable:
        return StepTable(segment, memory, self._pool.small_bytes())

    def _enter(self, ready: _Ready, given: Sequence[Any]) -> None:
        memory = ready.memory
        for array, buffer in zip(given, self._entered, strict=True):
            if buffer is not None:
                memory.give(buffer, np.ascontiguousarray(array))
        for buffer in self._held:
            memory.give(buffer, self._state(buffer, memory))
        memory.give(self._fault_buffer, self._fault)

    def _state(self, buffer: Buffer, memory: Memory) -> Array:
        if buffer.name not in self.states:
            value = self.graph.values[buffer.name]
            initial = value.node.attrs.get("value")
            shape = value.tensor.concrete(memory.bindings)
            require_room(shape, buffer.dtype.numpy.itemsize, f"state {buffer.name!r}")
            array = new_array(shape, buffer.dtype.numpy)
            array[...] = 0 if initial is None else initial
            self.states[buffer.name] = array
        return self.states[buffer.name]

    def _outputs(self, ready: _Ready, out: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays for the outputs, set as their buffers."""
        arrays: dict[str, Array] = {}
        for name, buffer, shape, element in ready.outputs:
            array = out.get(name)
            if array is None:
                array = new_array(shape, element)
            else:
                check_out(name, array, shape, element)
            ready.memory.give(buffer, array)
            arrays[name] = array
        return arrays

    # running

    def _native(self, table: StepTable, memory: Memory, watch: Stopwatch | None) -> None:
        table.set_addresses()
        if watch is None:
            self._pool.run(table.address, table.count, table.is_alone)
        else:
            watch.run(table)
        if self._fault[0]:
            raise self._take_fault(memory.bindings)

    def _take_fault(self, bindings: Mapping[str, int]) -> RunError:
        """The error for what a kernel noted: an index that it could not use."""
        fault = self.code.faults[int(self._fault[0])]
        index, self._fault[:] = int(self._fault[1]), 0
        expected = None
        if fault.indexed is not None:
            expected = f"an index of a tensor of shape {list(fault.indexed.concrete(bindings))}"
        return RunError(f"index {index} is outside", where=fault.where, expected=expected)

    def _lazy_table(self, segment: KernelSegment, memory: Memory) -> StepTable:
        """A table for steps whose sizes are known by now; their results get memory here."""
        for step in segment.steps:
            for buffer in step.writes:
                if buffer.place is Place.OUTPUT:
                    outputs = self.schedule.outputs.items()
                    name, view = next(pair for pair in outputs if pair[1].buffer is buffer)
                    shape = _concrete(view.shape, memory.bindings)
                    require_room(shape, buffer.dtype.numpy.itemsize, f"output {name!r}")
                    memory.give(buffer, new_array(shape, buffer.dtype.numpy))
        return self._table(segment, memory)

    def _in_python(
        self, step: NodeStep | SizeStep, ready: _Ready, objects: dict[Value, Any]
    ) -> None:
        if isinstance(step, NodeStep):
            self._host(step, ready, objects)
        else:
            self._read_sizes(step, ready)

    def _host(self, step: NodeStep, ready: _Ready, objects: dict[Value, Any]) -> None:
        from bitwright.ops.core.interpret import run_node  # most programs need no interpreter

        memory, arrays = ready.memory, []
        for value, view in zip(step.op.inputs, step.inputs, strict=True):
            if view is not None:
                arrays.append(memory.array(view))
            else:
                arrays.append(None if value is None else _held_object(value, objects))
        if None in step.outputs:  # a sequence keeps its items beyond this run of the arena
            arrays = [a.copy() if isinstance(a, np.ndarray) else a for a in arrays]
        # who looks into bodies sees what the interpreter makes of them
        runners = {} if self.observe is not None else self._bodies.get(step.node, {})
        results = run_node(step.op, arrays, memory.bindings, self.observe, runners)
        for value, view, result in zip(step.op.outputs, step.outputs, results, strict=True):
            if view is None:
                objects[value] = result
                continue
            for size, actual in zip(view.shape, result.shape, strict=True):
                fits = solve(size, actual, memory.bindings)  # type: ignore[arg-type]
                if ready.is_guess and not fits:
                    raise _OtherSizesError
            if view.buffer.place is Place.OUTPUT and not (self._is_planned or ready.is_guess):
                memory.give(view.buffer, np.array(result))
            else:
                memory.array(view)[...] = result

    def _read_sizes(self, step: SizeStep, ready: _Ready) -> None:
        memory, where = ready.memory, step.where
        try:
            found = step.read([memory.array(view) for view in step.inputs], memory.bindings)
        except BitwrightError as error:
            raise RunError(str(error), where=where) from None
        except (ValueError, ArithmeticError) as error:  # a size that is no number, or infinite
            raise RunError(f"its sizes cannot be computed: {error}", where=where) from error
        for size, actual in zip(step.sizes, found, strict=True):
            if not solve(size, actual, memory.bindings):  # type: ignore[arg-type]
                if ready.is_guess:
                    raise _OtherSizesError
                raise RunError("has another size", where=where, expected=size, found=actual)

    def _finish(
        self,
        memory: Memory,
        objects: Mapping[Value, Any],
        results: dict[str, Array],
        out: Mapping[str, Array],
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for name, value in self.graph.outputs:
            view = self.schedule.outputs.get(name)
            if view is None:
                answer[name] = _held_object(value, objects)
            else:
                found = results[name] if name in results else memory.array(view)
                if name in out and found is not out[name]:
                    check_out(name, out[name], found.shape, found.dtype)
                    out[name][...] = found
                answer[name] = out.get(name, found)
        return answer


def _concrete(shape: tuple[Any, ...], bindings: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, bindings) for size in shape)


def _is_custom(node: Node) -> bool:
    """Whether a node calls a function that users wrote, itself or in a body."""
    inner = (n for body in node.bodies.values() for n in body.nodes)
    return node.op == "custom" or any(map(_is_custom, inner))


def _held_object(value: Value, objects: Mapping[Value, Any]) -> Any:
    if value in objects:
        return objects[value]
    return value.node.attrs["value"]
