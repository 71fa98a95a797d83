"""Converts arrays to ONNX tensors: little-endian bytes; types below 8 bits are packed.

The proto without data (name, type, shape) and the bytes are separate, and the bytes come in pieces,
so that a large array is not copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import TensorProto

from bitwright.frontend.onnx.tensor import DATA_TYPES
from bitwright.ir.dtype import dtype, string
from bitwright.ir.packing import pack_values

Array = np.ndarray[Any, Any]
PIECE = 1 << 22
"""Elements per piece; a multiple of 8, so that packed pieces are whole bytes."""


def describe(name: str, array: Array) -> TensorProto:
    """The tensor without raw data; strings, which have none, are complete."""
    tensor = TensorProto(name=name, data_type=DATA_TYPES[dtype(array.dtype).name])
    tensor.dims.extend(array.shape)
    if dtype(array.dtype) == string:
        tensor.string_data.extend(
            item if isinstance(item, bytes) else str(item).encode("utf-8", "surrogateescape")
            for item in array.reshape(-1)
        )
    return tensor


def byte_length(array: Array) -> int:
    """The number of raw bytes of the tensor, packed."""
    element = dtype(array.dtype)
    return 0 if element == string else element.nbytes(array.size)


def raw_pieces(array: Array) -> Iterator[memoryview]:
    """The raw bytes, piece by piece."""
    element = dtype(array.dtype)
    for piece in _flat_pieces(array):
        if element.bits < 8:
            yield pack_values(piece.view(np.uint8), element.bits).data
        else:
            yield piece.view(np.uint8).data


def raw_bytes(array: Array) -> bytes:
    return b"".join(raw_pieces(array))


def complete(name: str, array: Array) -> TensorProto:
    """The tensor with its data."""
    tensor = describe(name, array)
    if dtype(array.dtype) != string:
        tensor.raw_data = raw_bytes(array)
    return tensor


def _flat_pieces(array: Array) -> Iterator[Array]:
    """Contiguous vectors of the elements in row-major order."""
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, flat.size, PIECE):
            yield flat[start : start + PIECE]
    elif array.size <= PIECE:
        yield np.ascontiguousarray(array).reshape(-1)
    else:
        for start in range(0, array.size, PIECE):
            yield array.flat[start : start + PIECE]
