"""Compiling in processes of their own, while this one goes on.

A cold start has tens of kernels to compile, and LLVM, as llvmlite calls it, compiles one at a time
in a process. Workers take them as they come, the largest first, and what LLVM takes in memory goes
with the workers.

    job = submit(text, target)       # at once
    code = job.result()              # waits for it; compiles here what no worker does

    to a worker    a line of JSON (target, size of the text), then the text; and again
    from it        for each text, 8 bytes of length, then the object code

A worker that cannot be started, or fails, is no error: whoever waits compiles by himself, and meets
the reason there if it is the text's.
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

FEWEST = 4
"""Modules that keep a worker busy for longer than it takes to start, about 0.15 s."""
SMALL_CALLS = 8
"""Times that a worker is started for fewer, so that a process which compiles little never loads
LLVM; one that goes on compiling is quicker by itself."""
MOST = 8
_SECONDS = 300
_FACTS = ("triple", "cpu", "llvm_features", "abi")


class Job:
    """A text on its way to object code."""

    def __init__(self, text: str, target: Target, then: Callable[[bytes], None]) -> None:
        self.text, self.target, self._then = text, target, then
        self.code: bytes | None = None
        self.worker: _Worker | None = None

    def result(self) -> bytes:
        """The object code, as soon as it is there; made here where no worker is at it."""
        with _pool.changed:
            while self.code is None and _pool.serves(self):
                _pool.changed.wait(1)
                _pool.end_stuck()
            if self.code is None:
                _pool.withdraw(self)
        if self.code is None:
            self.done(jit.compile_object(self.text, self.target))
        assert self.code is not None
        return self.code

    def done(self, code: bytes) -> None:
        """Take the object code; `then` has seen it before anybody who waits."""
        self._then(code)
        with _pool.changed:
            self.code, self.text, self.worker = code, "", None
            _pool.changed.notify_all()


class _Worker(threading.Thread):
    """A process, and the thread that feeds it: it ends when nobody has or will have work."""

    def __init__(self) -> None:
        super().__init__(name="bitwright-compiler", daemon=True)
        self.taken: deque[Job] = deque()
        self.process: subprocess.Popen[bytes] | None = None
        self.since = time.monotonic()

    def run(self) -> None:
        try:
            with suppress(OSError, ValueError, EOFError):
                self.process = system.start_python(
                    "from bitwright.backends.cpu.codegen.compilers import work; work()"
                )
                if self.process is not None:
                    self._serve(self.process)
        finally:
            _pool.leave(self)
            if self.process is not None:
                with suppress(OSError, ValueError):
                    self.process.communicate()  # closes its input, and waits until it has ended

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        source, sink = process.stdout, process.stdin
        assert source is not None and sink is not None
        while _pool.has_work(self):
            if (job := _pool.take(self)) is not None:
                sink.write(_request(job))
                sink.flush()
            elif self.taken:
                code = _read(source, int.from_bytes(_read(source, 8), "little"))
                jit.count_compilation()
                self.taken[0].done(code)
                self.taken.popleft()
                self.since = time.monotonic()


def _request(job: Job) -> bytes:
    data = job.text.encode()
    facts = {name: getattr(job.target, name) for name in _FACTS}
    return json.dumps({"target": facts, "size": len(data)}).encode() + b"\n" + data


def _read(file: Any, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the worker has ended")
    return bytes(data)


class _Pool:
    """Texts that wait, and the workers; `changed` guards both."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.workers: set[_Worker] = set()
        self.keepers = 0
        self._waiting: list[tuple[int, int, weakref.ref[Job]]] = []
        """The largest text first; one that nobody wants any more need not be compiled."""
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
        except RuntimeError:  # no thread is to be had: the process ends, or has too many
            self._has_failed = True
        else:
            self.workers.add(worker)

    def _wants_another(self) -> bool:
        running = len(self.workers)
        unfinished = len(self._waiting) + sum(len(worker.taken) for worker in self.workers)
        is_worth = unfinished > FEWEST * running
        if not running and unfinished < 2 * FEWEST:
            is_worth = self._compiles_little
        return is_worth and not self._has_failed and running < _most()

    @property
    def _compiles_little(self) -> bool:
        """Whether this process has not compiled by itself, and not often by a worker."""
        return "llvmlite.binding" not in sys.modules and self._starts < SMALL_CALLS

    def serves(self, job: Job) -> bool:
        """Whether a worker is at this job, or will come to it."""
        if job.worker is not None:
            return job.worker in self.workers
        return bool(self.workers)

    def withdraw(self, job: Job) -> None:
        self._waiting = [entry for entry in self._waiting if entry[2]() not in (job, None)]
        heapify(self._waiting)

    def end_stuck(self) -> None:
        """End workers that have not answered in time."""
        for worker in self.workers:
            is_late = worker.taken and time.monotonic() - worker.since > _SECONDS
            if is_late and worker.process is not None:
                worker.process.kill()

    def has_work(self, worker: _Worker) -> bool:
        """Wait until there is something to do; False if nothing will come."""
        with self.changed:
            while not (worker.taken or self._waiting):
                if not self.keepers:
                    self.workers.discard(worker)  # so that nobody counts on it from here on
                    return False
                self.changed.wait()
            return True

    def take(self, worker: _Worker) -> Job | None:
        """The next job, if the worker has none, or its only one will soon be done.

        A second text lies ready for the worker while this process is busy with other things, as
        long as no other worker would have to wait for it.
        """
        with self.changed:
            most = 2 if len(self._waiting) >= len(self.workers) else 1
            while self._waiting and len(worker.taken) < most:
                job = heappop(self._waiting)[2]()
                if job is not None:
                    if not worker.taken:
                        worker.since = time.monotonic()
                    worker.taken.append(job)
                    job.worker = worker
                    return job
            return None

    def leave(self, worker: _Worker) -> None:
        with self.changed:
            self._has_failed |= worker in self.workers and self.keepers > 0
            self.workers.discard(worker)
            self.changed.notify_all()

    @contextmanager
    def kept(self, early: int) -> Iterator[None]:
        with self.changed:
            self.keepers += 1
            most = min(early, _most()) if early and self._compiles_little else 0
            while len(self.workers) < most and not self._has_failed:
                self._start()
        try:
            yield
        finally:
            with self.changed:
                self.keepers -= 1
                self._has_failed &= self.keepers > 0
                self.changed.notify_all()


_pool = _Pool()


def _begin_anew() -> None:
    """A forked process has none of the threads, and lets go of the workers' input: they end when
    the last who could write it has closed it."""
    global _pool  # noqa: PLW0603
    for worker in _pool.workers:
        if worker.process is not None and isinstance(worker.process.stdin, io.BufferedWriter):
            worker.process.stdin.raw.close()  # what its buffer holds is the other process's
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def kept_workers(early: int = 0) -> AbstractContextManager[None]:
    """Within it workers stay for the next text, as long as the work that it is put around takes.

    So many are started at once where texts are sure to come.
    """
    return _pool.kept(early)


def submit(text: str, target: Target, then: Callable[[bytes], None] = lambda code: None) -> Job:
    """Have a text compiled, by a worker if there is one to be had; `then` is told the result."""
    job = Job(text, target, then)
    _pool.submit(job)
    return job


def _most() -> int:
    """Workers that may be at work; none where this process is as good as one."""
    cores = knobs.COMPILERS.number() if knobs.COMPILERS.get() else system.cores()
    return min(cores, MOST) if cores > 1 else 0


def work() -> None:
    """The worker: compile what standard input holds, request after request.

    A thread of its own reads, so that nobody waits who writes a text while another is compiled.
    """
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever LLVM prints is no part of the answer
    requests: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        # what is no request ends the worker, silently: a thread that prints may not end well
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
