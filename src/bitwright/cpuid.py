"""What an x86-64 processor says of itself: the answers to its `cpuid` instruction.

They are right in an emulated process too, where files of the operating system describe the machine
underneath. Elsewhere, and where memory may not be executed, there is no answer.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from contextlib import suppress

# void answer(uint32 leaf, uint32 subleaf, uint32 out[4]), in the calling convention of System V
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
"""Vendor, model and features; the name follows at 0x80000002."""
_IDENTIFIERS = ~(0xFF << 24)
"""Of leaf 1, register ebx: the bits that do not tell which core was asked."""


def identity() -> bytes:
    """Bytes that are equal on equal processors, or none where the processor cannot be asked."""
    is_known = platform.machine() in ("x86_64", "AMD64") and sys.platform in ("linux", "darwin")
    if not is_known:
        return b""
    with suppress(OSError, ValueError, AttributeError):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        rights = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        with mmap.mmap(-1, mmap.PAGESIZE, flags=flags, prot=rights) as page:
            page.write(_CODE)
            return b"".join(_answer(page, *leaf) for leaf in _LEAVES)
    return b""


def _answer(page: mmap.mmap, leaf: int, subleaf: int) -> bytes:
    start = ctypes.c_char.from_buffer(page)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)
    out = (ctypes.c_uint32 * 4)()
    kind(ctypes.addressof(start))(leaf, subleaf, ctypes.addressof(out))
    del start  # the page cannot be closed while a view of it lives
    if leaf == 1:
        out[1] &= _IDENTIFIERS & 0xFFFFFFFF
    return bytes(out)
