"""Runs many generations together: they join and leave the batch at any step.

    scheduler.add(job)
    while scheduler.step(): ...

A step gives every decoding job its rows, and what is left of the row budget to prompts.
"""

from __future__ import annotations

import threading
from collections import deque

from bitwright.errors import BitwrightError, RunError
from bitwright.llm.engine.engine import CHUNK, Engine, Work
from bitwright.llm.generation.job import Job

SHARED_CHUNK = 128
"""Rows of prompts in one step while others decode, so that these do not wait long."""


class Scheduler:
    """Jobs over one engine; at most one job per slot runs, the others wait in order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._lock = threading.Lock()
        self.steps = self.rows = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._active)

    def check(self, job: Job) -> None:
        """Raise if a job's prompt is empty, does not fit the context or has unknown tokens."""
        if not job.prompt:
            raise RunError("the prompt has no token", where="prompt")
        context = self.engine.context
        if len(job.prompt) >= context:
            raise RunError(
                "the prompt does not fit the context",
                expected=f"at most {context - 1} tokens",
                found=len(job.prompt),
                hint="Load the model with a larger context, or shorten the prompt.",
            )
        job.tokenizer.check(job.prompt)
        rows = self.engine.decoder.vocabulary  # a tokenizer may have more tokens than the model
        if max(job.prompt) >= rows:
            raise RunError(
                f"token {max(job.prompt)} is not in the model's vocabulary",
                where="prompt",
                expected=f"0 to {rows - 1}",
            )

    def add(self, job: Job) -> None:
        """Queue a job; `check` says what may be wrong with it."""
        self.check(job)
        with self._lock:
            self._waiting.append(job)

    def step(self) -> bool:
        """Run once; False if there was nothing to do."""
        with self.engine.lock:
            self._drop_cancelled()
            self._admit()
            if not self._active:
                return False
            batch = self._batch()
            if not batch:
                return True
            works = [work for _, work in batch]
            try:
                results = self.engine.run(works)
            except Exception as error:
                self._fail_all([job for job, _ in batch], error)
                return True
            self.steps += 1
            self.rows += sum(len(work.tokens) for work in works)
            for (job, work), logits in zip(batch, results, strict=True):
                try:
                    job.advance(work, logits, self.engine.context)
                except Exception as error:
                    job.fail(_as_error(error))
                if job.is_done:
                    self._end(job)
            return True

    def cancel_all(self, error: BitwrightError | None = None) -> None:
        """End every job, with an error or as cancelled."""
        with self.engine.lock:
            with self._lock:
                waiting, self._waiting = list(self._waiting), deque()
            for job in (*waiting, *self._active):
                if not job.is_done:
                    job.stop() if error is None else job.fail(error)
            for job in list(self._active):
                self._end(job)

    def _drop_cancelled(self) -> None:
        with self._lock:
            dropped = [job for job in self._waiting if job.is_cancelled]
            if dropped:
                self._waiting = deque(job for job in self._waiting if not job.is_cancelled)
        for job in dropped:
            job.stop()
        for job in [job for job in self._active if job.is_cancelled]:
            job.stop()
            self._end(job)

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self.engine.decoder.slots:
            with self._lock:
                job = self._waiting.popleft()
            job.start(self.engine.reuse(job.sequence, job.prompt))
            self._active.append(job)

    def _batch(self) -> list[tuple[Job, Work]]:
        """Jobs and their rows for one run."""
        batch: list[tuple[Job, Work]] = []
        decoding = [job for job in self._active if job.is_decoding]
        rows = CHUNK
        for job in decoding:
            try:
                work = job.work(max(1, CHUNK // len(decoding)), self.engine.context)
            except Exception as error:  # a drafter, for example
                job.fail(_as_error(error))
                self._end(job)
                continue
            batch.append((job, work))
            rows -= len(work.tokens)
        left = min(rows, SHARED_CHUNK) if batch else rows
        for job in [job for job in self._active if not job.is_decoding]:
            if left <= 0:
                break
            work = job.work(left, self.engine.context)
            batch.append((job, work))
            left -= len(work.tokens)
        return batch

    def _end(self, job: Job) -> None:
        if job.drafter is not None:
            job.drafter.close()
        self.engine.release(job.sequence)
        self._active.remove(job)

    def _fail_all(self, jobs: list[Job], error: Exception) -> None:
        """A run failed: what its sequences hold is unknown."""
        for job in jobs:
            job.fail(_as_error(error))
            job.sequence.tokens = []
            self._end(job)


class GenerationError(RunError):
    """A generation ended for a reason that is not in its request."""


def _as_error(error: Exception) -> BitwrightError:
    if isinstance(error, BitwrightError):
        return error
    return GenerationError(f"the generation failed: {type(error).__name__}: {error}")
