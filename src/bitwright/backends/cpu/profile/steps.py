"""Times each step of a program inside the native run: `Program.profile(feeds, rounds)`.

The runner gets a table with a timestamp kernel between every two kernel calls:

    timestamp, kernel 0, timestamp, kernel 1, timestamp, ...

A step's time is the difference of two timestamps minus that of an empty kernel; the result is the
minimum over all rounds. Kernels, arguments and cache state are those of an ordinary run, except
that a barrier follows every step that several threads run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from bitwright import system
from bitwright.backends.base import TimedStep
from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.codegen.emit import Module, Signature, i32
from bitwright.backends.cpu.runtime.pool import Pool
from bitwright.backends.cpu.runtime.shared_block import ALONE, BARRIER_AFTER, step_table
from bitwright.backends.cpu.runtime.steps import ROW, StepTable
from bitwright.lir.schedule import PythonStep, Step
from bitwright.target import Target, host

Array = np.ndarray[Any, Any]
_EMPTY_ROWS = 50


def _text(target: Target) -> str:
    module = Module(target, "profile")
    with module.kernel("write_timestamp", Signature(("clock", "timestamp"), ("number",))) as f:
        clock, number = f.args.pointer("clock"), f.convert(f.args.size("number"), i32)
        with f.if_(f.eq(f.thread, 0)):
            f.call_pointer(clock, i32, number, f.args.pointer("timestamp"))
    with module.kernel("empty", Signature()) as f:
        pass
    return module.text()


@cache
def _library() -> jit.Library:
    return jit.load(_text(host()), host())


class TimedTable:
    """A step table with timestamps between its rows.

    One thread takes the timestamps. Barriers surround a kernel that all threads run; there is none
    between kernels that one thread runs.
    """

    def __init__(self, rows: Array) -> None:
        """`rows` is a step table with one row per step."""
        count = len(rows)
        self._timestamps = np.zeros((count + 1, 2), np.int64)
        self._is_alone = bool(np.all(rows[:, -1] & ALONE))
        function, number = system.clock()
        addresses = self._timestamps.ctypes.data + self._timestamps.strides[0] * np.arange(
            count + 1
        )
        self._slots = np.array([(function, address, number) for address in addresses], np.uint64)
        start, stride = self._slots.ctypes.data, self._slots.strides[0]
        timestamp = _library().address("write_timestamp")
        slots = [start + stride * (number // 2) for number in range(2 * count + 1)]
        self._rows = step_table([(timestamp, at, ALONE) for at in slots])
        self._rows[1::2] = rows
        alone = (rows[:, -1] & ALONE).astype(bool)
        self._rows[1::2, -1] = np.where(alone, ALONE, BARRIER_AFTER)
        self._rows[:-1:2, -1] |= np.where(alone, 0, BARRIER_AFTER).astype(np.uint64)

    def run(self, pool: Pool) -> None:
        pool.run(self._rows.ctypes.data, len(self._rows), self._is_alone)

    @property
    def seconds(self) -> Array:
        """The time of each row in the last run."""
        seconds, nanoseconds = self._timestamps.T
        return np.diff(seconds) + np.diff(nanoseconds) * 1e-9


def barrier_seconds(pool: Pool, rounds: int, flags: int = BARRIER_AFTER) -> float:
    """The time of a row with an empty kernel, measured like that of a step."""
    nothing, slots = _library().address("empty"), np.zeros(1, np.uint64)
    table = TimedTable(step_table([(nothing, slots.ctypes.data, flags)] * _EMPTY_ROWS))
    best = np.full(_EMPTY_ROWS, np.inf)
    for _ in range(rounds):
        table.run(pool)
        best = np.minimum(best, table.seconds)
    return float(np.median(best))


class Stopwatch:
    """Runs a program's steps and records the time of each."""

    def __init__(self, pool: Pool, rounds: int) -> None:
        self.barrier = barrier_seconds(pool, rounds)
        self.overhead = float("inf")
        self.bindings: Mapping[str, int] = {}
        self._alone = barrier_seconds(pool, rounds, ALONE)
        self._pool = pool
        self._best: dict[int, TimedStep] = {}
        self._tables: dict[int, tuple[StepTable, TimedTable]] = {}
        self._accounted = 0.0

    def run(self, table: StepTable) -> None:
        """Run and time a segment of kernel calls."""
        begin = time.perf_counter()
        rows = table.rows.reshape(-1, ROW)
        if id(table) not in self._tables:  # the entry holds the table, so its id stays unique
            self._tables[id(table)] = table, TimedTable(rows)
        timed = self._tables[id(table)][1]
        empty = np.where(rows[:, -1] & ALONE, self._alone, self.barrier)
        self._accounted += time.perf_counter() - begin
        timed.run(self._pool)
        begin, seconds = time.perf_counter(), timed.seconds
        self._accounted += float(seconds.sum())
        for step, taken in zip(table.steps, np.maximum(0.0, seconds - empty), strict=True):
            self._record(step, float(taken))
        self._accounted += time.perf_counter() - begin

    def add(self, step: PythonStep, seconds: float) -> None:
        """Record a step that ran in Python."""
        self._accounted += seconds
        self._record(step, seconds)

    def end_run(self, seconds: float) -> None:
        """Record a whole run; time outside of steps is overhead."""
        self.overhead = min(self.overhead, max(0.0, seconds - self._accounted))
        self._accounted = 0.0

    def _record(self, step: Step, seconds: float) -> None:
        known = self._best.get(id(step))
        if known is None or seconds < known.seconds:
            self._best[id(step)] = TimedStep(step, seconds)

    @property
    def steps(self) -> tuple[TimedStep, ...]:
        """All steps in order, with their minimum times."""
        return tuple(self._best.values())
