"""The schedule: kernel calls, interpreter fallbacks and other steps in order; and its verifier.

`str(schedule)` is for people and has no parser; `backends.cpu.cache.serialize` has the exact form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bitwright.errors import GraphError
from bitwright.ir.dim import Dim, Size
from bitwright.ir.graph import Graph, Node
from bitwright.lir.buffer import Array, Buffer, Storage, View


@dataclass(frozen=True)
class KernelStep:
    """One kernel call: the contents of its slots, the buffers it reads and writes."""

    kernel: str
    node: str
    pointers: Mapping[str, View]
    sizes: Mapping[str, Size]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    why: str = ""
    """Why this kernel was chosen."""

    @property
    def family(self) -> str:
        """The kernel's name without its digest."""
        return self.kernel.rpartition("_")[0]

    def __str__(self) -> str:
        slots = ", ".join(f"{name}={view}" for name, view in self.pointers.items())
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        why = f"  ## {self.why}" if self.why else ""
        return f"{self.kernel}({slots}) {{{sizes}}} for %{self.node}{why}"


@dataclass(frozen=True)
class NodeStep:
    """A node that runs on arrays; None stands for an absent operand or one that is not a tensor."""

    op: Node
    inputs: tuple[View | None, ...]
    outputs: tuple[View | None, ...]

    @property
    def node(self) -> str:
        return self.op.name

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return tuple(view.buffer for view in self.inputs if view is not None)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(view.buffer for view in self.outputs if view is not None)

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"{self.op.op}({inputs}) for %{self.node}"


@dataclass(frozen=True)
class InterpreterFallback(NodeStep):
    """A node that runs in the reference interpreter, and the reason."""

    why: str

    def __str__(self) -> str:
        return f"fallback {super().__str__()}  ## {self.why}"


@dataclass(frozen=True)
class ControlStep(NodeStep):
    """A control-flow node; it decides which of its compiled bodies run, and how often."""


@dataclass(frozen=True)
class SizeStep:
    """Data-dependent sizes that are read from small tensors."""

    node: str
    where: str
    """The node's location in its graph, for errors."""
    inputs: tuple[View, ...]
    sizes: tuple[Size, ...]
    """The symbolic sizes that the results of `read(arrays, bindings)` bind, in order."""
    read: Callable[[Sequence[Array], Mapping[str, int]], Sequence[int]]

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return tuple(view.buffer for view in self.inputs)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return ()

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        return f"sizes {', '.join(map(str, self.sizes))} from ({inputs}) for %{self.node}"


PythonStep = InterpreterFallback | ControlStep | SizeStep
Step = KernelStep | PythonStep


@dataclass
class Schedule:
    graph: Graph
    buffers: list[Buffer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: dict[str, View] = field(default_factory=dict)
    updates: dict[str, View] = field(default_factory=dict)

    @property
    def fallbacks(self) -> Iterator[InterpreterFallback]:
        return (step for step in self.steps if isinstance(step, InterpreterFallback))

    @property
    def symbols(self) -> set[str]:
        """The names of the symbols in buffer sizes."""
        sizes = (buffer.count for buffer in self.buffers)
        return {s.name for size in sizes if isinstance(size, Dim) for s in size.symbols}

    @property
    def owned(self) -> Iterator[Buffer]:
        """All buffers except constants."""
        return (buffer for buffer in self.buffers if buffer.storage is not Storage.CONSTANT)

    def step_lines(self) -> Iterator[str]:
        """Steps, outputs and updates as text, one line each."""
        yield from (f"{number:3} {step}" for number, step in enumerate(self.steps))
        yield from (f"return {name} = {view}" for name, view in self.outputs.items())
        yield from (f"update {name} = {view}" for name, view in self.updates.items())

    def __str__(self) -> str:
        lines = [*map(str, self.owned), *self.step_lines()]
        return "\n".join([f"schedule @{self.graph.name} {{", *(f"  {s}" for s in lines), "}"])


def verify_schedule(schedule: Schedule) -> Schedule:
    """Check that buffers are written before they are read, and that no input is written."""
    ready = {b for b in schedule.buffers if b.storage not in (Storage.ARENA, Storage.OUTPUT)}
    known = set(schedule.buffers)
    for number, step in enumerate(schedule.steps):
        where = f"schedule {schedule.graph.name!r}, step {number} for %{step.node}"
        for buffer in step.reads:
            if buffer not in ready and buffer not in step.writes:
                raise GraphError(f"reads {buffer.name} before it is written", where=where)
        for buffer in step.writes:
            if buffer not in known:
                raise GraphError(
                    f"writes {buffer.name}, which the schedule does not own", where=where
                )
            if buffer.storage in (Storage.INPUT, Storage.CONSTANT):
                raise GraphError(f"writes {buffer.name}, which is read only", where=where)
            ready.add(buffer)
    for name, view in (*schedule.outputs.items(), *schedule.updates.items()):
        if view.buffer not in ready:
            raise GraphError(f"result {name!r} is never written", where=schedule.graph.name)
    return schedule
