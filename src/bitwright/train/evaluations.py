"""Evaluations during a run: when they are due, the best model, and the early stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from bitwright.errors import TrainingError
from bitwright.train.checkpoints import Progress
from bitwright.train.data import Position
from bitwright.train.history import Reporter


class Evaluated(Protocol):
    """What is evaluated: a trainer."""

    progress: Progress

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]: ...

    def keep_best(self) -> None: ...


class Evaluations:
    """Runs evaluations when they are due, keeps the best model, decides on an early stop.

    What was evaluated last is part of the progress: a run that is resumed behind a step whose
    evaluation is missing does it first.
    """

    def __init__(
        self,
        trainer: Evaluated,
        data: Any,
        every: int | None,
        batch_size: int | None,
        patience: int | None,
        metric: str,
        reporter: Reporter,
    ) -> None:
        for what, value in (("patience", patience), ("evaluate_every", every)):
            if value is None:
                continue
            if data is None:
                raise TrainingError(f"{what} needs evaluations", expected="evaluate=, --evaluate")
            if value < 1:
                raise TrainingError(f"{what} is out of range", expected="at least 1", found=value)
        self.trainer, self.data, self.every = trainer, data, every
        self.batch_size, self.patience, self.metric = batch_size, patience, metric
        self.reporter = reporter
        progress = trainer.progress
        if data is not None and progress.metric != metric:
            progress.metric, progress.best, progress.stale = metric, None, 0

    @property
    def is_stopped(self) -> bool:
        """Whether too many evaluations brought no improvement."""
        return self.patience is not None and self.trainer.progress.stale >= self.patience

    def before(self, following: Position) -> None:
        """Evaluate if that is due before the batch that leads to a position."""
        progress = self.trainer.progress
        if self.every is not None:
            is_due = progress.step % self.every == 0
        else:
            is_due = following.epoch != progress.position.epoch and progress.position.index > 0
        if is_due:
            self.now()

    def now(self) -> None:
        """Evaluate the present step, unless that was done."""
        progress = self.trainer.progress
        if self.data is None or progress.evaluated == progress.step:
            return
        found = self._numbers()
        self.reporter.evaluation(progress.step, found)
        if self.metric not in found:
            raise TrainingError(
                f"the evaluation gives no {self.metric!r}", expected=", ".join(found)
            )
        value = found[self.metric]
        sign = 1 if "loss" in self.metric or "error" in self.metric else -1
        best = progress.best
        # a NaN is never the best
        if not math.isnan(value) and (best is None or sign * value < sign * best):
            progress.best, progress.best_step, progress.stale = value, progress.step, 0
            self.trainer.keep_best()
        else:
            progress.stale += 1
        progress.evaluated = progress.step
        if self.is_stopped:
            self.reporter.history.stopped = (
                f"{self.metric} did not improve in {progress.stale} evaluations"
            )

    def _numbers(self) -> dict[str, float]:
        if not callable(self.data) or hasattr(self.data, "__iter__"):
            return self.trainer.evaluate(self.data, batch_size=self.batch_size)
        found = self.data(self.trainer)
        if not isinstance(found, Mapping):
            raise TrainingError(
                "the evaluation function gives no numbers by name",
                expected="a dict",
                found=type(found).__name__,
            )
        return {str(name): float(value) for name, value in found.items()}
