"""The results of the x86-64 `cpuid` instruction.

They are correct in an emulated process, in which the operating system's files describe the real
machine. They are empty on other architectures and where executable memory is not allowed.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from contextlib import suppress

# void query(uint32 leaf, uint32 subleaf, uint32 out[4]), System V calling convention
_CODE = bytes.fromhex(
    "53"  # push rbx
    "4989d0"  # mov r8, rdx
    "89f8"  # mov eax, edi
    "89f1"  # mov ecx, esi
    "0fa2"  # cpuid
    "418900"  # mov [r8], eax
    "41895804"  # mov [r8 + 4], ebx
    "41894808"  # mov [r8 + 8], ecx
    "4189500c"  # mov [r8 + 12], edx
    "5b"  # pop rbx
    "c3"  # ret
)
_EXTENDED = tuple((0x80000000 + n, 0) for n in (1, 2, 3, 4, 8))
_LEAVES = ((0, 0), (1, 0), (7, 0), (7, 1), (0xD, 1), (0x14, 0), (0x19, 0), (0x24, 0), *_EXTENDED)
"""Vendor, model and features; the name starts at 0x80000002."""
_CORE_INDEPENDENT = ~(0xFF << 24)
"""The bits of ebx of leaf 1 that are equal on all cores."""


def identity() -> bytes:
    """Bytes that identify the processor model; empty if `cpuid` is not available."""
    is_known = platform.machine() in ("x86_64", "AMD64") and sys.platform in ("linux", "darwin")
    if not is_known:
        return b""
    with suppress(OSError, ValueError, AttributeError):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        with mmap.mmap(-1, mmap.PAGESIZE, flags=flags, prot=rights) as page:
            page.write(_CODE)
            return b"".join(_query(page, *leaf) for leaf in _LEAVES)
    return b""


def _query(page: mmap.mmap, leaf: int, subleaf: int) -> bytes:
    start = ctypes.c_char.from_buffer(page)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    out = (ctypes.c_uint32 * 4)()
    kind(ctypes.addressof(start))(leaf, subleaf, ctypes.addressof(out))
    del start  # a page with a live view cannot be closed
    if leaf == 1:
        out[1] &= _CORE_INDEPENDENT & 0xFFFFFFFF
    return bytes(out)
