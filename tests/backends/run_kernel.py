"""Runs the kernels of a small graph without the program: one thread's share after the other.

    found = run_op("softmax", x, axis=-1, target=named("avx2"), threads=3)

Every buffer lies between guard bytes, which must be untouched at the end, and starts out as
rubbish, so that a kernel that writes too much or too little is caught. A node that falls back to a
host step is a failure unless `host=True`.
"""

import ctypes
from functools import cache

import numpy as np

import bitwright.backends.cpu.lowering.registered as _lower
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.backends.cpu.runtime.memory import Memory
from bitwright.ir.dim import evaluate
from bitwright.ir.dtype import dtype
from bitwright.ir.feeds import solve
from bitwright.ir.types import TensorType
from bitwright.lir.buffer import Storage
from bitwright.lir.plan import byte_size
from bitwright.lir.schedule import InterpreterFallback, SizeStep
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import bind_input, run, run_node
from bitwright.target import host, named

assert _lower.__name__  # importing it registers the lowerings
GUARD, RUBBISH = 128, 0xA5
TARGETS = [name for name in ("host", "avx2", "sse2") if named(name).runs_here()]
THREADS = [1, 2, 3]


class Guarded(Memory):
    """Every buffer in memory of its own, between guard bytes."""

    def __init__(self, bindings):
        super().__init__(bindings)
        self.rooms = []

    def allocate(self, nbytes):
        room = np.full(nbytes + 2 * GUARD + 64, RUBBISH, np.uint8)
        start = GUARD + (-(room.ctypes.data + GUARD)) % 64
        self.rooms.append((room, start, start + nbytes))
        return room[start : start + nbytes]

    def raw(self, buffer):
        if buffer not in self.given:
            made = self.allocate(byte_size(buffer, self.bindings))
            if buffer.storage is Storage.CONSTANT:
                made[:] = buffer.array.reshape(-1).view(np.uint8)
            self.given[buffer] = made
        return self.given[buffer]

    def enter(self, buffer, array):
        made = self.allocate(array.nbytes)
        made[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.give(buffer, made)

    def address(self, view):
        offset = evaluate(view.offset, self.bindings) * view.dtype.numpy.itemsize
        return self.range(view.buffer)[0] + offset

    def check(self):
        for room, start, stop in self.rooms:
            assert (room[:start] == RUBBISH).all(), "a kernel wrote in front of a buffer"
            assert (room[stop:] == RUBBISH).all(), "a kernel wrote behind a buffer"


@cache
def function(text, name, target):
    """A compiled kernel; what keeps its code in memory goes with it."""
    library = jit.load(text, target)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    call = kind(library.address(name))
    call.library = library
    return call


def lower(graph, target=None):
    """The lowering of a graph, run: its schedule and its kernels."""
    ctx = Lowering(graph, target or host())
    ctx.run()
    return ctx


class Run:
    """One run of a graph's schedule; `outputs` by name, `fault` if a kernel recorded one."""

    def __init__(self, graph, feeds, target=None, threads=1, host=False, ctx=None, memory=Guarded):
        ctx = ctx or lower(graph, target)
        self.schedule, self.kernels = ctx.schedule, ctx.kernels
        bindings = {}
        for value in graph.inputs:
            bind_input(value, feeds[value.name], bindings)
        self.memory = memory = memory(bindings)
        for buffer in self.schedule.buffers:
            if buffer.storage is Storage.INPUT:
                memory.enter(buffer, np.asarray(feeds[buffer.name]))
            elif buffer.storage is Storage.STATE:
                memory.enter(buffer, np.zeros(evaluate(buffer.count, bindings), buffer.dtype.numpy))
        for step in self.schedule.steps:
            if isinstance(step, InterpreterFallback):
                assert host, f"{step.op.op} runs on the host: {step.why}"
                self._host(step)
                continue
            if isinstance(step, SizeStep):
                found = step.read([memory.array(view) for view in step.inputs], bindings)
                assert all(map(solve, step.sizes, found, [bindings] * len(found)))
                continue
            kernel = ctx.kernels[step.kernel]
            slots = {name: memory.address(view) for name, view in step.pointers.items()}
            slots |= {
                name: size if isinstance(size, float) else evaluate(size, bindings)
                for name, size in step.sizes.items()
            }
            table = kernel.signature.pack(**slots)
            call = function(ctx.text(kernel), kernel.name, ctx.target)
            for thread in range(threads):
                call(table.ctypes.data, thread, threads)
        memory.check()
        self.outputs = {
            name: memory.array(view).copy() for name, view in self.schedule.outputs.items()
        }
        noted = ctx.fault_buffer in self.schedule.buffers
        cells = memory.raw(ctx.fault_buffer).view(np.int64).tolist() if noted else [0, 0]
        self.fault = (cells[0] - 1, cells[1]) if cells[0] else None

    def _host(self, step):
        arrays = [None if view is None else self.memory.array(view) for view in step.inputs]
        for view, result in zip(
            step.outputs, run_node(step.op, arrays, self.memory.bindings), strict=True
        ):
            for size, actual in zip(view.shape, result.shape, strict=True):
                solve(size, actual, self.memory.bindings)
            self.memory.array(view)[...] = result


def graph_of(op, *arrays, shapes=None, constants=(), **attrs):
    """A graph of one op: its inputs are in0, in1, …; those numbered in `constants` are constants.

    `shapes` maps numbers of inputs to shapes with names, for symbolic sizes.
    """
    b = Builder(op)
    values = []
    for i, x in enumerate(arrays):
        if x is None:
            values.append(None)
        elif i in constants:
            values.append(b.constant(np.asarray(x)))
        elif shapes and i in shapes:
            values.append(b.input(f"in{i}", f"{dtype(np.asarray(x).dtype)}{shapes[i]}"))
        else:
            values.append(b.input(f"in{i}", TensorType(dtype(np.asarray(x).dtype), np.shape(x))))
    node = b.node(op, values, attrs, [])
    return b.build(**{f"out{i}": v for i, v in enumerate(node.outputs)})


def feeds_of(graph, arrays):
    names = {value.name for value in graph.inputs}
    return {f"in{i}": np.asarray(x) for i, x in enumerate(arrays) if f"in{i}" in names}


def run_op(op, *arrays, target=None, threads=1, host=False, shapes=None, constants=(), **attrs):
    """The result of one op by its kernel, or a tuple of them."""
    graph = graph_of(op, *arrays, shapes=shapes, constants=constants, **attrs)
    done = Run(graph, feeds_of(graph, arrays), target, threads, host)
    assert done.fault is None, f"the kernel records a fault: {done.fault}"
    results = tuple(done.outputs.values())
    return results[0] if len(results) == 1 else results


def reference(graph, feeds):
    """What the interpreter gives, by output name."""
    return run(graph, feeds)


def assert_same(found, expected):
    """Equal to the bit (every NaN is equal to every other)."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    bits = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (found, expected))
    width = max(found.dtype.itemsize, 1)
    differ = np.not_equal(*bits).reshape(-1, width).any(axis=1).reshape(found.shape)
    if differ.any() and dtype(found.dtype).is_float:
        differ &= ~(np.isnan(found) & np.isnan(expected))
    assert not differ.any(), f"{differ.sum()} of {found.size} differ"


def assert_near(found, expected, tolerance=1e-5):
    """Equal within a part of the output's scale; NaN and infinities stand at the same places."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    assert (np.isfinite(a) == finite).all()
    assert_same(a[~finite], b[~finite])
    if finite.any():
        scale = max(float(np.abs(b[finite]).max()), 1e-30)
        worst = float(np.abs(a[finite] - b[finite]).max()) / scale
        assert worst <= tolerance, f"off by {worst:.2e} of the scale"
