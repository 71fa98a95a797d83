"""Values of 2 and 4 bits as files hold them: several in a byte, the first in the lowest bits.

In memory such values take a byte each (`ml_dtypes`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bitwright.ir.dtype import DType

Array = np.ndarray[Any, Any]


def pack_values(values: Array, bits: int) -> Array:
    """u8[bytes] of values u8[n], of which the lowest bits count."""
    per_byte = 8 // bits
    fields = values & np.uint8((1 << bits) - 1)
    fields = np.pad(fields, (0, -fields.size % per_byte)).reshape(-1, per_byte)
    packed: Array = fields[:, 0].copy()
    for position in range(1, per_byte):
        packed |= fields[:, position] << np.uint8(position * bits)
    return packed


def unpack_values(packed: Array, element: DType, count: int) -> Array:
    """The first `count` values of packed bytes u8[bytes]."""
    table = _values_of_bytes(element)
    words = table.view(np.dtype(f"u{table.shape[1]}"))[:, 0]
    flat: Array = words[packed].view(element.numpy)
    return flat[:count]


@cache
def _values_of_bytes(element: DType) -> Array:
    """The values of each byte, [256, values of a byte]."""
    bits = element.bits
    shifts = np.arange(element.values_per_byte, dtype=np.uint8) * bits
    fields = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & ((1 << bits) - 1)
    if element.is_float:
        return np.ascontiguousarray(fields).view(element.numpy)
    if element.is_signed:
        half = 1 << (bits - 1)
        fields = (fields.astype(np.int8) ^ half) - half
    return np.ascontiguousarray(fields.astype(element.numpy))
