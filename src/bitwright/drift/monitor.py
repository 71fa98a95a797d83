"""Monitor: observes a fraction of the runs of an executable and says when the data has drifted.

    monitor = exe.monitor(every=100)
    ... exe.run(inputs) ...
    print(monitor.report())
    for alarm in monitor.alarms: print(alarm)

An observed run is followed by a run of a second executable on the same inputs, which computes only
counters (`drift.counter_graph`). The results that the caller gets do not change. Without `every`
and `fraction`, runs are observed at random, at a rate at which counting takes `budget` of the time
of all runs; both times are measured on the observed runs.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from bitwright.backends.base import Engine
from bitwright.backends.reference import ReferenceEngine
from bitwright.drift.counter_graph import Counting
from bitwright.drift.counters import Counters
from bitwright.drift.report import Alarm, DriftReport, make_alarm, make_report
from bitwright.drift.tensors import find_tensors
from bitwright.errors import BitwrightError
from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.warn import BitwrightWarning

BUDGET = 0.01
WARM_UP, MEASURED, KEPT = 2, 3, 7
"""Observed runs that allocate memory, then those before the budget applies, and measured times
that are kept: the budget compares their medians."""
MOST_RUNS = 20
"""The largest mean distance of observed runs, over 1 / budget."""
TOLERANCE = 1e-3
LEVEL = 0.01

OnAlarm = Callable[[Alarm], Any]


class Monitor:
    """Counters of the quantized tensors of an executable; `Executable.monitor` makes one."""

    def __init__(
        self,
        exe: Executable,
        *,
        every: int | None = None,
        fraction: float | None = None,
        budget: float = BUDGET,
        seed: int = 0,
        on_alarm: OnAlarm | None = None,
        level: float = LEVEL,
        tolerance: float = TOLERANCE,
        load: str | Path | None = None,
    ) -> None:
        _check(every, fraction, budget, level, tolerance)
        self._every, self._fraction, self._budget = every, fraction, budget
        self._seconds: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """Recent seconds of observed runs, and of counting them."""
        self._warm_up = WARM_UP
        self._draw = np.random.default_rng(seed)
        self._on_alarm = on_alarm
        self._exe: Executable | None = None
        self._is_open = True
        graph = exe.graph
        self.model = graph.name
        found = find_tensors(graph)
        self.unwatched = found.unwatched
        self._counters = Counters(found.tensors, tolerance, level)
        self._counting: Counting | None = None
        if found.tensors:
            self._counting = Counting(graph, found.tensors, *_target(exe))
        self._lock = threading.Lock()
        """Guards the counters."""
        self._turn = threading.Lock()
        """Held while an observed run is counted."""
        self._notes: list[str] = []
        if load is not None:
            self._counters.load(load)
        self._next = self._counters.runs + self._gap(first=True)

    # the runs of the executable

    def attach(self, exe: Executable) -> Self:
        """Observe the runs of an executable, until `close`."""
        exe.set_monitor(self)
        self._exe = exe
        self._is_open = True
        return self

    def run(
        self, engine: Engine, feeds: Mapping[str, Any], out: Mapping[str, Array] | None
    ) -> dict[str, Any]:
        """A run of the engine, observed if it is its turn."""
        with self._lock:
            self._counters.runs = number = self._counters.runs + 1
            is_due = number >= self._next and self._counting is not None and self._is_open
            if is_due:
                self._next = number + self._gap()
        if not is_due:
            return engine.run(feeds, out)
        assert self._counting is not None
        states = engine.copy().states if self._counting.reads_state else {}
        if out:  # a result may replace an input
            feeds = {name: _copied(value) for name, value in feeds.items()}
        begin = time.perf_counter()
        results = engine.run(feeds, out)
        middle = time.perf_counter()
        try:
            self._observe(feeds, states, number)
            self._adapt(middle - begin, time.perf_counter() - middle)
        except Exception as error:  # a served model must not fail because it is watched
            self._fail(error)
        return results

    def observe(
        self, inputs: Mapping[str, Any], states: Mapping[str, Array] | None = None
    ) -> list[Alarm]:
        """Count one run on these inputs without running the model; returns new alarms."""
        with self._lock:
            self._counters.runs = number = self._counters.runs + 1
        return self._observe(inputs, states or {}, number)

    def _observe(
        self, feeds: Mapping[str, Any], states: Mapping[str, Array], number: int
    ) -> list[Alarm]:
        if self._counting is None:
            return []
        with self._turn:
            counted = self._counting.run(feeds, states)
            with self._lock:
                new = self._counters.update(counted, number)
                alarms = [make_alarm(self._counters, index) for index in new]
        for alarm in alarms if self._on_alarm is not None else ():
            try:
                self._on_alarm(alarm)  # type: ignore[misc]
            except Exception as error:
                warnings.warn(f"on_alarm failed: {error!r}", BitwrightWarning, stacklevel=3)
        return alarms

    def _fail(self, error: Exception) -> None:
        note = f"counting stopped: {type(error).__name__}: {error}"
        with self._lock:
            self._counting = None
            self._notes.append(note)
        warnings.warn(f"the monitor of {self.model!r}: {note}", BitwrightWarning, stacklevel=4)

    def _adapt(self, run: float, counting: float) -> None:
        """Choose the rate of observed runs by the time that counting takes."""
        with self._lock:
            if self._warm_up:
                self._warm_up -= 1
                return
            self._seconds.append((run, counting))
            if self._every is None and self._fraction is None:
                self._next = self._counters.runs + self._gap()

    def _gap(self, first: bool = False) -> int:
        """Runs until the next observed one; `every` and a budget begin with the first run."""
        if self._fraction is not None:
            return int(self._draw.geometric(self._fraction))
        if first:
            return 1
        if self._every is not None:
            return self._every
        if len(self._seconds) < MEASURED:
            return 1
        least = self._budget / MOST_RUNS
        rate = self._budget / max(self.overhead or 0.0, self._budget)
        return int(self._draw.geometric(max(rate, least)))

    @property
    def overhead(self) -> float | None:
        """Seconds of counting per second of an observed run; None without a measurement."""
        if not self._seconds:
            return None
        run, counting = np.median(self._seconds, axis=0)
        return float(counting / max(run, 1e-9))

    # what it found

    @property
    def tensors(self) -> list[str]:
        """The names of the watched tensors."""
        return [one.name for one in self._counters.tensors]

    @property
    def runs(self) -> int:
        """Runs since the start or the last reset."""
        return self._counters.runs

    @property
    def observed(self) -> int:
        """Runs that were counted."""
        return self._counters.observed

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms so far, oldest first."""
        return self.report().alarms

    def report(self) -> DriftReport:
        """Counters, verdicts and alarms."""
        with self._lock:
            return make_report(self.model, self._counters, self.unwatched, self._notes)

    def save(self, path: str | Path) -> None:
        """Write the counters to a file, from which `load` continues."""
        with self._lock:
            self._counters.save(path)

    def load(self, path: str | Path) -> None:
        """Replace the counters by those of a file of the same model."""
        with self._lock:
            self._counters.load(path)
            self._next = self._counters.runs + self._gap(first=True)

    def reset(self) -> None:
        """Forget all runs and alarms."""
        with self._turn, self._lock:
            self._counters.reset()
            self._next = self._gap(first=True)

    def close(self) -> None:
        """Stop observing the executable and its copies; the counters stay."""
        self._is_open = False
        if self._exe is not None:
            self._exe.remove_monitor(self)
            self._exe = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<monitor of {self.model!r}: {self.report().summary()}>"


def monitor(exe: Executable, **options: Any) -> Monitor:
    """A monitor that observes the runs of an executable."""
    return Monitor(exe, **options).attach(exe)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _target(exe: Executable) -> tuple[str, int | None]:
    """The target and the number of threads of an executable."""
    options = getattr(exe.recipe, "options", None)
    if options is not None:
        return options.target, options.threads
    return ("reference" if isinstance(exe.engine, ReferenceEngine) else "cpu"), None


def _check(
    every: int | None, fraction: float | None, budget: float, level: float, tolerance: float
) -> None:
    if every is not None and fraction is not None:
        raise BitwrightError("every and fraction are both given", expected="one of them")
    if every is not None and (not isinstance(every, int) or every < 1):
        raise BitwrightError("every is not a number of runs", expected="1 or more", found=every)
    fractions = ("fraction", fraction, 1.0), ("budget", budget, 1.0), ("level", level, 0.5)
    for name, value, top in fractions:
        if value is not None and not (math.isfinite(value) and 0 < value <= top):
            raise BitwrightError(
                f"{name} is not a fraction", expected=f"above 0, at most {top:g}", found=value
            )
    if not 0 <= tolerance < 1:
        raise BitwrightError("tolerance is not a fraction", expected="0 to 1", found=tolerance)
