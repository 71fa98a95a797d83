"""Measured peak performance of this machine, for roofline models.

    products   multiply-adds in registers (`profile.product_loops`), two operations each
    flops      those of f32
    integers   those of 8-bit dot products (vpdpbusd, usdot), if the target has them
    bandwidth  bytes read and written per second, for data that fits the L2 caches, the last-level
               cache, or neither: the larger rate of a sum and a copy

Small emitted kernels measure them on a pool of threads. Real kernels stay below these peaks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from bitwright import knobs
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module, Signature, f32
from bitwright.backends.cpu.profile.product_loops import emit_loop, product_loops
from bitwright.backends.cpu.runtime.memory import allocate
from bitwright.backends.cpu.runtime.pool import Pool, shared_pool
from bitwright.backends.cpu.runtime.shared_block import BARRIER_AFTER, step_table
from bitwright.target import Target, host

Array = np.ndarray[Any, Any]
_SECONDS = 0.05
"""The measuring time of a peak; clock frequencies change within milliseconds."""
_SHORTEST = 1e-3
_LEAST_CALLS = 5
"""Another process may interrupt a few."""
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
    products: Mapping[str, float] = field(default_factory=dict)
    """Operations per second by the name of the loop."""

    def level(self, nbytes: int) -> Level:
        """The smallest level that holds this many bytes."""
        return next(level for level in self.levels if nbytes <= level.nbytes)

    @property
    def memory(self) -> float:
        return self.levels[-1].rate


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

    def minimum_seconds(self, measuring: float = _SECONDS, **slots: int) -> float:
        """The minimum time of one call."""
        table = self.signature.pack(**slots)
        rows = step_table([(self.library.address(self.name), table.ctypes.data, BARRIER_AFTER)])
        best, calls, stop = float("inf"), 0, time.perf_counter() + measuring
        while calls < _LEAST_CALLS or time.perf_counter() < stop:
            begin = time.perf_counter()
            self.pool.run(rows.ctypes.data, 1)
            best, calls = min(best, time.perf_counter() - begin), calls + 1
        return best

    def rate(self, per_turn: float, **slots: int) -> float:
        """Units per second, with enough iterations per call for a reliable measurement."""
        turns = 1
        while (seconds := self.minimum_seconds(_SHORTEST, turns=turns, **slots)) < _SHORTEST:
            turns *= max(2, int(_SHORTEST / max(seconds, 1e-7)))
        return per_turn * turns / self.minimum_seconds(turns=turns, **slots)


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


def measure(threads: int) -> Peaks:
    """The peaks of this process's target for a number of threads; measured once per process."""
    return _measured(threads, host())


@cache
def _measured(threads: int, target: Target) -> Peaks:
    products, module = measure_products(threads), Module(target, "streams")
    _emit_stream(module, "sum", writes=False)
    _emit_stream(module, "copy", writes=True)
    streams = _benchmarks(module, threads)
    levels = _levels(target, threads, streams["sum"], streams["copy"])
    return Peaks(threads, products["f32"], products.get("int8"), levels, products)


def measure_products(threads: int) -> dict[str, float]:
    """Operations per second of the loops of this process's target, measured now."""
    module = Module(host(), "products")
    per_turn = {
        name: loop.operations * emit_loop(module, name, loop) * threads
        for name, loop in product_loops(host()).items()
    }
    benchmarks, data = _benchmarks(module, threads), np.ones(1024, np.float32)
    return {name: benchmarks[name].rate(n, data=data.ctypes.data) for name, n in per_turn.items()}


def _benchmarks(module: Module, threads: int) -> dict[str, _Benchmark]:
    library, pool = jit.load(module.text(), module.target), shared_pool(threads)
    return {
        name: _Benchmark(library, signature, name, pool)
        for name, signature in module.signatures.items()
    }


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
