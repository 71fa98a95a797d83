"""What the operating system tells: cores, caches, memory, the cache folder, how threads sleep.

Every line that is particular to one system is in this file; each fact has a fallback that is right,
if less precise, everywhere else.
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
    """Bytes of data cache: one core's first and second level, and the shared last level."""

    l1: int = 32 << 10
    l2: int = 512 << 10
    l3: int = 0


def caches() -> Caches:
    """Those of this machine; a level that the system does not tell keeps its usual size."""
    sizes: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for index in (_CPU / "cpu0" / "cache").glob("index*"):
            if _read(index / "type") != "Instruction" and _read(index / "level") in "123":
                sizes[f"l{_read(index / 'level')}"] = _bytes(_read(index / "size"))
    return Caches(**sizes)


def cores() -> int:
    """Physical cores this process may use: its affinity and its control group's quota respected."""
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
    """Whole cores that the control group grants, rounded up; 0 where it sets no limit."""
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
    """Where files that can be made again are kept; None where the knob says not to keep any."""
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
    """What tells this installation of bitwright from any other: a hash of its files' states.

    A process whose files were changed after it began runs neither the old sources nor the new ones:
    it is like no other.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(str(here).encode())
    folders = [str(here)] if here.is_dir() else []
    if not folders:  # all of it lies in one file, an archive
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


# Machine code in the cache is executed, so nobody else may have had a hand in it: folders and files
# must belong to this user or to root, and only their owner may write them.

_OTHERS_MAY_WRITE = 0o022


def is_private(found: os.stat_result) -> bool:
    """Whether a file or folder is this user's or root's, and nobody else may write it."""
    if not hasattr(os, "geteuid"):  # Windows keeps a user's folders from others by itself
        return True
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_MAY_WRITE


def require_private(path: Path | str, found: os.stat_result) -> None:
    """Raise a `PermissionError`, and warn once, unless what lies there can be trusted."""
    if is_private(found):
        return
    mine = found.st_uid in (os.geteuid(), 0)
    reason = "others may write it" if mine else f"it belongs to user {found.st_uid}"
    fix = f"`chmod go-w {path}`" if mine else "another folder"
    warn_once(
        f"cache {str(path)!r}",
        f"{reason}, so it is not used: what it holds would be executed. "
        f"Use {fix}, or set {knobs.CACHE.name}.",
    )
    raise PermissionError(f"{reason}: {path}")


def open_private(path: Path) -> IO[bytes]:
    """A file of the cache, open for reading; an `OSError` if it cannot be trusted."""
    require_private(path.parent, os.stat(path.parent))
    file = open(path, "rb")  # noqa: SIM115
    try:
        require_private(path, os.fstat(file.fileno()))
    except PermissionError:
        file.close()
        raise
    return file


def write_private(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file of the cache that only this user may read (0600), in a folder that only this
    user may enter (0700 where it is made here); readers see all of it, or what was there before."""
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
    """Write an entry of the cache."""
    write_private(path, lambda file: file.write(_MAGIC + _digest(path, data) + data))


def read_entry(path: Path) -> bytes | None:
    """An entry as it was kept; None if it is not there, or truncated, corrupt, another's or not
    ours."""
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
    """The name is part of it: an entry that lies in another's place is none."""
    return hashlib.sha256(path.name.encode() + b"\0" + data).digest()


def start_python(code: str) -> subprocess.Popen[bytes] | None:
    """A new Python process that runs the code and can import what this one can; None where there is
    none to be had: `sys.executable` may be a program that Python is part of.

    It is isolated: the folder that the user happens to be in is no place to import from.
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
    """Memory that this process holds now, or its peak where only that is told; None if neither."""
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
    """What tells this processor from others, or nothing where the system does not say.

    The processor's own answer comes first: /proc/cpuinfo describes the real machine also to a
    process that is emulated on it.
    """
    told = cpuid.identity()
    if told:
        return hashlib.sha256(told).hexdigest()
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
        kept = [line for line in first.splitlines() if not line.startswith(("cpu MHz", "bogo"))]
        return hashlib.sha256("\n".join(kept).encode()).hexdigest()
    return ""


def trim_memory() -> None:
    """Return what is no longer used to the system, as far as it takes it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_pages(file: mmap.mmap) -> None:
    """Let a mapped file's pages go; whoever reads them again finds them in the file."""
    with suppress(OSError, ValueError, AttributeError):
        file.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Futex:
    """The `syscall` function of libc and the number under which it reaches futex(2)."""

    function: int
    number: int


def futex() -> Futex | None:
    """How emitted code sleeps on an address, or None where the system has no such call."""
    number = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
    if not sys.platform.startswith("linux") or number is None:
        return None
    with suppress(OSError, AttributeError):
        function = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value
        return Futex(function, number) if function else None
    return None


def processor_function() -> int:
    """The address of a C function that gives the number of the calling thread's processor, or 0."""
    with suppress(OSError, AttributeError):
        return ctypes.cast(ctypes.CDLL(None).sched_getcpu, ctypes.c_void_p).value or 0
    return 0


def exclude_processor(threads: Sequence[int], processor: int) -> None:
    """Keep threads (by their system number) off a processor, if there are others for all of them.

    A thread that is woken is often put beside the one that wakes it, even while other processors
    rest or are shared with strangers.
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
    """The address of a C function `int f(int number, int64 *moment)`, and the number to give it.

    It writes seconds and nanoseconds of a clock that only goes on. Where the system has none of
    this form, Python's own takes its place, which costs the caller a microsecond more.
    """
    with suppress(OSError, AttributeError):
        function = ctypes.cast(ctypes.CDLL(None).clock_gettime, ctypes.c_void_p).value
        if function and ctypes.sizeof(ctypes.c_long) == 8:
            return function, time.CLOCK_MONOTONIC
    return ctypes.cast(_python_clock, ctypes.c_void_p).value or 0, 0


def yield_function() -> int:
    """The address of a C function without arguments that gives the core away, or 0."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("kernel32" if sys.platform == "win32" else None)
        function = library.SwitchToThread if sys.platform == "win32" else library.sched_yield
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: the system call, what is asked of it, and for which registers."""


@cache
def allow_tiles() -> bool:
    """Ask for this process's use of two-dimensional registers (AMX); whether it was granted.

    Linux keeps their state for processes that have asked only; threads made later may use them too.
    """
    is_known = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_known or knobs.TILES.get() == "off":
        return False
    with suppress(OSError, AttributeError):
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        words = (_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
        return bool(call(*map(ctypes.c_long, words)) == 0)
    return False
