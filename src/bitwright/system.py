"""What the operating system tells: cores, caches, the cache folder, how threads sleep.

Every line that is particular to one system is in this file; each fact has a fallback that is right,
if less precise, everywhere else.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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


def cache_folder() -> Path:
    """Where this platform keeps files that can be made again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


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


def yield_function() -> int:
    """The address of a C function without arguments that gives the core away, or 0."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("kernel32" if sys.platform == "win32" else None)
        function = library.SwitchToThread if sys.platform == "win32" else library.sched_yield
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
