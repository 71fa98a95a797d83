"""Compiling many modules at once, in processes of their own.

A cold start has tens of kernels to compile, and LLVM, as llvmlite calls it, compiles one at a time
in a process. Workers share them out, and what LLVM takes in memory goes with the workers.

    to a worker    a line of JSON (target, sizes of the texts), then the texts; and again
    from it        for each text, 8 bytes of length, then the object code

A worker that cannot be started, or fails, is no error: the caller compiles by itself, and meets the
reason there if it is the text's.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from bitwright import knobs, system
from bitwright.backends.cpu.jit import compile_object
from bitwright.target import Target

FEWEST = 4
"""Modules that keep a worker busy for longer than it takes to start, about 0.15 s."""
SMALL_CALLS = 8
"""Calls for fewer that get a worker too, so that a process which compiles little never loads LLVM;
one that goes on compiling is quicker by itself."""
MOST = 8
_SECONDS = 300
_small_calls = itertools.count()
_FACTS = ("triple", "cpu", "llvm_features", "abi")


def compile_together(texts: Sequence[str], target: Target) -> list[bytes] | None:
    """Object code of every text, or None where workers cannot help."""
    most = min(_most(), MOST)
    workers = min(most, len(texts) // FEWEST)
    if workers < 2:
        workers = min(1, len(texts))
        is_loaded = "llvmlite.binding" in sys.modules
        if most < 2 or is_loaded or (not _idle and next(_small_calls) >= SMALL_CALLS):
            return None
    if not workers:
        return None
    shares: list[list[int]] = [[] for _ in range(workers)]
    sizes = [0] * workers
    for number in sorted(range(len(texts)), key=lambda number: -len(texts[number])):
        least = sizes.index(min(sizes))
        shares[least].append(number)
        sizes[least] += len(texts[number])
    facts = {name: getattr(target, name) for name in _FACTS}
    with ThreadPoolExecutor(workers) as threads:
        made = list(threads.map(lambda s: _ask([texts[n] for n in s], facts), shares))
    codes: dict[int, bytes] = {}
    for share, part in zip(shares, made, strict=True):
        if part is None or len(part) != len(share):
            return None
        codes.update(zip(share, part, strict=True))
    return [codes[number] for number in range(len(texts))]


def _most() -> int:
    text = knobs.COMPILERS.get()
    return int(text) if text.isdigit() else system.cores()


class _Worker:
    """A process that answers one request after another, and ends when its input does."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def compile(self, texts: Sequence[str], facts: dict[str, str]) -> list[bytes] | None:
        """The object code of the texts; None if it fails, or is not done in time."""
        data = [text.encode() for text in texts]
        header = json.dumps({"target": facts, "sizes": [len(part) for part in data]}).encode()
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        limit = threading.Timer(_SECONDS, self._process.kill)
        limit.start()
        try:
            sink.write(b"".join([header, b"\n", *data]))
            sink.flush()
            return [_read(source, int.from_bytes(_read(source, 8), "little")) for _ in texts]
        except (OSError, ValueError, EOFError):
            return None
        finally:
            limit.cancel()

    def close(self) -> None:
        with suppress(OSError, ValueError):
            self._process.communicate()  # closes its input, and waits until it has ended


def _read(file: Any, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the worker has ended")
    return bytes(data)


_idle: list[_Worker] = []
"""Workers that wait for the next call, within `kept_workers`."""
_keepers = 0
_lock = threading.Lock()


@contextmanager
def kept_workers() -> Iterator[None]:
    """Within it workers stay for the next call, as long as the work that it is put around takes."""
    global _keepers  # noqa: PLW0603
    with _lock:
        _keepers += 1
    try:
        yield
    finally:
        with _lock:
            _keepers -= 1
            ended = [] if _keepers else _idle[:]
            del _idle[: len(ended)]
        for worker in ended:
            worker.close()


def _ask(texts: Sequence[str], facts: dict[str, str]) -> list[bytes] | None:
    """What a worker makes of these texts; None if it does not."""
    with _lock:
        worker = _idle.pop() if _idle else None
    if worker is None:
        process = system.start_python("from bitwright.backends.cpu.compilers import work; work()")
        if process is None:
            return None
        worker = _Worker(process)
    made = worker.compile(texts, facts)
    with _lock:
        is_kept = made is not None and _keepers > 0
        if is_kept:
            _idle.append(worker)
    if not is_kept:
        worker.close()
    return made


def work() -> None:
    """The worker: compile what standard input holds, request after request."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever LLVM prints is no part of the answer
    while line := source.readline():
        header = json.loads(line)
        target: Any = SimpleNamespace(**header["target"])
        # all of them before the first answer: nobody reads it while texts are still being written
        texts = [source.read(size).decode() for size in header["sizes"]]
        for text in texts:
            code = compile_object(text, target)
            sink.write(len(code).to_bytes(8, "little") + code)
        sink.flush()
