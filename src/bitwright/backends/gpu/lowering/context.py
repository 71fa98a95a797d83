"""Lowers a fused graph to a schedule of GPU kernels. Families register like those of the CPU
backend:

    @lowers("softmax")                            # the anchor of a region; "elementwise" has none
    def lower_softmax(ctx: GpuLowering, node: Node, region: RegionView) -> None:
        x = ctx.contiguous(node.inputs[0])        # or ctx.view(...): any strides; ctx.ordered(...)
        y = ctx.output(node.outputs[0])           # a new buffer; ctx.output(value, order) for NHWC
        kernel = ctx.kernel(KernelSource("softmax", body, {"x": f32, "y": f32}, ("rows",
        "columns"), ...))
        ctx.call(kernel, node, {"x": x, "y": y}, {"rows": rows, "columns": columns}, writes=("y",),
        why="...")

A lowering raises `NoKernelError(reason)` for a node that it does not accept; the node then runs on
the CPU as a
visible fallback, and `explain` prints the reason. Modules
`backends/gpu/kernels/<family>/lower_*.py` are imported
by `lowering.registered`; nothing else needs an edit.

The methods for views, constants (`ctx.constant(array, name)`), scratch buffers (`ctx.scratch(name,
"f32",
count)`), outputs and size checks are the CPU's `Lowering`. Sizes are ints or symbolic; the launch
evaluates them, so a
kernel is compiled for types and constants only. `ctx.machine` holds facts of the device:
capability,
multiprocessors, shared memory.

Weights that a kernel wants packed: `ctx.constant(packed_array, name)`; equal arrays share a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from bitwright.backends.cpu.lowering.context import (
    Lowering,
    NoKernelError,
    RegionView,
    region_of,
)
from bitwright.backends.gpu.codegen.source import KernelSource
from bitwright.backends.gpu.codegen.types import is_stored
from bitwright.errors import CompileError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import string
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import View
from bitwright.lir.schedule import KernelStep
from bitwright.target import host

__all__ = [
    "GpuLowering",
    "Machine",
    "NoKernelError",
    "RegionView",
    "defers",
    "lowers",
    "region_of",
]

Lower = Callable[["GpuLowering", Node, RegionView], None]
LOWERINGS: dict[str, Lower] = {}
Defers = Callable[["GpuLowering", Node, RegionView], bool]
DEFERRED: dict[str, Defers] = {}


@dataclass(frozen=True)
class Machine:
    """Facts of a device that choose kernels; `interpreted` means Triton's interpreter."""

    name: str = "interpreter"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    shared_bytes: int = 227 << 10
    l2_bytes: int = 50 << 20
    interpreted: bool = True

    @property
    def has_tma(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def has_f8(self) -> bool:
        return self.capability >= (8, 9)


def lowers(*ops: str) -> Callable[[Lower], Lower]:
    """Decorator that registers the lowering of ops."""

    def decorate(function: Lower) -> Lower:
        for op in ops:
            if op in LOWERINGS:
                raise CompileError(f"two GPU lowerings are registered for {op!r}")
            LOWERINGS[op] = function
        return function

    return decorate


def defers(*ops: str) -> Callable[[Defers], Defers]:
    """Decorator for a function that says whether all readers of a node compute it themselves. Such
    a node gets a kernel only if something needs its result in memory (`GpuLowering.view`)."""

    def decorate(function: Defers) -> Defers:
        DEFERRED.update(dict.fromkeys(ops, function))
        return function

    return decorate


class GpuLowering(Lowering):
    """Builds the schedule of one graph for one device."""

    lowerings = LOWERINGS  # type: ignore[assignment]

    def __init__(
        self, graph: Graph, machine: Machine, refused: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(graph, host())
        self.machine, self._refused = machine, refused or {}
        self.sources: dict[str, KernelSource] = {}
        self.deferred: dict[Value, Node] = {}
        """Nodes by their result, which their readers compute."""
        self.done: set[Node] = set()
        """Nodes whose results are computed by a kernel of an earlier node."""

    @cached_property
    def _readers(self) -> dict[Value, list[Node]]:
        found: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for value in dict.fromkeys(node.operands):
                found.setdefault(value, []).append(node)
        return found

    def readers(self, value: Value) -> list[Node]:
        """The nodes that read a value; none if a run keeps it."""
        return [] if value in self.graph.results else self._readers.get(value, [])

    def view(self, value: Value) -> View:
        """The view of a value, with any strides."""
        node = self.deferred.get(value)
        if node is not None and not self.is_placed(value):
            super()._lower(node)
        return super().view(value)

    def kernel(self, source: KernelSource) -> KernelSource:  # type: ignore[override]
        """The kernel of this text; equal sources are one kernel."""
        return self.sources.setdefault(source.name, source)

    def call(  # type: ignore[override]
        self,
        kernel: KernelSource,
        node: Node | str,
        pointers: Mapping[str, View],
        sizes: Mapping[str, Size],
        *,
        writes: Iterable[str] = ("y",),
        why: str = "",
    ) -> None:
        """Append a kernel call for a node (or its name), with a value for every argument."""
        if set(kernel.pointers) != set(pointers) or set(kernel.sizes) != set(sizes):
            raise CompileError(
                f"kernel {kernel.family} is called with the wrong arguments",
                expected=sorted({*kernel.pointers, *kernel.sizes}),
                found=sorted({*pointers, *sizes}),
            )
        self.sources.setdefault(kernel.name, kernel)
        written = tuple(pointers[name].buffer for name in writes)
        read = tuple(view.buffer for name, view in pointers.items() if name not in writes)
        name = node if isinstance(node, str) else node.name
        ordered = {key: pointers[key] for key in kernel.pointers}
        own = {key: sizes[key] for key in kernel.sizes}
        self.schedule.steps.append(KernelStep(kernel.name, name, ordered, own, read, written, why))

    def _lower(self, node: Node) -> None:
        values = (*node.operands, *node.outputs)
        if node in self.done:
            return
        if node.name in self._refused:
            self._fall_back(node, self._refused[node.name])
        elif all(isinstance(v.type, TensorType) and v.dtype != string for v in values):
            region = region_of(node)
            defers = DEFERRED.get(region.anchor.op if region.anchor is not None else "")
            if defers is not None and defers(self, node, region):
                self.deferred[node.outputs[0]] = node
            else:
                super()._lower(node)
        else:
            self._fall_back(node, "a value is not a tensor of numbers")

    def copy(self, source: View, target: View, name: str) -> None:
        """Append a step that copies elements between views of the same shape."""
        COPY[0](self, source, target, name)

    def require(self, *elements: object) -> None:
        """Raise a `NoKernelError` for element types that the device cannot hold."""
        for element in elements:
            if not is_stored(element):  # type: ignore[arg-type]
                raise NoKernelError(f"the GPU backend has no element type {element}")


# The copy kernel registers itself here, because it imports this module.
COPY: list[Callable[[GpuLowering, View, View, str], None]] = []
