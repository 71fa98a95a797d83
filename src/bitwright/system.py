"""The operating system: cores, caches, memory, the cache folder, how threads sleep.

This file has all platform-specific code; each function has a fallback that is correct, if less
precise, on every platform.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from bitwright import cpuid, knobs
from bitwright.warn import warn_once

_CPU = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Caches:
    """Bytes of data cache: L1 and L2 of one core, and the shared L3."""

    l1: int = 32 << 10
    l2: int = 512 << 10
    l3: int = 0


def caches() -> Caches:
    """The caches of this machine; an unknown level keeps its default."""
    sizes: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for index in (_CPU / "cpu0" / "cache").glob("index*"):
            if _read(index / "type") != "Instruction" and _read(index / "level") in "123":
                sizes[f"l{_read(index / 'level')}"] = _bytes(_read(index / "size"))
    return Caches(**sizes)


def cores() -> int:
    """The physical cores this process may use, within its CPU affinity and cgroup quota."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    siblings = set()
    for cpu in allowed:
        try:
            siblings.add(_read(_CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list"))
        except OSError:
            siblings.add(str(cpu))
    return max(1, min(len(siblings), _quota() or len(siblings)))


def _quota() -> int:
    """The cores of the cgroup's quota, rounded up; 0 without a limit."""
    with suppress(OSError, ValueError):
        limit, period = _read(Path("/sys/fs/cgroup/cpu.max")).split()
        if limit != "max":
            return -(-int(limit) // int(period))
    return 0


def _read(path: Path) -> str:
    return path.read_text().strip()


def _bytes(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


def cache_folder() -> Path | None:
    """The cache folder; None if the knob disables the cache."""
    where = knobs.CACHE.get()
    if where in ("", "off"):
        return None
    if where != "default":
        return Path(where)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bitwright"


_LOADED = time.time_ns()


@cache
def sources() -> str:
    """Identifies this installation of bitwright: a hash of the sizes and times of its files.

    If files changed after this process started, the result is unique to the process: it may run
    a mixture of old and new sources.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(str(here).encode())
    folders = [str(here)] if here.is_dir() else []
    if not folders:  # bitwright is in an archive
        state = next(path for path in here.parents if path.exists()).stat()
        digest.update(f"{state.st_size} {state.st_mtime_ns}\n".encode())
    while folders:
        for entry in sorted(os.scandir(folders.pop()), key=lambda entry: entry.path):
            if entry.is_dir():
                folders.append(entry.path)
            elif entry.name.endswith(".py"):
                state = entry.stat()
                digest.update(f"{entry.path} {state.st_size} {state.st_mtime_ns}\n".encode())
                if _LOADED < state.st_mtime_ns <= time.time_ns():
                    digest.update(f"changed since {_LOADED}, {os.getpid()}\n".encode())
    return digest.hexdigest()


_MAGIC = b"bwkept\0\2"
_BYTES_OF_DIGEST = 32


# The cache contains machine code, so no other user may be able to write it: folders and files must
# belong to this user or root, and must not be writable by others.

_OTHERS_MAY_WRITE = 0o022


def is_private(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user or root and nobody else may write it."""
    if not hasattr(os, "geteuid"):  # Windows protects user folders itself
        return True
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_MAY_WRITE


def require_private(path: Path | str, found: os.stat_result) -> None:
    """Raise a `PermissionError` and warn once if a file or folder is not private."""
    if is_private(found):
        return
    mine = found.st_uid in (os.geteuid(), 0)
    reason = "others may write it" if mine else f"it belongs to user {found.st_uid}"
    fix = f"`chmod go-w {path}`" if mine else "another folder"
    warn_once(
        f"cache {str(path)!r}",
        f"{reason}, so it is not used: its contents would be executed. "
        f"Use {fix}, or set {knobs.CACHE.name}.",
    )
    raise PermissionError(f"{reason}: {path}")


def open_private(path: Path) -> IO[bytes]:
    """Open a cache file for reading; raises an `OSError` if it is not private."""
    require_private(path.parent, os.stat(path.parent))
    file = open(path, "rb")  # noqa: SIM115
    try:
        require_private(path, os.fstat(file.fileno()))
    except PermissionError:
        file.close()
        raise
    return file


def write_private(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a cache file atomically, with mode 0600; creates missing folders with mode 0700."""
    missing = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    require_private(path.parent, os.stat(path.parent))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def write_entry(path: Path, data: bytes) -> None:
    """Write a cache entry with a checksum."""
    write_private(path, lambda file: file.write(_MAGIC + _digest(path, data) + data))


def read_entry(path: Path) -> bytes | None:
    """The data of a cache entry; None if it is missing, truncated, corrupt or not private."""
    try:
        with open_private(path) as file:
            whole = file.read()
    except OSError:
        return None
    start = len(_MAGIC) + _BYTES_OF_DIGEST
    digest, data = whole[len(_MAGIC) : start], whole[start:]
    good = whole[: len(_MAGIC)] == _MAGIC and _digest(path, data) == digest
    return data if good else None


def _digest(path: Path, data: bytes) -> bytes:
    """The checksum of an entry; it includes the name, so a renamed entry is invalid."""
    return hashlib.sha256(path.name.encode() + b"\0" + data).digest()


def start_python(code: str) -> subprocess.Popen[bytes] | None:
    """Start a Python process that runs the code with this process's `sys.path`.

    Returns None if `sys.executable` is not a Python interpreter (embedded or frozen). The process
    is isolated (-I): it does not import from the current folder.
    """
    name = Path(sys.executable or "").name.lower()
    if not name.startswith(("python", "pypy")) or getattr(sys, "frozen", False):
        return None
    paths = [str(Path(path).absolute()) for path in sys.path if path]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", f"import sys; sys.path[:] = sys.argv[1:]; {code}", *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except (OSError, ValueError):
        return None


def resident_bytes() -> int | None:
    """The resident memory of this process, or its peak if only that is known; else None."""
    with suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text().splitlines()
        kilobytes = next(line for line in status if line.startswith("VmRSS:")).split()[1]
        return int(kilobytes) << 10
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
    return None


@cache
def processor() -> str:
    """Identifies the processor model; empty if unknown.

    `cpuid` comes first, because in an emulated process /proc/cpuinfo describes the real machine.
    """
    identity = cpuid.identity()
    if identity:
        return hashlib.sha256(identity).hexdigest()
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
        lines = [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogo"))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return ""


def trim_memory(collect: bool = True) -> None:
    """Return unused heap memory to the system; `collect` also frees objects in cycles first."""
    if collect:
        gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_pages(file: mmap.mmap) -> None:
    """Release the pages of a mapped file; later reads load them again."""
    with suppress(OSError, ValueError, AttributeError):
        file.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Futex:
    """The address of libc's `syscall`, and the number of futex(2)."""

    function: int
    number: int


def futex() -> Futex | None:
    """The futex call for emitted code, or None if the system has none."""
    number = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None:
        return None
    with suppress(OSError, AttributeError):
        function = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
        return Futex(function, number) if function else None
    return None


def processor_function() -> int:
    """The address of a C function that returns the current processor's number, or 0."""
    with suppress(OSError, AttributeError):
        return ctypes.cast(ctypes.CDLL(None).sched_getcpu, ctypes.c_void_p).value or 0
    return 0


def exclude_processor(threads: Sequence[int], processor: int) -> None:
    """Exclude a processor from the affinity of threads, if enough other processors exist.

    The scheduler often wakes a thread on the processor of its waker, even if others are idle.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0) - {processor}
    if len(allowed) >= len(threads):
        for thread in threads:
            with suppress(OSError):
                os.sched_setaffinity(thread, allowed)


_CLOCK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))


def _write_time(number: int, moment: Any) -> int:
    moment.contents[:] = divmod(time.perf_counter_ns(), 1_000_000_000)
    return 0


_python_clock = _CLOCK(_write_time)


def clock() -> tuple[int, int]:
    """The address of a C function `int f(int number, int64 *time)`, and the number to pass.

    It writes seconds and nanoseconds of a monotonic clock: clock_gettime, or a Python callback
    that takes a microsecond longer.
    """
    with suppress(OSError, AttributeError):
        function = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
        if function and ctypes.sizeof(ctypes.c_long) == 8:
            return function, time.CLOCK_MONOTONIC
    return ctypes.cast(_python_clock, ctypes.c_void_p).value or 0, 0


def yield_function() -> int:
    """The address of a C function without arguments that yields the core, or 0."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("kernel32" if sys.platform == "win32" else None)
        function = library.SwitchToThread if sys.platform == "win32" else library.sched_yield
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA."""


@cache
def allow_tiles() -> bool:
    """Request permission to use AMX tiles for this process; whether it was granted.

    Linux saves tile state only for processes that requested it; later threads inherit permission.
    """
    is_known = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_known or knobs.TILES.get() == "off":
        return False
    with suppress(OSError, AttributeError):
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        arguments = (_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
        return bool(call(*map(ctypes.c_long, arguments)) == 0)
    return False
