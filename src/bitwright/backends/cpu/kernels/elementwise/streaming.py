"""Results that are larger than the caches, written past them.

A line that is written as a whole need not be read first, and one that nobody reads soon should not
displace what is read. Both hold for a large result of the program: the vectors of whole panels then
go straight to memory, where its rows begin at vectors.
"""

from __future__ import annotations

from bitwright.backends.cpu.codegen.emit import Kernel, Value, i64
from bitwright.ir.dim import Size
from bitwright.lir.buffer import Storage, View
from bitwright.target import Target

_CACHES = 4
"""As many times the second-level cache holds a result has at least."""


def streamed_from(target: Target, y: View, columns: Size) -> int:
    """Bytes from which on a result of these columns is written past the caches; 0 for never."""
    width = y.dtype.bits // 8
    is_whole = isinstance(columns, int) and columns * width % (target.lanes(32) * 4) == 0
    if y.buffer.storage is not Storage.OUTPUT or width != 4 or not is_whole:
        return 0
    return _CACHES * target.l2_bytes


def is_streamed(f: Kernel, least: int) -> Value:
    """Whether the rows of y are written past the caches in this run."""
    pointer = f.args.pointer("y")
    address = f.emit(i64, f"ptrtoint ptr {pointer.text} to i64")
    begins = f.eq(f.and_(address, f.target.lanes(32) * 4 - 1), 0)
    nbytes = f.args.size("rows") * f.args.size("columns") * 4
    return f.and_(begins, f.ge(nbytes, least))


def settle(f: Kernel, least: int) -> None:
    """Behind such writes: other threads see them from here on."""
    if least and f.target.is_x86:
        f.intrinsic_void("llvm.x86.sse.sfence")
