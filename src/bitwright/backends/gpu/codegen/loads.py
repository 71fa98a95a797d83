"""Masked loads as Triton text.

Triton 3.6 (`tl.load` with a constant `other` that is not part of a software pipeline) fills 32-bit
words of elements with the sign-extended constant: -128 in i8 becomes the bytes 80 ff ff ff. A load
that gives a negative number of 8 or 16 bits therefore selects it afterwards.
"""

from __future__ import annotations

from bitwright.ir.dtype import DType

WORD = 32


def masked_load(address: str, mask: str, fill: int | str, dtype: DType) -> str:
    """The elements at an address, `fill` where the mask is false; no mask if it is ""."""
    if not mask:
        return f"tl.load({address})"
    if not isinstance(fill, int) or not _is_negative(fill, dtype):
        return f"tl.load({address}, mask={mask}, other={fill})"
    return f"tl.where({mask}, tl.load({address}, mask={mask}, other=0), {fill})"


def _is_negative(fill: int, dtype: DType) -> bool:
    """Whether the bits of a short integer are those of a negative number."""
    bits = 8 * dtype.numpy.itemsize
    return dtype.is_integer and bits < WORD and (fill < 0 or fill >= 1 << (bits - 1))
