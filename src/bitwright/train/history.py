"""What a run reports while it goes on: records of steps, files of metrics, a progress bar."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwright.train.metrics import EventFile, MetricsFile

_SMOOTH = 0.9


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
    ) -> None:
        self.history, self.every = history, max(1, every)
        self._writers: list[MetricsFile | EventFile] = []
        if metrics is not None:
            self._writers.append(MetricsFile(metrics, step))
        if tensorboard is not None:
            self._writers.append(EventFile(tensorboard))
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = _Bar(total, step) if (is_terminal if show is None else show) else None
        self._start, self._samples = time.perf_counter(), 0
        self._sum, self._count = 0.0, 0

    def step(self, number: int, found: Mapping[str, float], rate: float, samples: int) -> None:
        """Report a step that was applied."""
        loss = found["loss"]
        self.history.losses.append(loss)
        self._samples += samples
        self._sum, self._count = self._sum + loss, self._count + 1
        speed = self._samples / max(time.perf_counter() - self._start, 1e-9)
        if self._bar is not None:
            self._bar.step(loss, rate, speed)
        if self._writers and number % self.every == 0:
            record = {"step": number, "loss": self._sum / self._count, "lr": rate, "speed": speed}
            if "grad_norm" in found:
                record["grad_norm"] = found["grad_norm"]
            self._write(record)
            self._sum, self._count = 0.0, 0

    def evaluation(self, number: int, found: Mapping[str, float]) -> None:
        self.history.evaluations.append({"step": number, **found})
        self._write({"step": number, **{f"eval_{name}": value for name, value in found.items()}})
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

    def step(self, loss: float, rate: float, speed: float) -> None:
        before = loss if self._loss is None else self._loss
        self._loss = _SMOOTH * before + (1 - _SMOOTH) * loss
        text = f"loss {self._loss:.4g}  lr {rate:.3g}  {speed:.4g} samples/s"
        self._bar.update(self._task, advance=1, description=text)

    def note(self, step: int, found: Mapping[str, float]) -> None:
        text = "  ".join(f"{name} {value:.5g}" for name, value in found.items())
        self._bar.console.print(f"step {step}: {text}", highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()
