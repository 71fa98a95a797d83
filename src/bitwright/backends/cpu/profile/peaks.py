"""Measured peak performance of this machine, for roofline models.

    flops      f32 multiply-adds in registers, two operations each
    integers   8-bit dot products (vpdpbusd, usdot), if the target has them
    bandwidth  bytes read and written per second, for data that fits the L2 caches, the last-level
               cache, or neither: the larger rate of a sum and a copy

Small emitted kernels measure them on a pool of threads. Real kernels stay below these peaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bitwright import knobs
from bitwright.backends.cpu.codegen import instr, jit
from bitwright.backends.cpu.codegen.emit import Kernel, Module, Signature, Type, Value, f32
from bitwright.backends.cpu.runtime.memory import allocate
from bitwright.backends.cpu.runtime.pool import Pool, shared_pool
from bitwright.backends.cpu.runtime.shared_block import BARRIER_AFTER, step_table
from bitwright.target import Target, host

Array = np.ndarray[Any, Any]
_SECONDS = 0.05
"""The measuring time of a peak; clock frequencies change within milliseconds."""
_SHORTEST = 1e-3
_LARGEST = 256 << 20
_UNROLL = 4


@dataclass(frozen=True)
class Level:
    """A level of the memory hierarchy: its capacity and bandwidth."""

    name: str
    nbytes: float
    rate: float


@dataclass(frozen=True)
class Peaks:
    threads: int
    flops: float
    integers: float | None
    levels: tuple[Level, ...]
    """From the smallest cache to main memory."""

    def level(self, nbytes: int) -> Level:
        """The smallest level that holds this many bytes."""
        return next(level for level in self.levels if nbytes <= level.nbytes)

    @property
    def memory(self) -> float:
        return self.levels[-1].rate


Step = Callable[[Kernel, Value, Value], Value]


def _emit_products(module: Module, name: str, acc: Type, part: Type, step: Step) -> int:
    """Emit a loop of independent `acc = step(acc, part)`; returns their number per iteration."""
    # enough to hide the latency on any machine, and few enough to stay in registers
    count = 3 * module.target.vector_registers // 4
    with module.kernel(name, Signature(("data",), ("turns",))) as f:
        data, turns = f.args.pointer("data"), f.args.size("turns")
        factor = f.load(part, data)
        start = [f.load(acc, data, lane) for lane in range(count)]
        with f.loop(0, turns, carry=start) as loop:
            loop.next(*(step(f, value, factor) for value in loop.carried))
        with f.if_(f.lt(turns, 0)):  # never taken; it keeps the results live
            for number, result in enumerate(loop.results):
                f.store(result, data, number * result.type.lanes)
    return count


def _emit_stream(module: Module, name: str, writes: bool) -> None:
    """Emit a loop in which each thread reads its share of `count` floats `turns` times."""
    lanes = module.target.lanes(32)
    vector = f32.vector(lanes)
    with module.kernel(name, Signature(("x", "y"), ("count", "turns"))) as f:
        x, y = f.args.pointer("x"), f.args.pointer("y")
        begin, end = f.share(f.args.size("count"), lanes * _UNROLL)
        sums = [f.splat(f.const(f32, 0), lanes)] * _UNROLL
        with f.loop(0, f.args.size("turns"), carry=sums) as turns:
            with f.loop(begin, end, lanes * _UNROLL, carry=turns.carried) as loop:
                values = [f.load(vector, x, loop.index + lanes * n) for n in range(_UNROLL)]
                if writes:
                    for n, value in enumerate(values):
                        f.store(value, y, loop.index + lanes * n)
                    loop.next(*loop.carried)
                else:
                    pairs = zip(loop.carried, values, strict=True)
                    loop.next(*(f.add(total, value) for total, value in pairs))
            turns.next(*loop.results)
        with f.if_(f.lt(f.args.size("turns"), 0)):
            for number, total in enumerate(turns.results):
                f.store(total, y, number * lanes)


@dataclass(frozen=True)
class _Benchmark:
    """A kernel of this module and the pool that runs it."""

    library: jit.Library
    signature: Signature
    name: str
    pool: Pool

    def minimum_seconds(self, **slots: int) -> float:
        """The minimum time of one call."""
        table = self.signature.pack(**slots)
        rows = step_table([(self.library.address(self.name), table.ctypes.data, BARRIER_AFTER)])
        best, stop = float("inf"), time.perf_counter() + _SECONDS
        while best == float("inf") or time.perf_counter() < stop:
            begin = time.perf_counter()
            self.pool.run(rows.ctypes.data, 1)
            best = min(best, time.perf_counter() - begin)
        return best

    def rate(self, per_turn: float, **slots: int) -> float:
        """Units per second, with enough iterations per call for a reliable measurement."""
        turns = 1
        while (seconds := self.minimum_seconds(turns=turns, **slots)) < _SHORTEST:
            turns *= max(2, int(_SHORTEST / max(seconds, 1e-7)))
        return per_turn * turns / seconds


def memory_reader(threads: int, nbytes: int) -> Callable[[], None]:
    """A function that reads this many bytes once and adds them."""
    module = Module(host(), "reader")
    _emit_stream(module, "sum", writes=False)
    library, pool = jit.load(module.text(), host()), shared_pool(threads)
    room = allocate(nbytes)
    room[:] = 1
    slots = {"x": room.ctypes.data, "y": room.ctypes.data, "count": nbytes // 4, "turns": 1}
    table = module.signatures["sum"].pack(**slots)
    rows = step_table([(library.address("sum"), table.ctypes.data, BARRIER_AFTER)])
    held = room, table, library

    def read() -> None:
        assert held
        pool.run(rows.ctypes.data, 1)

    return read


@cache
def measure(threads: int) -> Peaks:
    """The peaks of this machine for a number of threads; measured once per process."""
    target = host()
    module = Module(target, "peaks")
    vector, dot = f32.vector(target.lanes(32)), instr.dot_u8s8(target)
    per_turn = {}
    count = _emit_products(module, "fma", vector, vector, lambda f, acc, x: f.fma(acc, x, x))
    per_turn["fma"] = 2 * vector.lanes * count * threads
    if dot is not None:
        part = dot.operands[1]
        count = _emit_products(module, "dot", dot.result, part, lambda f, acc, x: dot(f, acc, x, x))
        per_turn["dot"] = 2 * part.lanes * count * threads
    _emit_stream(module, "sum", writes=False)
    _emit_stream(module, "copy", writes=True)
    library, pool = jit.load(module.text(), target), shared_pool(threads)
    benchmarks = {
        name: _Benchmark(library, signature, name, pool)
        for name, signature in module.signatures.items()
    }
    data = np.ones(1024, np.float32)
    rates = {name: benchmarks[name].rate(n, data=data.ctypes.data) for name, n in per_turn.items()}
    levels = _levels(target, threads, benchmarks["sum"], benchmarks["copy"])
    return Peaks(threads, rates["fma"], rates.get("dot"), levels)


def _levels(target: Target, threads: int, total: _Benchmark, copy: _Benchmark) -> tuple[Level, ...]:
    """Rates for half of each cache, and for more than the caches hold."""
    room = allocate(_memory_bytes(target))
    room[:] = 1
    sizes = {"L2": threads * target.l2_bytes, "L3": target.l3_bytes}
    levels: list[Level] = []
    for name, nbytes in sizes.items():
        if (levels[-1].nbytes if levels else 0) < nbytes < room.nbytes:
            levels.append(Level(name, nbytes, _bandwidth(total, copy, room, nbytes // 2)))
    rate = _bandwidth(total, copy, room, room.nbytes)
    return (*levels, Level("memory", float("inf"), rate))


def _bandwidth(total: _Benchmark, copy: _Benchmark, room: Array, nbytes: int) -> float:
    """Bytes per second for `nbytes` of data; a copy reads one half and writes the other."""
    x, half = room.ctypes.data, nbytes // 2048 * 256
    summed = total.rate(8 * half, x=x, y=x, count=2 * half)
    return max(summed, copy.rate(8 * half, x=x, y=x + 4 * half, count=half))


def _memory_bytes(target: Target) -> int:
    """More than the caches hold, within the memory limit."""
    wanted = max(4 * target.l3_bytes, 64 << 20)
    return min(wanted, _LARGEST, knobs.max_tensor_bytes() // 8)
