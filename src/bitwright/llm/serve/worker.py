"""The thread that runs generations, and generations as asynchronous streams of pieces."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

from bitwright.errors import RunError
from bitwright.llm.generation.job import Job, Piece
from bitwright.llm.generation.scheduler import GenerationError, Scheduler

log = logging.getLogger("bitwright.serve")


class Worker:
    """Steps a scheduler as long as it has work."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._wake = threading.Event()
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="bitwright-worker", daemon=True)
        self._thread.start()

    @property
    def load(self) -> int:
        """Generations that wait or run."""
        return self.scheduler.active + self.scheduler.waiting

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._stops

    def submit(self, job: Job) -> None:
        if self._stops:
            raise RunError("the server is shutting down")
        self.scheduler.add(job)
        self._wake.set()
        if self._stops:  # stopped meanwhile: its thread may not see the job
            self.scheduler.cancel_all()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Cancel everything and end the thread."""
        self._stops = True
        self._wake.set()
        self._thread.join(60)
        self.scheduler.cancel_all()

    def _run(self) -> None:
        while not self._stops:
            try:
                has_work = self.scheduler.step()
            except Exception as error:
                log.exception("a step of the scheduler failed")
                self.scheduler.cancel_all(
                    GenerationError(f"the step failed: {type(error).__name__}")
                )
                has_work = True
            if not has_work:
                self._wake.wait()
                self._wake.clear()


@dataclass(eq=False)
class Generating:
    """A generation that an event loop follows."""

    job: Job
    worker: Worker
    queue: asyncio.Queue[Piece]

    def cancel(self) -> None:
        """End it soon, wherever it stands."""
        self.job.is_cancelled = True
        self.worker.wake()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces until the last one; leaving early cancels the generation."""
        try:
            while True:
                piece = await self.queue.get()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            if not self.job.is_done:
                self.cancel()
