"""A program prepared for one signature: sizes, memory and bound launches, as CUDA graphs where
possible.

Kernel launches between Python steps form segments. On a GPU, a segment of a planned run is
captured into a CUDA graph
in its second run (the first one compiles the kernels) and replayed from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bitwright.backends.gpu.requirements import load_torch
from bitwright.backends.gpu.runtime.capture import captured
from bitwright.backends.gpu.runtime.kernels import KernelError, KernelTable
from bitwright.backends.gpu.runtime.launch import Kernel
from bitwright.backends.gpu.runtime.memory import DeviceMemory, is_out_of_memory
from bitwright.errors import BitwrightError, RunError
from bitwright.ir.dim import evaluate
from bitwright.ir.feeds import solve
from bitwright.ir.graph import Node, Value
from bitwright.lir.schedule import (
    KernelStep,
    NodeStep,
    Schedule,
    SizeStep,
)

Array = np.ndarray[Any, Any]


@dataclass
class Launch:
    """One kernel call with its arguments."""

    step: KernelStep
    kernel: Kernel
    tensors: Mapping[str, Any]
    sizes: Mapping[str, int]

    def __call__(self) -> None:
        self.kernel.launch(self.tensors, self.sizes)


@dataclass
class Segment:
    """Launches without a Python step between them."""

    steps: list[KernelStep]
    launches: list[Launch] = field(default_factory=list)
    graph: Any = None
    runs: int = 0


class PreparedRun:
    """The steps of a schedule for one set of sizes."""

    def __init__(
        self,
        schedule: Schedule,
        kernels: KernelTable,
        memory: DeviceMemory,
        captures: bool,
        is_planned: bool,
        checks: Any,
    ) -> None:
        self.schedule, self.kernels, self.memory = schedule, kernels, memory
        self.captures, self.is_planned, self._checks = captures, is_planned, checks
        self.objects: dict[Value, Any] = {}
        self._is_compiled = False
        self.segments: list[Segment | NodeStep | SizeStep] = []
        for step in schedule.steps:
            if not isinstance(step, KernelStep):
                self.segments.append(step)
            elif self.segments and isinstance(self.segments[-1], Segment):
                self.segments[-1].steps.append(step)
            else:
                self.segments.append(Segment([step]))

    def run(self, around: Callable[[Any, Callable[[], None]], None] | None = None) -> None:
        """All steps, on the current stream. `around(step, call)` runs each step in its place
        (profiles)."""
        checked: set[Node] = set()
        for segment in self.segments:
            if not self.is_planned:  # sizes become known on the way
                self._checks.ready(self.memory.bindings, checked)
            if isinstance(segment, Segment):
                self._run_segment(segment, around)
            elif isinstance(segment, SizeStep):
                self._read_sizes(segment)
            elif around is not None:
                around(segment, lambda step=segment: self._run_node(step))  # type: ignore[misc]
            else:
                self._run_node(segment)

    @property
    def whole_graph(self) -> Callable[[], None] | None:
        """Replays the whole run; None while it is not one captured graph."""
        if len(self.segments) != 1 or not isinstance(self.segments[0], Segment):
            return None
        segment = self.segments[0]
        if segment.graph is not None:
            return segment.graph.replay  # type: ignore[no-any-return]
        if self.captures or not self.is_planned or not segment.launches:
            return None

        def launch_all() -> None:
            for launch in segment.launches:
                launch()

        return launch_all

    def _run_segment(self, segment: Segment, around: Any) -> None:
        if not segment.launches or not self.is_planned:
            launches = []  # kept if all of them start
            if self.is_planned and not self._is_compiled:
                self._compile()
            for step in segment.steps:  # tuning sees the data of the run
                launches.append(self.bind(step))
                self._start(launches[-1])
            segment.launches = launches
            segment.runs += 1
            return
        if around is not None:
            for launch in segment.launches:
                around(launch.step, launch)
            return
        if segment.graph is not None:
            segment.graph.replay()
            return
        if self.captures:
            segment.graph = _capture(segment.launches)
            segment.graph.replay()
        else:
            for launch in segment.launches:
                launch()
        segment.runs += 1

    def _compile(self) -> None:
        """Compile the kernels of all steps, which need not wait for each other."""
        self._is_compiled = True
        steps = [step for step in self.schedule.steps if isinstance(step, KernelStep)]
        self.kernels.compile((step.kernel, *self.arguments(step)) for step in steps)

    def _start(self, launch: Launch) -> None:
        """The first launch, which compiles the kernel; another candidate replaces one that
        fails."""
        reasons = []
        for kernel in (launch.kernel, *self.kernels.others(launch.kernel)):
            launch.kernel = kernel
            try:
                launch()
                return
            except Exception as error:  # compilers raise errors of many types
                if kernel.is_interpreted or is_out_of_memory(error):
                    raise
                reasons.append(str(error).strip().split("\n")[-1][:200] or type(error).__name__)
        raise KernelError(launch.step.kernel, launch.step.node, reasons[0])

    def bind(self, step: KernelStep) -> Launch:
        """A kernel call with tensors and numbers."""
        tensors, sizes = self.arguments(step)
        return Launch(step, self.kernels.kernel(step.kernel, tensors, sizes), tensors, sizes)

    def arguments(self, step: KernelStep) -> tuple[dict[str, Any], dict[str, int]]:
        """The tensors and sizes of a step by name."""
        memory = self.memory
        sizes = {name: evaluate(size, memory.bindings) for name, size in step.sizes.items()}
        source = self.kernels.sources[step.kernel]
        tensors = {
            name: memory.tensor(view, source.pointers[name]) for name, view in step.pointers.items()
        }
        return tensors, sizes

    def _run_node(self, step: NodeStep) -> None:
        """Run a node on the CPU: its operands are copied to the host, its results to the device."""
        from bitwright.ops.core.interpret import run_node  # most programs need no interpreter

        memory = self.memory
        arrays: list[Any] = []
        for value, view in zip(step.op.inputs, step.inputs, strict=True):
            if view is not None:
                arrays.append(memory.download(view))
            else:
                arrays.append(None if value is None else self._object(value))
        results = run_node(step.op, arrays, memory.bindings, None, {})
        for value, view, result in zip(step.op.outputs, step.outputs, results, strict=True):
            if view is None:
                self.objects[value] = result
                continue
            array = np.asarray(result)
            for size, actual in zip(view.shape, array.shape, strict=True):
                solve(size, actual, memory.bindings)
            memory.upload(view, array)

    def _object(self, value: Value) -> Any:
        return self.objects[value] if value in self.objects else value.node.attrs["value"]

    def _read_sizes(self, step: SizeStep) -> None:
        arrays = [self.memory.download(view) for view in step.inputs]
        try:
            found = step.read(arrays, self.memory.bindings)
        except BitwrightError as error:
            raise RunError(str(error), where=step.where) from None
        except (ValueError, ArithmeticError) as error:
            raise RunError(f"its sizes cannot be computed: {error}", where=step.where) from error
        for size, actual in zip(step.sizes, found, strict=True):
            if not solve(size, actual, self.memory.bindings):
                raise RunError("has another size", where=step.where, expected=size, found=actual)


def _capture(launches: list[Launch]) -> Any:
    """A CUDA graph of launches whose kernels are compiled."""
    torch = load_torch()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with captured(stream) as graph:
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
