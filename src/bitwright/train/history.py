"""What a run reports while it goes on: records of steps, files of metrics, progress.

Progress is a bar on a terminal, and lines where the output goes to a file.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from bitwright.train.metrics import EVALUATION, EventFile, MetricsFile

_SMOOTH = 0.9
_LINES, _SECONDS = 10, 60.0
"""A run without a terminal prints about so many lines, and one after so many seconds."""


@dataclass
class History:
    """The records of a run: loss and learning rate by step, evaluations, why it ended."""

    losses: list[float] = field(default_factory=list)
    """The loss of each step of this process."""
    first_step: int = 0
    """The number of the step before the first one in `losses`."""
    evaluations: list[dict[str, float]] = field(default_factory=list)
    skipped: int = 0
    """Steps that an overflow left out (f16)."""
    stopped: str = ""
    """Why the run ended early, or ""."""

    @property
    def loss(self) -> float:
        """The loss of the last step; NaN before the first."""
        return self.losses[-1] if self.losses else math.nan


class Reporter:
    """Writes metrics and shows progress."""

    def __init__(
        self,
        history: History,
        total: int | None,
        step: int,
        metrics: str | Path | None,
        tensorboard: str | Path | None,
        show: bool | None,
        every: int,
        evaluated: int = 0,
    ) -> None:
        self.history, self.every = history, max(1, every)
        self._writers: list[MetricsFile | EventFile] = []
        if metrics is not None:
            self._writers.append(MetricsFile(metrics, step, evaluated))
        if tensorboard is not None:
            self._writers.append(EventFile(tensorboard, step))
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: _Bar | _Lines | None = None
        if is_terminal and show is not False:
            self._bar = _Bar(total, step)
        elif show:
            self._bar = _Lines(total, step)
        self._clock = _Clock()
        self._sum, self._count = 0.0, 0

    def step(self, number: int, found: Mapping[str, float], rate: float, samples: int) -> None:
        """Report a step that was applied."""
        loss = found["loss"]
        self.history.losses.append(loss)
        self._sum, self._count = self._sum + loss, self._count + 1
        speed = self._clock.speed(samples)
        if self._bar is not None:
            self._bar.step(number, loss, rate, speed)
        if self._writers and number % self.every == 0:
            record = {"step": number, "loss": self._sum / self._count, "lr": rate, "speed": speed}
            if "grad_norm" in found:
                record["grad_norm"] = found["grad_norm"]
            self._write(record)
            self._sum, self._count = 0.0, 0

    def evaluation(self, number: int, found: Mapping[str, float]) -> None:
        self.history.evaluations.append({"step": number, **found})
        self._write({"step": number, **{EVALUATION + name: value for name, value in found.items()}})
        self._clock.restart()
        if self._bar is not None:
            self._bar.note(number, found)

    def _write(self, record: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.add(record)

    def close(self) -> None:
        for writer in self._writers:
            with suppress(OSError):
                writer.close()
        if self._bar is not None:
            self._bar.close()


class _Clock:
    """The speed of steps in samples per second, without compilation and evaluations."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._first = time.perf_counter()
        self._seconds, self._samples = 0.0, 0

    def speed(self, samples: int) -> float:
        """The speed after a step; the first step counts only while there is no other."""
        now = time.perf_counter()
        if self._begin is not None:
            self._seconds, self._samples = (
                self._seconds + now - self._begin,
                self._samples + samples,
            )
        found = self._samples or samples
        seconds = self._seconds if self._samples else now - self._first
        self._begin = now
        return found / max(seconds, 1e-9)

    def restart(self) -> None:
        """Leave out the time since the last step."""
        if self._begin is not None:
            self._begin = time.perf_counter()


class _Bar:
    """A progress bar with loss, learning rate, speed and estimated time."""

    def __init__(self, total: int | None, step: int) -> None:
        from rich import progress as rich  # slow to import, and most runs do not need it
        from rich.console import Console

        columns = (
            rich.TextColumn("step"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.description}"),
            rich.TimeRemainingColumn(),
        )
        self._bar = rich.Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=total, completed=step)
        self._loss: float | None = None
        self._bar.start()

    def step(self, number: int, loss: float, rate: float, speed: float) -> None:
        before = loss if self._loss is None else self._loss
        self._loss = _SMOOTH * before + (1 - _SMOOTH) * loss
        self._bar.update(self._task, advance=1, description=_described(self._loss, rate, speed))

    def note(self, step: int, found: Mapping[str, float]) -> None:
        self._bar.console.print(_evaluated(step, found), highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


class _Lines:
    """Lines with the mean loss since the last line, learning rate, speed and estimated time."""

    def __init__(self, total: int | None, step: int) -> None:
        self.total, self._first, self._last = total, step, step
        left = 0 if total is None else total - step
        self._every = max(1, -(-left // _LINES)) if left else 100
        self._begin = self._shown = time.perf_counter()
        self._sum = 0.0

    def step(self, number: int, loss: float, rate: float, speed: float) -> None:
        self._sum += loss
        now = time.perf_counter()
        done = number - self._first - 1  # without the first step, which compiles
        self._begin = self._begin if done else now
        is_due = number % self._every == 0 or number == self.total or not done
        if not is_due and now - self._shown < _SECONDS:
            return
        count = str(number) if self.total is None else f"{number}/{self.total}"
        text = _described(self._sum / (number - self._last), rate, speed)
        if self.total is not None and done and number < self.total:
            left = (now - self._begin) / done * (self.total - number)
            text += f"  {timedelta(seconds=round(left))} left"
        print(f"step {count}  {text}", file=sys.stderr, flush=True)
        self._sum, self._last, self._shown = 0.0, number, now

    def note(self, step: int, found: Mapping[str, float]) -> None:
        print(_evaluated(step, found), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open."""


def _described(loss: float, rate: float, speed: float) -> str:
    many = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
    return f"loss {loss:.4g}  lr {rate:.3g}  {many} samples/s"


def _evaluated(step: int, found: Mapping[str, float]) -> str:
    values = "  ".join(f"{name} {value:.5g}" for name, value in found.items())
    return f"evaluation after step {step}: {values}"
