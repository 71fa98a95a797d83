"""Lowers a fused graph to a schedule: each node becomes kernel calls or an interpreter fallback.

A lowering is a function registered for an op (the anchor of a fused region, or "elementwise" for a
region without an anchor):

    @lowers("softmax")
    def lower_softmax(ctx: Lowering, node: Node, region: RegionView) -> None:
        x = ctx.contiguous(node.inputs[0])                    # or ctx.view(...) for any strides
        y = ctx.output(node.outputs[0])
        kernel = ctx.kernel("softmax", (lanes,), lambda m, name: emit_softmax(m, name, lanes))
        ctx.call(kernel, node, {"x": x, "y": y}, {"rows": rows, "columns": columns}, writes=("y",))

A lowering raises `NoKernelError(reason)` for a node that it does not support. The node then runs in
the reference interpreter, and the schedule records the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.cache.kernel_store import KernelStore
from bitwright.backends.cpu.codegen.emit import Module, Signature
from bitwright.backends.cpu.lowering import choices
from bitwright.backends.cpu.lowering.artifact import KernelCode, new_fault_buffer
from bitwright.errors import CompileError
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType, dtype, string
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.ir.verify import place
from bitwright.lir.buffer import Buffer, Storage, View, contiguous, dense
from bitwright.lir.schedule import (
    ControlStep,
    InterpreterFallback,
    KernelStep,
    Schedule,
    SizeStep,
    verify_schedule,
)
from bitwright.passes.fuse.fuse_regions import is_elementwise
from bitwright.target import Target

Array = np.ndarray[Any, Any]
LARGE = 1 << 16
"""Constants of at least this many bytes are deduplicated by content."""
Lower = Callable[["Lowering", Node, "RegionView"], None]
LOWERINGS: dict[str, Lower] = {}
# Ops whose result is a view of their operand; they need no step.
AsView = Callable[["Lowering", Node], tuple[View, ...] | None]
VIEWS: dict[str, AsView] = {}
Emit = Callable[[Module, str], Signature]


class NoKernelError(Exception):
    """The reason why no kernel supports a node."""


def lowers(*ops: str) -> Callable[[Lower], Lower]:
    """Decorator that registers the lowering of ops."""

    def decorate(function: Lower) -> Lower:
        for op in ops:
            if op in LOWERINGS:
                raise CompileError(f"two lowerings are registered for {op!r}")
            LOWERINGS[op] = function
        return function

    return decorate


@dataclass(frozen=True)
class RegionView:
    """A common view of fused and plain nodes.

    `body` holds the anchor and the elementwise nodes around it; `operands` maps its inputs to
    values of the outer graph. For a plain node, `body` is None and `anchor` is the node itself.
    """

    anchor: Node | None
    body: Graph | None
    operands: Mapping[Value, Value]

    def outer(self, value: Value) -> Value:
        """The outer value of a body's input; any other value is returned unchanged."""
        return self.operands.get(value, value)


def region_of(node: Node) -> RegionView:
    if node.op != "fused":
        return RegionView(node, None, {})
    body: Graph = node.attrs["body"]
    inner = (n for n in body.nodes if not n.is_boundary)
    anchor = next((n for n in inner if not is_elementwise(n) and n.op != "cast"), None)
    inputs = zip(body.inputs, node.operands, strict=True)
    return RegionView(anchor, body, dict(inputs))


class Lowering:
    """Builds the schedule of one graph for one target.

    `store` provides kernels and compiles missing ones; without it, kernels have IR text and no
    object code.
    """

    lowerings: Mapping[str, Lower] = LOWERINGS
    views: Mapping[str, AsView] = VIEWS

    def __init__(self, graph: Graph, target: Target, store: KernelStore | None = None) -> None:
        self.graph, self.target, self.store = graph, target, store
        self.choices = choices.active(target)
        self.schedule = Schedule(graph)
        self.kernels: dict[str, KernelCode] = {}
        self._emitters: dict[str, Emit] = {}
        self._texts: dict[str, str] = {}
        self.numbered: dict[int, tuple[Node, Value | None]] = {}
        """Nodes whose kernels may record a fault and what they index, by the recorded number."""
        self._views: dict[Value, View] = {}
        self._copies: dict[tuple[View, tuple[int, ...]], View] = {}
        self._constants: dict[int, View] = {}
        self._held: list[Array] = []
        self._by_fingerprint: dict[Hashable, list[tuple[Array, View]]] = {}
        self.fault_buffer = new_fault_buffer()
        self._results = {_origin(value): name for name, value in reversed(graph.outputs)}

    # the location of values

    def view(self, value: Value) -> View:
        """The view of a value, with any strides."""
        if value not in self._views and value.is_constant:
            self._views[value] = self.constant(value.node.attrs["value"], value.name)
        return self._views[value]

    def contiguous(self, value: Value) -> View:
        """The row-major view of a value; copies the value if its view is not row-major."""
        return self.packed(self.view(value), value.name)

    def packed(self, view: View, name: str) -> View:
        """A row-major view of the same elements; copied once if needed."""
        return self._in_order(view, tuple(range(len(view.shape))), name)

    def ordered(self, value: Value, order: Sequence[int]) -> View:
        """A dense view of a value with its axes in this order, outermost first; copied if needed.

        Channels-last images are values of shape [N, C, H, W] ordered (0, 2, 3, 1).
        """
        return self._in_order(self.view(value), tuple(order), value.name)

    def _in_order(self, view: View, order: tuple[int, ...], name: str) -> View:
        if view.transpose(order).is_contiguous:
            return view
        key = view, order
        if key not in self._copies:
            buffer = self.buffer(f"{name}.packed", view.dtype, view.count)
            self._copies[key] = dense(buffer, view.shape, order)
            self.copy(view, self._copies[key], name)
        return self._copies[key]

    def copy(self, source: View, target: View, name: str) -> None:
        """Append a step that copies elements between views of the same shape."""
        COPY[0](self, source, target, name)

    def output(self, value: Value, order: Sequence[int] | None = None) -> View:
        """A new dense buffer for a result: row-major, or with its axes in this order."""
        type_ = value.tensor
        order = tuple(order or range(type_.rank))
        row_major = order == tuple(range(type_.rank))
        storage = Storage.OUTPUT if row_major and value in self._results else Storage.ARENA
        view = dense(self.buffer(value.name, type_.dtype, type_.count, storage), type_.shape, order)
        self._views[value] = view
        return view

    def alias(self, value: Value, view: View) -> None:
        """Make a value a view of an existing buffer."""
        self._views[value] = view

    def is_placed(self, value: Value) -> bool:
        """Whether a value has memory: its node is lowered, or a reader allocated its result."""
        return value in self._views

    def are_apart(self, values: Iterable[Value], buffer: Buffer) -> bool:
        """Whether none of these values is a view of a buffer, as far as nodes are lowered."""
        views = (self._views.get(value) for value in values)
        return all(view is None or view.buffer is not buffer for view in views)

    def buffer(
        self,
        name: str,
        element: DType,
        count: Size,
        storage: Storage = Storage.ARENA,
        array: Any = None,
    ) -> Buffer:
        buffer = Buffer(name, element, count, storage, array=array)
        self.schedule.buffers.append(buffer)
        return buffer

    def scratch(self, name: str, element: str, count: Size) -> View:
        """A scratch buffer for one step."""
        return contiguous(self.buffer(name, dtype(element), count), (count,))

    def constant(self, array: Array, name: str) -> View:
        """A constant buffer, 64-byte aligned; equal arrays share one buffer.

        Large arrays are compared by content, because each node that reads a weight packs it.
        """
        if id(array) in self._constants:
            return self._constants[id(array)]
        similar: list[tuple[Array, View]] = []
        if array.nbytes >= LARGE:
            similar = self._by_fingerprint.setdefault(_fingerprint(array), [])
        for other, view in similar:
            if other.shape == array.shape and np.array_equal(_as_bytes(other), _as_bytes(array)):
                return view
        self._held.append(array)  # keeps its id unique
        held = aligned(array)
        buffer = self.buffer(name, dtype(held.dtype), held.size, Storage.CONSTANT, held)
        view = self._constants[id(array)] = contiguous(buffer, held.shape)
        similar.append((held, view))
        return view

    def fault(self) -> View:
        """The buffer in which kernels record an out-of-range index: two elements, initially zero.

        A kernel writes the index to element 1, then the `number` of the node to element 0; a
        nonzero element 0 makes the program raise an error. Threads write it without
        synchronization, so it is not an output of a step.
        """
        if self.fault_buffer not in self.schedule.buffers:
            self.schedule.buffers.append(self.fault_buffer)
        return contiguous(self.fault_buffer, (2,))

    def number(self, node: Node, indexed: Value | None = None) -> int:
        """The node's position in the graph, counted from 1, which identifies it in a fault.

        `indexed` is the value that the error message names, by default the first operand.
        """
        number = 1 + self.graph.nodes.index(node)
        self.numbered[number] = node, indexed or next(node.operands, None)
        return number

    # kernels and steps

    def kernel(self, family: str, key: object, emit: Emit) -> KernelCode:
        """The kernel of this family and key, from the store or newly emitted.

        `key` (anything with an exact repr) must determine the code for a given target: the cache
        finds a kernel by it without generating its text.
        """
        digest = hashlib.blake2b(repr((family, key)).encode(), digest_size=8).hexdigest()
        name = f"{family}_{digest}"
        if name not in self.kernels:
            self._emitters[name] = emit
            found = self.store.find(name) if self.store is not None else None
            self.kernels[name] = found or self._emit(name)
        return self.kernels[name]

    def _emit(self, name: str) -> KernelCode:
        module = Module(self.target, name)
        signature = self._emitters[name](module, name)
        if self.store is not None:
            return self.store.make(name, signature, module.text())
        self._texts[name] = module.text()
        return KernelCode(name, signature)

    def text(self, kernel: KernelCode) -> str:
        """The LLVM IR of a kernel of this lowering, emitted again if needed."""
        if kernel.name not in self._texts:
            module = Module(self.target, kernel.name)
            self._emitters[kernel.name](module, kernel.name)
            self._texts[kernel.name] = module.text()
        return self._texts[kernel.name]

    def call(
        self,
        kernel: KernelCode,
        node: Node | str,
        pointers: Mapping[str, View],
        sizes: Mapping[str, Size],
        *,
        writes: Iterable[str] = ("y",),
        why: str = "",
    ) -> None:
        """Append a kernel call for a node (or its name), with a value for every slot."""
        slots = {slot.name for slot in kernel.signature.slots}
        if slots != {*pointers, *sizes}:
            raise CompileError(
                f"kernel {kernel.name} is called with the wrong slots",
                expected=sorted(slots),
                found=sorted({*pointers, *sizes}),
            )
        written = tuple(pointers[name].buffer for name in writes)
        read = tuple(view.buffer for name, view in pointers.items() if name not in writes)
        name = node if isinstance(node, str) else node.name
        self.schedule.steps.append(
            KernelStep(kernel.name, name, dict(pointers), dict(sizes), read, written, why)
        )

    def read_sizes(
        self,
        node: Node,
        operands: Iterable[Value | View],
        sizes: Sequence[Size],
        read: Callable[[Sequence[Array], Mapping[str, int]], Sequence[int]],
    ) -> None:
        """Append a step that reads sizes from small operands: `read(arrays, bindings)`."""
        views = tuple(o if isinstance(o, View) else self.view(o) for o in operands)
        where = place(self.graph, node)
        self.schedule.steps.append(SizeStep(node.name, where, views, tuple(sizes), read))

    # lowering

    def run(self) -> Schedule:
        for value in (*self.graph.inputs, *self.graph.states):
            self._enter(value)
        for node in self.graph.nodes:
            if not node.is_boundary:
                self._lower(node)
        for name, value in self.graph.outputs:
            if _is_array(value):
                self.schedule.outputs[name] = self._result(name, value)
        given = {view.buffer for view in self.schedule.outputs.values()}
        for buffer in self.schedule.buffers:
            if buffer.storage is Storage.OUTPUT and buffer not in given:
                buffer.storage = Storage.ARENA  # a copy became the output
        self._update_states()
        return verify_schedule(self.schedule)

    def _update_states(self) -> None:
        """Copy the new contents of states; reads all states before it writes one."""
        pairs = [(self.view(value), self.view(state)) for state, value in self.graph.updates]
        changed = [(source, target) for source, target in pairs if source != target]
        for number, (source, target) in enumerate(changed):
            if source.buffer.storage is Storage.STATE:
                temporary = self.buffer(f"{target.buffer.name}.next", source.dtype, source.count)
                changed[number] = contiguous(temporary, source.shape), target
                self.copy(source, changed[number][0], temporary.name)
        for source, target in changed:
            self.copy(source, target, target.buffer.name)
        self.schedule.updates |= {state.name: self.view(state) for state, _ in self.graph.updates}

    def _enter(self, value: Value) -> None:
        if not _is_array(value):
            return  # only interpreter fallbacks read it
        storage = Storage.INPUT if value.node.op == "input" else Storage.STATE
        buffer = self.buffer(value.name, value.dtype, value.tensor.count, storage)
        self._views[value] = contiguous(buffer, value.shape)

    def _lower(self, node: Node) -> None:
        if node.op in self.views and (views := self.views[node.op](self, node)) is not None:
            for value, view in zip(node.outputs, views, strict=True):
                self.alias(value, view)
            return
        region = region_of(node)
        op = region.anchor.op if region.anchor is not None else "elementwise"
        lower = self.lowerings.get(op)
        before = len(self.schedule.steps), len(self.schedule.buffers)
        try:
            if lower is None:
                raise NoKernelError(f"there is no kernel for {op}")
            lower(self, node, region)
        except NoKernelError as reason:
            del self.schedule.steps[before[0] :]
            self._drop(set(self.schedule.buffers[before[1] :]))
            self._fall_back(node, str(reason))

    def _drop(self, buffers: set[Buffer]) -> None:
        """Remove buffers of a failed lowering, and all views of them."""
        self.schedule.buffers = [b for b in self.schedule.buffers if b not in buffers]
        self._views = {k: v for k, v in self._views.items() if v.buffer not in buffers}
        self._copies = {k: v for k, v in self._copies.items() if v.buffer not in buffers}
        self._constants = {k: v for k, v in self._constants.items() if v.buffer not in buffers}
        for similar in self._by_fingerprint.values():
            similar[:] = [(array, view) for array, view in similar if view.buffer not in buffers]

    def control(self, node: Node) -> None:
        """Append a step that runs the node's compiled bodies."""
        self.schedule.steps.append(ControlStep(node, *self._as_arrays(node)))

    def _fall_back(self, node: Node, reason: str) -> None:
        self.schedule.steps.append(InterpreterFallback(node, *self._as_arrays(node), reason))

    def _as_arrays(self, node: Node) -> tuple[tuple[View | None, ...], tuple[View | None, ...]]:
        """The views of a node's inputs and outputs; None for values that are not tensors."""
        inputs = tuple(
            self.view(v) if v is not None and _is_array(v) else None for v in node.inputs
        )
        return inputs, tuple(self.output(v) if _is_array(v) else None for v in node.outputs)

    def _result(self, name: str, value: Value) -> View:
        """The view of an output: a separate row-major buffer, copied if needed."""
        view = self.view(value)
        taken = any(view.buffer is other.buffer for other in self.schedule.outputs.values())
        whole = view.is_contiguous and view.offset == 0 and view.count == view.buffer.count
        if view.buffer.storage is Storage.OUTPUT and whole and not taken:
            return view
        target = contiguous(self.buffer(name, view.dtype, view.count, Storage.OUTPUT), view.shape)
        self.copy(view, target, name)
        return target


# The copy kernel registers itself here, because it imports this module.
COPY: list[Callable[[Lowering, View, View, str], None]] = []


def _origin(value: Value) -> Value:
    """The value whose memory an output shares: the source of a chain of reshapes."""
    while value.node.op in ("reshape", "identity") and len(value.node.inputs) == 1:
        source = value.node.inputs[0]
        if source is None or source.node.is_boundary:
            break
        value = source
    return value


def _is_array(value: Value) -> bool:
    """Whether a value is a tensor of numbers, which has a buffer."""
    return isinstance(value.type, TensorType) and value.dtype != string


def _as_bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _fingerprint(array: Array) -> Hashable:
    """A hash of an array's type, shape and contents."""
    words = _as_bytes(array)
    words = words[: words.size // 8 * 8].view(np.uint64)
    return array.dtype, array.shape, int(words.sum(dtype=np.uint64))


def aligned(array: Array) -> Array:
    """The array in row-major order, 64-byte aligned."""
    array = np.asarray(array, order="C")
    if array.ctypes.data % 64 == 0:
        return array
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    held = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    held[...] = array
    return held
