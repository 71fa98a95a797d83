"""Worker threads that wait in native code.

    pool = shared_pool(4)
    pool.run(steps.ctypes.data, len(steps))   # the caller is thread 0; returns when all are done

A worker is a Python thread inside one emitted function, with the GIL released. It sleeps between
runs and uses no processor time; a run wakes each worker once. On systems without futex, workers
wait on Python semaphores between runs.

Workers whose processor is busy with something else take no part for a while (`contention`).

A pool serializes its runs. A run cannot be interrupted: Ctrl-C takes effect after it. A forked
child starts its own workers.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from bitwright import system
from bitwright.backends.cpu.runtime import shared_block as shared
from bitwright.backends.cpu.runtime.contention import Contention
from bitwright.backends.cpu.runtime.native import runtime
from bitwright.errors import RunError

SPIN_SECONDS = 50e-6
"""The spin time at a barrier before a thread sleeps: about the cost of a wake-up."""
IDLE_SECONDS = 500e-6
"""The spin time of a worker between runs: covers consecutive runs of a loop."""
STEAL_SECONDS = 0.5e-6
"""The wait before a thread claims the parts of others: longer than a phase change of a running
thread, short compared to the work of a phase."""
_JOIN_SECONDS = 5.0
_PROBES = 64
_OPERATIONS = 4
"""The assumed operations per element of a kernel; the measured addition does one."""


@cache
def _turn_seconds() -> float:
    """The measured time of one iteration of the spin loop."""
    block, turns = _shared_block(1), 1000
    return _minimum_seconds(lambda: runtime().idle(block.ctypes.data, turns)) / turns


@cache
def _byte_seconds() -> float:
    """The estimated time of a kernel per byte in cache, from a measured addition."""
    x, y, z = (np.ones(4096, np.float32) for _ in range(3))
    return _OPERATIONS * _minimum_seconds(lambda: np.add(x, y, out=z)) / (3 * x.nbytes)


def _minimum_seconds(action: Callable[[], Any]) -> float:
    """The minimum of five measurements."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best


def _shared_block(threads: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed memory for the shared words, aligned to a cache line."""
    nbytes = shared.shared_bytes(threads)
    room = np.zeros(nbytes + shared.LINE, np.uint8)
    start = -room.ctypes.data % shared.LINE
    return room[start : start + nbytes]


class _Workers:
    """The threads of a pool and their shared block."""

    def __init__(self, threads: int, native: bool) -> None:
        self.block = _shared_block(threads)
        self.address = self.block.ctypes.data
        futex = system.futex() if native else None
        self.words = words = self.block.view(np.uint64)
        spins = threads <= system.cores()  # with fewer cores, spinning would delay working threads
        for at, seconds in (
            (shared.SPINS, SPIN_SECONDS),
            (shared.IDLE_SPINS, IDLE_SECONDS),
            (shared.STEAL_SPINS, STEAL_SECONDS),
        ):
            words[at // 8] = max(1, int(seconds / _turn_seconds())) if spins else 1
        words[shared.SYSCALL // 8] = futex.function if futex else 0
        words[shared.FUTEX // 8] = futex.number if futex else 0
        words[shared.YIELD // 8] = system.yield_function()
        words[shared.PROCESSOR // 8] = system.processor_function()
        words[shared.THREADS // 8] = threads
        self.parks_natively = futex is not None
        self._start = runtime().start
        self.signals = [threading.Semaphore(0) for _ in range(threads - 1)]
        self.threads = [
            threading.Thread(
                target=self._loop, args=(number,), daemon=True, name=f"bitwright-{number}"
            )
            for number in range(1, threads)
        ]
        for thread in self.threads:
            thread.start()
        workers = [thread.native_id for thread in self.threads]
        self.contention = Contention(words, workers)

    def _loop(self, number: int) -> None:
        if self.parks_natively:
            runtime().work(self.address, number)
            return
        while True:
            self.signals[number - 1].acquire()
            if self.words[shared.STOP // 8]:
                return
            runtime().take_part(self.address, number)

    def run(self, steps: int, count: int) -> None:
        if not self.parks_natively:
            for signal in self.signals:
                signal.release()
        shared_processor = self._start(self.address, steps, count)
        if self.parks_natively:
            self.contention.after_run()
        if shared_processor >= 0:
            numbers = [thread.native_id for thread in self.threads]
            system.exclude_processor([n for n in numbers if n is not None], shared_processor)

    def stop(self) -> None:
        """End all workers and wait for them."""
        runtime().stop(self.address)
        for signal in self.signals:
            signal.release()
        for thread in self.threads:
            thread.join(_JOIN_SECONDS)


class Pool:
    """A fixed number of threads that run step tables; `threads=1` starts no worker."""

    def __init__(self, threads: int, native: bool = True) -> None:
        if threads < 1:
            raise RunError("a pool needs at least one thread", expected=">= 1", found=threads)
        self.threads, self._native = threads, native
        self._runtime = runtime()
        self._lock = threading.Lock()
        self._workers: _Workers | None = None
        self._end: weakref.finalize[..., Pool] | None = None
        self._small: int | None = None
        _pools.add(self)

    def run(self, steps: int, count: int, alone: bool = False) -> None:
        """Run a table of `count` steps at address `steps` on all threads, or on the caller."""
        with self._lock:
            if alone or self.threads == 1:
                self._runtime.run(steps, count)
            else:
                (self._workers or self._start_workers()).run(steps, count)

    def small_bytes(self) -> int:
        """The largest step, in bytes touched, for which a barrier costs more than threads save."""
        if self._small is None:
            saved = 1 - 1 / self.threads
            self._small = int(self._phase_seconds() / saved / _byte_seconds()) if saved else 0
        return self._small

    def _phase_seconds(self) -> float:
        """The measured time of an empty phase."""
        steps = shared.step_table([(self._runtime.nothing, 0, shared.BARRIER_AFTER)] * _PROBES)
        return _minimum_seconds(lambda: self.run(steps.ctypes.data, len(steps))) / _PROBES

    def _start_workers(self) -> _Workers:
        workers = self._workers = _Workers(self.threads, self._native)
        self._end = weakref.finalize(self, workers.stop)  # also at interpreter exit
        return workers

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._workers = self._end = None

    def _after_fork(self) -> None:
        """A child has no workers, and a thread that no longer exists may hold the lock."""
        self._lock = threading.Lock()
        if self._end is not None:
            self._end.detach()
        self._workers = self._end = None


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_pool(threads: int) -> Pool:
    """The pool of this many threads that all executables share."""
    with _shared_lock:
        pool = _shared.get(threads)
        if pool is None:
            pool = _shared[threads] = Pool(threads)
        return pool


def _renew_after_fork() -> None:
    global _shared_lock  # noqa: PLW0603
    _shared_lock = threading.Lock()
    for pool in list(_pools):
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
