"""Pack sub-byte values into bytes, the first value in the lowest bits (as ONNX does).

    4 bits   two per byte, the even index in the low nibble
    2 bits   four per byte         1 bit   eight per byte, least significant first

The last byte is zero-padded; the caller stores the number of values.
"""

from __future__ import annotations

import numpy as np

from bitwright.ir.arrays import Array


def pack(qvalues: Array, bits: int) -> Array:
    """Pack the low `bits` bits of each value into u8, in order."""
    flat = np.ascontiguousarray(qvalues).reshape(-1).view(np.uint8)
    if bits == 1:
        return np.packbits(flat & 1, bitorder="little")
    each = 8 // bits
    padded = np.zeros(-(-flat.size // each) * each, np.uint8)
    np.bitwise_and(flat, (1 << bits) - 1, out=padded[: flat.size])
    lanes = padded.reshape(-1, each)
    packed = lanes[:, 0].copy()
    for lane in range(1, each):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def unpack(packed: Array, bits: int, count: int, signed: bool) -> Array:
    """Unpack `count` values to i8 (sign-extended) or u8."""
    if bits == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    each = 8 // bits
    lanes = np.empty((packed.size, each), np.uint8)
    for lane in range(each):
        np.left_shift(packed, 8 - bits * (lane + 1), out=lanes[:, lane])  # to the top bits
    flat = lanes.reshape(-1)[:count]
    if signed:
        return flat.view(np.int8) >> (8 - bits)
    return flat >> (8 - bits)
