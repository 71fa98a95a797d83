"""Arrays as ONNX tensors: little-endian bytes, types below a byte packed from the low bits up.

A tensor is described first (name, type, shape) and its bytes are produced in pieces on demand, so
that a large array never exists twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import TensorProto

from bitwright.frontend.onnx.tensor import QVALUES
from bitwright.ir.dtype import dtype, string

Array = np.ndarray[Any, Any]
PIECE = 1 << 22
"""Elements handled at a time; a multiple of 8, so that packed pieces end on whole bytes."""


def describe(name: str, array: Array) -> TensorProto:
    """The tensor without its bytes; strings, which have no raw form, are complete."""
    tensor = TensorProto(name=name, data_type=QVALUES[dtype(array.dtype).name])
    tensor.dims.extend(array.shape)
    if dtype(array.dtype) == string:
        tensor.string_data.extend(
            item if isinstance(item, bytes) else str(item).encode("utf-8", "surrogateescape")
            for item in array.reshape(-1)
        )
    return tensor


def byte_length(array: Array) -> int:
    """How many raw bytes the tensor takes, packed."""
    element = dtype(array.dtype)
    return 0 if element == string else element.nbytes(array.size)


def raw_pieces(array: Array) -> Iterator[memoryview]:
    """The raw bytes, piece by piece."""
    element = dtype(array.dtype)
    for piece in _flat_pieces(array):
        if element.bits < 8:
            yield _packed(piece.view(np.uint8), element.bits).data
        else:
            yield piece.view(np.uint8).data


def raw_bytes(array: Array) -> bytes:
    return b"".join(raw_pieces(array))


def complete(name: str, array: Array) -> TensorProto:
    """The tensor with its bytes inside."""
    tensor = describe(name, array)
    if dtype(array.dtype) != string:
        tensor.raw_data = raw_bytes(array)
    return tensor


def _flat_pieces(array: Array) -> Iterator[Array]:
    """Contiguous vectors that together hold the elements in row-major order."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, flat.size, PIECE):
            yield flat[start : start + PIECE]
    elif array.size <= PIECE:
        yield np.ascontiguousarray(array).reshape(-1)
    else:
        for start in range(0, array.size, PIECE):
            yield array.flat[start : start + PIECE]


def _packed(qvalues: Array, bits: int) -> Array:
    """Several values per byte, the first in the lowest bits."""
    per_byte = 8 // bits
    qvalues = qvalues & np.uint8((1 << bits) - 1)
    qvalues = np.pad(qvalues, (0, -qvalues.size % per_byte)).reshape(-1, per_byte)
    packed = qvalues[:, 0].copy()
    for position in range(1, per_byte):
        packed |= qvalues[:, position] << np.uint8(position * bits)
    return packed
