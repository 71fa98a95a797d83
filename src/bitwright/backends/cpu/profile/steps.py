"""Times each step of a program inside the native run: `Program.profile(feeds, rounds)`.

The runner gets another table, with a row between every two kernel calls that notes the time:

    note, kernel 0, note, kernel 1, note, ...

A step's time is the difference of two notes less what the same rows take when the kernel does
nothing; the quickest of the rounds counts. Kernels, arguments and the state of the caches are those
of an ordinary run, but every step that is shared out ends with a meeting of the threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from bitwright import system
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module, Signature, i32
from bitwright.backends.cpu.runtime.pool import Pool
from bitwright.backends.cpu.runtime.shared_block import ALONE, BARRIER_AFTER, step_table
from bitwright.backends.cpu.runtime.steps import ROW, StepTable
from bitwright.lir.schedule import NodeStep, SizeStep, Step
from bitwright.target import Target, host

Array = np.ndarray[Any, Any]
_EMPTY_ROWS = 50


@dataclass(frozen=True)
class TimedStep:
    step: Step
    seconds: float
    """The quickest of the rounds."""


@dataclass(frozen=True)
class Profile:
    """A run taken apart."""

    steps: tuple[TimedStep, ...]
    run_seconds: float
    """A whole run as its caller sees it, the quickest of all."""
    overhead_seconds: float
    """What a run takes beside its steps: binding inputs, waking threads, making outputs."""
    barrier_seconds: float
    """What it takes to call a kernel that does nothing and to meet behind it."""
    threads: int
    bindings: Mapping[str, int]
    """The sizes of the run, those that its data decided included."""


def _text(target: Target) -> str:
    module = Module(target, "profile")
    with module.kernel("note_time", Signature(("clock", "moment"), ("number",))) as f:
        clock, number = f.args.pointer("clock"), f.convert(f.args.size("number"), i32)
        with f.if_(f.eq(f.thread, 0)):
            f.call_pointer(clock, i32, number, f.args.pointer("moment"))
    with module.kernel("do_nothing", Signature()) as f:
        pass
    return module.text()


@cache
def _library() -> jit.Library:
    return jit.load(_text(host()), host())


class NotedTable:
    """Rows of kernel calls with notes of the time between them.

    One thread takes the notes. Before and behind a kernel that is shared out, all threads meet;
    kernels that one thread does alone follow each other as they always do.
    """

    def __init__(self, rows: Array) -> None:
        """`rows` as the runner reads them, one line each."""
        count = len(rows)
        self._moments = np.zeros((count + 1, 2), np.int64)
        self._is_alone = bool(np.all(rows[:, -1] & ALONE))
        function, number = system.clock()
        places = self._moments.ctypes.data + self._moments.strides[0] * np.arange(count + 1)
        self._slots = np.array([(function, place, number) for place in places], np.uint64)
        start, stride = self._slots.ctypes.data, self._slots.strides[0]
        note = _library().address("note_time")
        slots = [start + stride * (number // 2) for number in range(2 * count + 1)]
        self._rows = step_table([(note, at, ALONE) for at in slots])
        self._rows[1::2] = rows
        alone = (rows[:, -1] & ALONE).astype(bool)
        self._rows[1::2, -1] = np.where(alone, ALONE, BARRIER_AFTER)
        self._rows[:-1:2, -1] |= np.where(alone, 0, BARRIER_AFTER).astype(np.uint64)

    def run(self, pool: Pool) -> None:
        pool.run(self._rows.ctypes.data, len(self._rows), self._is_alone)

    @property
    def seconds(self) -> Array:
        """How long each row took in the last run."""
        seconds, nanoseconds = self._moments.T
        return np.diff(seconds) + np.diff(nanoseconds) * 1e-9


def barrier_seconds(pool: Pool, rounds: int, flags: int = BARRIER_AFTER) -> float:
    """What a row takes whose kernel does nothing, by the same rule as that of a step."""
    nothing, slots = _library().address("do_nothing"), np.zeros(1, np.uint64)
    table = NotedTable(step_table([(nothing, slots.ctypes.data, flags)] * _EMPTY_ROWS))
    best = np.full(_EMPTY_ROWS, np.inf)
    for _ in range(rounds):
        table.run(pool)
        best = np.minimum(best, table.seconds)
    return float(np.median(best))


class Stopwatch:
    """Runs a program's steps and notes how long each takes."""

    def __init__(self, pool: Pool, rounds: int) -> None:
        self.meeting = barrier_seconds(pool, rounds)
        self.overhead = float("inf")
        self.bindings: Mapping[str, int] = {}
        self._alone = barrier_seconds(pool, rounds, ALONE)
        self._pool = pool
        self._best: dict[int, TimedStep] = {}
        self._tables: dict[int, tuple[StepTable, NotedTable]] = {}
        self._accounted = 0.0

    def run(self, table: StepTable) -> None:
        """A stretch of kernel calls."""
        begin = time.perf_counter()
        rows = table.rows.reshape(-1, ROW)
        if id(table) not in self._tables:  # which is kept beside it, so that its id stays its own
            self._tables[id(table)] = table, NotedTable(rows)
        noted = self._tables[id(table)][1]
        empty = np.where(rows[:, -1] & ALONE, self._alone, self.meeting)
        self._accounted += time.perf_counter() - begin
        noted.run(self._pool)
        begin, seconds = time.perf_counter(), noted.seconds
        self._accounted += float(seconds.sum())
        for step, taken in zip(table.steps, np.maximum(0.0, seconds - empty), strict=True):
            self._note(step, float(taken))
        self._accounted += time.perf_counter() - begin

    def took(self, step: NodeStep | SizeStep, seconds: float) -> None:
        """A step that Python computed."""
        self._accounted += seconds
        self._note(step, seconds)

    def ended(self, seconds: float) -> None:
        """A whole run is over; what is not accounted for is overhead."""
        self.overhead = min(self.overhead, max(0.0, seconds - self._accounted))
        self._accounted = 0.0

    def _note(self, step: Step, seconds: float) -> None:
        known = self._best.get(id(step))
        if known is None or seconds < known.seconds:
            self._best[id(step)] = TimedStep(step, seconds)

    @property
    def steps(self) -> tuple[TimedStep, ...]:
        """Every step once, in order."""
        return tuple(self._best.values())
