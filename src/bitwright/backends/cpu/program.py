"""A compiled graph: its schedule, its machine code, and how a run goes.

For one set of sizes everything is prepared once: the arena is planned and every kernel call's slots
are filled. A run then sets the addresses of inputs and outputs and calls the native runner, once
per stretch of kernel calls between host steps; inputs of types and shapes that were seen before are
not checked again. Where the data decides sizes, the steps behind are prepared as the sizes get
known; once two runs in a row found the same sizes, the next is prepared for them, and begins anew
without if it finds others.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.backends.cpu.code import Code
from bitwright.backends.cpu.jit import Library
from bitwright.backends.cpu.memory import Grown, Memory, Planned, allocate, new_array
from bitwright.backends.cpu.pool import shared_pool
from bitwright.backends.cpu.steps import StepTable, Stretch
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.arrays import as_array
from bitwright.ir.dim import Sizes, evaluate
from bitwright.ir.feeds import bind_input, solve
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import Buffer, Place
from bitwright.lir.plan import Planner
from bitwright.lir.schedule import HostStep, KernelStep, NodeStep, Schedule, SizeStep
from bitwright.target import Target

if TYPE_CHECKING:
    from bitwright.backends.cpu.profile import Profile, Stopwatch  # it imports the emitter
    from bitwright.ops.interpret import Observer

Array = np.ndarray[Any, Any]
KEPT_PLANS = 16


@dataclass(frozen=True)
class _Ready:
    """What is known of a run before it begins."""

    memory: Memory
    stretches: Sequence[Any]
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
            from bitwright.backends.cpu.build import build  # the compiler is slow to import

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
        self._fault = np.zeros(2, np.int64)
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
        self._arena = allocate(0)
        self._prepared: OrderedDict[Any, tuple[Planned, list[Any]]] = OrderedDict()
        self._ready: dict[Any, _Ready] = {}
        self._found: dict[Any, dict[str, int]] = {}
        """Sizes that the last run found, by types and shapes of its inputs."""
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        """Where it runs, in words."""
        threads = self._pool.threads
        return f"on the CPU with {threads} thread{'s' if threads > 1 else ''}"

    def copy(self) -> Program:
        """The same code with an arena and states of its own."""
        twin = Program(self.graph, self.target, self._pool.threads, self.code)
        with self._lock:
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
        with self._lock:
            shapes = self._shapes(given, outer or {})
            ready = self._ready_for(shapes, given, outer or {})
            try:
                return self._run(ready, given, out or {}, watch)
            except (_OtherSizesError, BitwrightError):
                if not ready.is_guess:
                    raise
                del self._ready[shapes]
            ready = self._ready_for(shapes, given, outer or {})
            return self._run(ready, given, out or {}, watch)

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
        results = self._outputs(ready, _apart(out, given) if out else {})
        for stretch in ready.stretches:
            if isinstance(stretch, StepTable):
                self._native(stretch, memory, watch)
            elif isinstance(stretch, (NodeStep, SizeStep)):
                begin = time.perf_counter()
                self._in_python(stretch, ready, objects)
                if watch is not None:
                    watch.took(stretch, time.perf_counter() - begin)
            else:
                self._sizes.ready(memory.bindings, seen)
                self._native(self._lazy_table(stretch, memory), memory, watch)
        if watch is not None:
            watch.bindings = dict(memory.bindings)
        if not self._is_planned and not ready.is_guess:
            self._remember(ready)
        if not out and self._is_plain:
            return results  # type: ignore[return-value]
        return self._finish(memory, objects, results, out)

    def profile(self, feeds: Mapping[str, Any], rounds: int) -> Profile:
        """How long each step takes; states are afterwards what they were before."""
        from bitwright.backends.cpu.profile import Profile, Stopwatch

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
    def host_steps(self) -> Iterator[HostStep]:
        """What runs in the interpreter, in the graph and in bodies."""
        return self.code.host_steps

    # preparing

    @cached_property
    def _stretches(self) -> list[NodeStep | SizeStep | Stretch]:
        """Runs of kernel calls, and the other steps between them."""
        return [
            Stretch(steps, self._addresses, self._signatures) if isinstance(steps, list) else steps
            for steps in _stretches(self.schedule)
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
                return _Ready(Grown(bindings), self._stretches, (), shapes)
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
            layout = self._planner.plan(bindings)
            if layout.total > self._arena.nbytes:
                self._arena = allocate(layout.total)
                self._prepared.clear()  # they point into the arena that was
                self._ready.clear()
            memory = Planned(bindings, layout, self._arena)
            self._prepared[key] = (
                memory,
                [self._table(s, memory) if isinstance(s, Stretch) else s for s in self._stretches],
            )
            while len(self._prepared) > KEPT_PLANS:
                self._prepared.popitem(last=False)
            self._ready.clear()  # what was dropped must not be used again
        memory, stretches = self._prepared[key]
        outputs = [
            (name, view.buffer, _concrete(view.shape, bindings), view.dtype.numpy)
            for name, view in self.schedule.outputs.items()
        ]
        return _Ready(memory, stretches, outputs, key)

    def _table(self, stretch: Stretch, memory: Memory) -> StepTable:
        return StepTable(stretch, memory, self._pool.small_bytes())

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
            start = np.zeros(shape, buffer.dtype.numpy) if initial is None else initial
            self.states[buffer.name] = np.array(start)
        return self.states[buffer.name]

    def _outputs(self, ready: _Ready, out: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays for the outputs, set as their buffers."""
        arrays: dict[str, Array] = {}
        for name, buffer, shape, element in ready.outputs:
            array = out.get(name)
            if array is None:
                array = new_array(shape, element)
            else:
                _check_out(name, array, shape, element)
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

    def _lazy_table(self, stretch: Stretch, memory: Memory) -> StepTable:
        """A table for steps whose sizes are known by now; their results get memory here."""
        for step in stretch.steps:
            for buffer in step.writes:
                if buffer.place is Place.OUTPUT:
                    view = next(v for v in self.schedule.outputs.values() if v.buffer is buffer)
                    shape = _concrete(view.shape, memory.bindings)
                    memory.give(buffer, np.empty(shape, buffer.dtype.numpy))
        return self._table(stretch, memory)

    def _in_python(
        self, step: NodeStep | SizeStep, ready: _Ready, objects: dict[Value, Any]
    ) -> None:
        if isinstance(step, NodeStep):
            self._host(step, ready, objects)
        else:
            self._read_sizes(step, ready)

    def _host(self, step: NodeStep, ready: _Ready, objects: dict[Value, Any]) -> None:
        from bitwright.ops.interpret import run_node  # most programs need no interpreter

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
                    _check_out(name, out[name], found.shape, found.dtype)
                    out[name][...] = found
                answer[name] = out.get(name, found)
        return answer


def _concrete(shape: tuple[Any, ...], bindings: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, bindings) for size in shape)


def _held_object(value: Value, objects: Mapping[Value, Any]) -> Any:
    if value in objects:
        return objects[value]
    return value.node.attrs["value"]


def _apart(out: Mapping[str, Array], inputs: Iterable[Any]) -> dict[str, Array]:
    """The arrays for outputs that lie in no input: those can be written while inputs are read."""
    read = [array for array in inputs if isinstance(array, np.ndarray)]
    return {
        name: array
        for name, array in out.items()
        if not any(np.may_share_memory(array, other) for other in read)
    }


def _check_out(name: str, array: Array, shape: tuple[int, ...], element: Any) -> None:
    fits = array.shape == shape and array.dtype == element and array.flags.c_contiguous
    if not fits or not array.flags.writeable:
        raise RunError(
            f"the array given for output {name!r} does not fit",
            expected=f"{element} {list(shape)}, contiguous and writeable",
            found=f"{array.dtype} {list(array.shape)}",
        )


def _stretches(schedule: Schedule) -> Iterator[NodeStep | SizeStep | list[KernelStep]]:
    """Runs of kernel calls, and the other steps between them."""
    steps: list[KernelStep] = []
    for step in schedule.steps:
        if isinstance(step, KernelStep):
            steps.append(step)
            continue
        if steps:
            yield steps
            steps = []
        yield step
    if steps:
        yield steps
