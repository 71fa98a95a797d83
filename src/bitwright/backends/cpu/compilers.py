"""Compiling many modules at once, in processes of their own.

A cold start has tens of kernels to compile, and LLVM, as llvmlite calls it, compiles one at a time
in a process. Workers share them out, and what LLVM takes in memory goes with the workers.

    to a worker    a line of JSON (target, sizes of the texts), then the texts
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

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
# Isolated: the folder that the user happens to be in is no place to import from.
_START = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from bitwright.backends.cpu.compilers import work; work()"
)


def compile_together(texts: Sequence[str], target: Target) -> list[bytes] | None:
    """Object code of every text, or None where workers cannot help."""
    most = min(_workers(), MOST)
    workers = min(most, len(texts) // FEWEST)
    if workers < 2:
        workers = min(1, len(texts))
        is_loaded = "llvmlite.binding" in sys.modules
        if most < 2 or is_loaded or next(_small_calls) >= SMALL_CALLS:
            return None
    if not workers or not _can_start():
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


def _workers() -> int:
    text = knobs.COMPILERS.get()
    return int(text) if text.isdigit() else system.cores()


def _can_start() -> bool:
    """Whether `sys.executable` is Python itself, and not a program that Python is part of."""
    name = Path(sys.executable or "").name.lower()
    return name.startswith(("python", "pypy")) and not getattr(sys, "frozen", False)


def _ask(texts: Sequence[str], facts: dict[str, str]) -> list[bytes] | None:
    """What a new worker makes of these texts; None if it does not."""
    data = [text.encode() for text in texts]
    header = json.dumps({"target": facts, "sizes": [len(part) for part in data]}).encode()
    paths = [str(Path(path).absolute()) for path in sys.path if path]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _START, *paths],
            input=b"".join([header, b"\n", *data]),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    answer, codes = memoryview(done.stdout), []
    while answer:
        size = int.from_bytes(answer[:8], "little")
        codes.append(bytes(answer[8 : 8 + size]))
        answer = answer[8 + size :]
    return codes


def work() -> None:
    """The worker: compile what standard input holds."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever LLVM prints is no part of the answer
    header = json.loads(source.readline())
    target = SimpleNamespace(**header["target"])
    for size in header["sizes"]:
        code = compile_object(source.read(size).decode(), target)
        sink.write(len(code).to_bytes(8, "little") + code)
    sink.close()
