"""Worker threads parked in native code.

    pool = shared_pool(4)
    pool.run(steps.ctypes.data, len(steps))   # the caller is thread 0; returns when all are done

A worker is a Python thread that calls one emitted function and stays there, asleep between runs,
with the interpreter lock released. One wake per run. Idle workers use no processor time. Where the
system cannot sleep on an address, workers wait between runs on Python's semaphores instead.

Runs of one pool follow each other, whichever Python threads ask for them. A run cannot be
interrupted half way: Ctrl-C takes effect after it. A forked child starts workers of its own.
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
from bitwright.backends.cpu.runtime.native import runtime
from bitwright.errors import RunError

SPIN_SECONDS = 50e-6
"""How long a thread spins for the others before it sleeps: about what waking a sleeper costs."""
IDLE_SECONDS = 500e-6
"""How long a worker spins for the next run: runs of a loop follow each other within this time."""
PATIENCE_SECONDS = 0.5e-6
"""How long a thread waits before it looks for parts that others have not begun: in time for them
to come from one phase to the next, and little beside the work of a phase."""
_JOIN_SECONDS = 5.0
_PROBES = 64
_OPERATIONS = 4
"""Kernels do a few operations with each number that they touch, where the yardstick does one."""


@cache
def _turn_seconds() -> float:
    """What a turn of the waiting loop takes; measured, since a pause differs by machine."""
    block, turns = _shared_block(1), 1000
    return _least(lambda: runtime().idle(block.ctypes.data, turns)) / turns


@cache
def _byte_seconds() -> float:
    """What a kernel takes for each byte it touches at least, in the cache; measured."""
    x, y, z = (np.ones(4096, np.float32) for _ in range(3))
    return _OPERATIONS * _least(lambda: np.add(x, y, out=z)) / (3 * x.nbytes)


def _least(action: Callable[[], Any]) -> float:
    """The shortest of a few times."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - begin)
    return best


def _shared_block(threads: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed memory for the shared words, starting at a cache line."""
    nbytes = shared.shared_bytes(threads)
    room = np.zeros(nbytes + shared.LINE, np.uint8)
    start = -room.ctypes.data % shared.LINE
    return room[start : start + nbytes]


class _Crew:
    """The threads of a pool and what they share; lives until the last of them has ended."""

    def __init__(self, threads: int, native: bool) -> None:
        self.block = _shared_block(threads)
        self.address = self.block.ctypes.data
        futex = system.futex() if native else None
        self.words = words = self.block.view(np.uint64)
        spins = threads <= system.cores()  # else those who wait take the cores of those who work
        for at, seconds in (
            (shared.SPINS, SPIN_SECONDS),
            (shared.IDLE_SPINS, IDLE_SECONDS),
            (shared.PATIENCE, PATIENCE_SECONDS),
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
        self.members = [
            threading.Thread(
                target=self._live, args=(number,), daemon=True, name=f"bitwright-{number}"
            )
            for number in range(1, threads)
        ]
        for member in self.members:
            member.start()

    def _live(self, number: int) -> None:
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
        shared_with_worker = self._start(self.address, steps, count)
        if shared_with_worker >= 0:
            numbers = [member.native_id for member in self.members]
            system.exclude_processor([n for n in numbers if n is not None], shared_with_worker)

    def dismiss(self) -> None:
        """Let every worker return, and wait for it."""
        runtime().stop(self.address)
        for signal in self.signals:
            signal.release()
        for member in self.members:
            member.join(_JOIN_SECONDS)


class Pool:
    """A fixed number of threads that run step tables together; `threads=1` starts none."""

    def __init__(self, threads: int, native: bool = True) -> None:
        if threads < 1:
            raise RunError("a pool needs at least one thread", expected=">= 1", found=threads)
        self.threads, self._native = threads, native
        self._runtime = runtime()
        self._lock = threading.Lock()
        self._crew: _Crew | None = None
        self._end: weakref.finalize[..., Pool] | None = None
        self._small: int | None = None
        _pools.add(self)

    def run(self, steps: int, count: int, alone: bool = False) -> None:
        """Execute a table of `count` steps at address `steps` on all threads, or on the caller."""
        with self._lock:
            if alone or self.threads == 1:
                self._runtime.run(steps, count)
            else:
                (self._crew or self._recruit()).run(steps, count)

    def small_bytes(self) -> int:
        """Up to how many bytes touched it takes longer to meet than sharing the work saves."""
        if self._small is None:
            saved = 1 - 1 / self.threads
            self._small = int(self._phase_seconds() / saved / _byte_seconds()) if saved else 0
        return self._small

    def _phase_seconds(self) -> float:
        """What it costs to pass from one phase to the next; measured with empty ones."""
        steps = shared.step_table([(self._runtime.nothing, 0, shared.BARRIER_AFTER)] * _PROBES)
        return _least(lambda: self.run(steps.ctypes.data, len(steps))) / _PROBES

    def _recruit(self) -> _Crew:
        crew = self._crew = _Crew(self.threads, self._native)
        self._end = weakref.finalize(self, crew.dismiss)  # also when the interpreter exits
        return crew

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._crew = self._end = None

    def _after_fork(self) -> None:
        """In a child there are no workers, and the lock may be held by a thread that is gone."""
        self._lock = threading.Lock()
        if self._end is not None:
            self._end.detach()
        self._crew = self._end = None


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
_shared_lock = threading.Lock()


def shared_pool(threads: int) -> Pool:
    """The pool of this many threads that executables have in common."""
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
