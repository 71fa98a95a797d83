"""Asynchronous compilation in worker processes.

A cold start compiles tens of kernels, and LLVM, as llvmlite calls it, compiles one module at a time
per process. Workers take the largest pending module first; LLVM's memory is freed when they exit.

    job = submit(text, target)       # returns at once
    code = job.result()              # waits; compiles in this process if no worker does

    to a worker    per module: a line of JSON (target, size of the text), then the text
    from it        per module: 8 bytes of length, then the object code

A worker that cannot be started, or fails, is not an error: `result` compiles the text in this
process and raises there if the text is at fault.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from heapq import heapify, heappop, heappush
from types import SimpleNamespace
from typing import Any

from bitwright import knobs, system
from bitwright.backends.cpu.codegen import jit
from bitwright.target import Target

MODULES_PER_WORKER = 4
"""Modules that take a worker longer to compile than it takes to start, about 0.15 s."""
MAX_SMALL_STARTS = 8
"""How often a worker is started for fewer modules, so that a process that compiles little never
loads LLVM; a process that compiles more often is faster without a worker."""
MAX_WORKERS = 8
_TIMEOUT_SECONDS = 300
_TARGET_FIELDS = ("triple", "cpu", "llvm_features", "abi")


class Job:
    """A module being compiled."""

    def __init__(self, text: str, target: Target, then: Callable[[bytes], None]) -> None:
        self.text, self.target, self._then = text, target, then
        self.code: bytes | None = None
        self.worker: _Worker | None = None

    def result(self) -> bytes:
        """The object code; waits for a worker, or compiles here if none has the job."""
        with _pool.changed:
            while self.code is None and _pool.serves(self):
                _pool.changed.wait(1)
                _pool.kill_stuck()
            if self.code is None:
                _pool.withdraw(self)
        if self.code is None:
            self.done(jit.compile_object(self.text, self.target))
        assert self.code is not None
        return self.code

    def done(self, code: bytes) -> None:
        """Set the object code; calls `then` before it wakes waiting threads."""
        self._then(code)
        with _pool.changed:
            self.code, self.text, self.worker = code, "", None
            _pool.changed.notify_all()


class _Worker(threading.Thread):
    """A worker process and the thread that feeds it; both end when no more work can arrive."""

    def __init__(self) -> None:
        super().__init__(name="bitwright-compiler", daemon=True)
        self.jobs: deque[Job] = deque()
        self.process: subprocess.Popen[bytes] | None = None
        self.since = time.monotonic()

    def run(self) -> None:
        try:
            with suppress(OSError, ValueError, EOFError):
                with _starting:
                    self.process = system.start_python(
                        "from bitwright.backends.cpu.codegen.compilers import work; work()"
                    )
                if self.process is not None:
                    self._serve(self.process)
        finally:
            _pool.leave(self)
            if self.process is not None:
                with suppress(OSError, ValueError):
                    self.process.communicate()  # closes its input and waits for its exit

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        source, sink = process.stdout, process.stdin
        assert source is not None and sink is not None
        while _pool.has_work(self):
            if (job := _pool.take(self)) is not None:
                sink.write(_request(job))
                sink.flush()
            elif self.jobs:
                code = _read(source, int.from_bytes(_read(source, 8), "little"))
                jit.count_compilation()
                self.jobs[0].done(code)
                self.jobs.popleft()
                self.since = time.monotonic()


def _request(job: Job) -> bytes:
    data = job.text.encode()
    facts = {name: getattr(job.target, name) for name in _TARGET_FIELDS}
    return json.dumps({"target": facts, "size": len(data)}).encode() + b"\n" + data


def _read(file: Any, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the worker exited")
    return bytes(data)


class _Pool:
    """The queue of pending jobs, and the workers; `changed` guards both."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.workers: set[_Worker] = set()
        self.holders = 0
        self._waiting: list[tuple[int, int, weakref.ref[Job]]] = []
        """A heap, largest text first; jobs that are no longer referenced are skipped."""
        self._numbers, self._starts, self._has_failed = itertools.count(), 0, False

    def submit(self, job: Job) -> None:
        with self.changed:
            heappush(self._waiting, (-len(job.text), next(self._numbers), weakref.ref(job)))
            while self._wants_another():
                self._start()
            self.changed.notify_all()

    def _start(self) -> None:
        self._starts += not self.workers
        worker = _Worker()
        try:
            worker.start()
        except RuntimeError:  # the interpreter is shutting down, or has too many threads
            self._has_failed = True
        else:
            self.workers.add(worker)

    def _wants_another(self) -> bool:
        running = len(self.workers)
        unfinished = len(self._waiting) + sum(len(worker.jobs) for worker in self.workers)
        is_worth = unfinished > MODULES_PER_WORKER * running
        if not running and unfinished < 2 * MODULES_PER_WORKER:
            is_worth = self._compiles_little
        return is_worth and not self._has_failed and running < _max_workers()

    @property
    def _compiles_little(self) -> bool:
        """Whether this process has not loaded LLVM and has rarely started workers."""
        return "llvmlite.binding" not in sys.modules and self._starts < MAX_SMALL_STARTS

    def serves(self, job: Job) -> bool:
        """Whether a worker has this job or will take it."""
        if job.worker is not None:
            return job.worker in self.workers
        return bool(self.workers)

    def withdraw(self, job: Job) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2]() not in (job, None)]
        heapify(self._waiting)

    def kill_stuck(self) -> None:
        """Kill workers that exceed the timeout."""
        for worker in self.workers:
            is_late = worker.jobs and time.monotonic() - worker.since > _TIMEOUT_SECONDS
            if is_late and worker.process is not None:
                worker.process.kill()

    def has_work(self, worker: _Worker) -> bool:
        """Wait for work; False if no more can arrive."""
        with self.changed:
            while not (worker.jobs or self._waiting):
                if not self.holders:
                    self.workers.discard(worker)  # it takes no further jobs
                    return False
                self.changed.wait()
            return True

    def take(self, worker: _Worker) -> Job | None:
        """The next job, if the worker has none, or one and the queue is long enough.

        A second job lets the worker continue while this process is busy, unless another worker
        would then be idle.
        """
        with self.changed:
            most = 2 if len(self._waiting) >= len(self.workers) else 1
            while self._waiting and len(worker.jobs) < most:
                job = heappop(self._waiting)[2]()
                if job is not None:
                    if not worker.jobs:
                        worker.since = time.monotonic()
                    worker.jobs.append(job)
                    job.worker = worker
                    return job
            return None

    def leave(self, worker: _Worker) -> None:
        with self.changed:
            self._has_failed |= worker in self.workers and self.holders > 0
            self.workers.discard(worker)
            self.changed.notify_all()

    @contextmanager
    def hold(self, early: int) -> Iterator[None]:
        with self.changed:
            self.holders += 1
            most = min(early, _max_workers()) if early and self._compiles_little else 0
            while len(self.workers) < most and not self._has_failed:
                self._start()
        try:
            yield
        finally:
            with self.changed:
                self.holders -= 1
                self._has_failed &= self.holders > 0
                self.changed.notify_all()


_pool = _Pool()
_starting = threading.Lock()
"""Held while a worker process starts and while this process forks: a forked child knows all pipes
that it inherited."""


def _reset_after_fork() -> None:
    """Reset the pool in a forked child: it has no threads, and closes the workers' input so that
    they end when the parent closes it too."""
    global _pool  # noqa: PLW0603
    _starting.release()
    for worker in _pool.workers:
        if worker.process is not None and isinstance(worker.process.stdin, io.BufferedWriter):
            worker.process.stdin.raw.close()  # without flushing: the buffer belongs to the parent
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _starting.acquire(),
        after_in_parent=lambda: _starting.release(),
        after_in_child=_reset_after_fork,
    )


def hold_workers(early: int = 0) -> AbstractContextManager[None]:
    """Keeps workers alive inside the context; `early` of them are started at once."""
    return _pool.hold(early)


def submit(text: str, target: Target, then: Callable[[bytes], None] = lambda code: None) -> Job:
    """Queue a module for compilation; `then` receives the object code."""
    job = Job(text, target, then)
    _pool.submit(job)
    return job


def _max_workers() -> int:
    """The maximum number of workers; 0 on a single core."""
    cores = knobs.COMPILERS.number() if knobs.COMPILERS.get() else system.cores()
    return min(cores, MAX_WORKERS) if cores > 1 else 0


def work() -> None:
    """The worker's main loop: compiles the requests on standard input.

    A separate thread reads, so that writing a request does not block during a compilation.
    """
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of LLVM must not mix with the replies
    requests: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        # a malformed request ends the worker without a traceback
        with suppress(ValueError, KeyError, TypeError, OSError):
            while line := source.readline():
                header = json.loads(line)
                text = source.read(header["size"]).decode()
                requests.put((text, SimpleNamespace(**header["target"])))
        requests.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (request := requests.get()) is not None:
        code = jit.compile_object(*request)
        sink.write(len(code).to_bytes(8, "little") + code)
        sink.flush()
