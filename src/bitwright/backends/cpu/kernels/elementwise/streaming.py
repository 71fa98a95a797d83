"""Non-temporal stores for results that are larger than the caches.

A cache line that is written completely need not be read first, and one that is not read soon should
not evict others. Both hold for a large output of the program: whole panels are then written with
non-temporal stores, if rows are aligned to vectors.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i64
from bitwright.ir.dim import Size
from bitwright.lir.buffer import Storage, View
from bitwright.target import Target

_CACHES = 4
"""The smallest such result, in sizes of the second-level cache."""


def streamed_from(target: Target, y: View, columns: Size) -> int:
    """The size in bytes from which a result uses non-temporal stores; 0 for never."""
    width = y.dtype.bits // 8
    is_whole = isinstance(columns, int) and columns * width % (target.lanes(32) * 4) == 0
    if y.buffer.storage is not Storage.OUTPUT or width != 4 or not is_whole:
        return 0
    return _CACHES * target.l2_bytes


def is_streamed(f: Kernel, least: int) -> Value:
    """Whether this run uses non-temporal stores for y."""
    pointer = f.args.pointer("y")
    address = f.emit(i64, f"ptrtoint ptr {pointer.text} to i64")
    begins = f.eq(f.and_(address, f.target.lanes(32) * 4 - 1), 0)
    nbytes = f.args.size("rows") * f.args.size("columns") * 4
    return f.and_(begins, f.ge(nbytes, least))


def settle(f: Kernel, least: int) -> None:
    """A fence after non-temporal stores: makes them visible to other threads."""
    if least and f.target.is_x86:
        f.intrinsic_void("llvm.x86.sse.sfence")
