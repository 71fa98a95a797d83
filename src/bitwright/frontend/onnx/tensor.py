"""Converts TensorProto to numpy: every element type, raw or in typed fields, dense or sparse.

The size is checked against the bytes present before memory is allocated. Aligned raw data is not
copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import SparseTensorProto, TensorProto

from bitwright import knobs
from bitwright.errors import ImportModelError, UnsupportedError
from bitwright.frontend.onnx.read import ModelFile
from bitwright.ir.dtype import DTYPES, DType, bool_, c64, string
from bitwright.ir.packing import unpack_values

Array = np.ndarray[Any, Any]
MAX_RANK = 64
DENSE_LIMIT = 1 << 31

_NAMES = {
    "FLOAT": "f32",
    "DOUBLE": "f64",
    "FLOAT16": "f16",
    "BFLOAT16": "bf16",
    "FLOAT8E4M3FN": "f8e4m3fn",
    "FLOAT8E4M3FNUZ": "f8e4m3fnuz",
    "FLOAT8E5M2": "f8e5m2",
    "FLOAT8E5M2FNUZ": "f8e5m2fnuz",
    "FLOAT8E8M0": "f8e8m0",
    "FLOAT4E2M1": "f4e2m1",
    "INT64": "i64",
    "INT32": "i32",
    "INT16": "i16",
    "INT8": "i8",
    "INT4": "i4",
    "INT2": "i2",
    "UINT64": "u64",
    "UINT32": "u32",
    "UINT16": "u16",
    "UINT8": "u8",
    "UINT4": "u4",
    "UINT2": "u2",
    "BOOL": "bool",
    "COMPLEX64": "c64",
    "COMPLEX128": "c128",
    "STRING": "string",
}
ELEMENTS: dict[int, DType] = {
    TensorProto.DataType.Value(onnx_name): DTYPES[name] for onnx_name, name in _NAMES.items()
}
DATA_TYPES = {element.name: number for number, element in ELEMENTS.items()}
"""The `TensorProto.DataType` of each element type, by name."""
_TYPED_FIELDS = {
    "f32": "float_data",
    "c64": "float_data",
    "f64": "double_data",
    "c128": "double_data",
    "i64": "int64_data",
    "u32": "uint64_data",
    "u64": "uint64_data",
}


def element_type(number: int, where: str) -> DType:
    """The element type of a `TensorProto.DataType`."""
    if not isinstance(number, int):
        raise ImportModelError("an element type is no number", where=where, found=repr(number))
    if number in ELEMENTS:
        return ELEMENTS[number]
    known = TensorProto.DataType.values()
    name = TensorProto.DataType.Name(number) if number in known else str(number)
    raise UnsupportedError(f"element type {name} is not supported", where=where)


def read_tensor(
    tensor: TensorProto, file: ModelFile | None = None, weight: memoryview | None = None
) -> Array:
    """The array of a tensor; `weight` is its raw data if that was not parsed."""
    where = f"tensor {tensor.name!r}" if tensor.name else "a tensor"
    element = element_type(tensor.data_type, where)
    shape = checked_shape(tensor.dims, where)
    count = math.prod(shape)
    if tensor.HasField("segment"):
        raise UnsupportedError("data in segments is not supported", where=where)
    external = tensor.data_location == TensorProto.EXTERNAL
    if element == string:
        if external or tensor.HasField("raw_data"):
            raise ImportModelError("strings cannot be raw data", where=where)
        return _strings(tensor.string_data, shape, where)
    if external:
        if file is None:
            raise ImportModelError("external data is not allowed here", where=where)
        raw = file.external_bytes(tensor, element.nbytes(count), where)
    elif weight is not None:
        raw = weight
    elif tensor.HasField("raw_data"):
        raw = memoryview(tensor.raw_data)
    else:
        return _reshape(_typed(tensor, element, count, where), shape, where)
    _require_count(len(raw), element.nbytes(count), "bytes of data", shape, where)
    return _reshape(_from_bytes(raw, element, count), shape, where)


def checked_shape(dims: Sequence[int], where: str) -> tuple[int, ...]:
    if len(dims) > MAX_RANK:
        raise ImportModelError(
            "has too many dimensions", where=where, expected=f"at most {MAX_RANK}", found=len(dims)
        )
    for size in dims:
        if size < 0:
            raise ImportModelError(f"has the negative size {size}", where=where)
    return tuple(dims)


def _from_bytes(raw: memoryview, element: DType, count: int) -> Array:
    if element.bits < 8:
        return unpack(np.frombuffer(raw, np.uint8), element, count)
    if element == bool_:
        return np.frombuffer(raw, np.uint8).astype(np.bool_)
    array = np.frombuffer(raw, element.numpy)
    return array if array.flags.aligned else array.copy()


def unpack(packed: Array, element: DType, count: int) -> Array:
    """Two or four values from each byte, the lowest bits first."""
    return unpack_values(packed.reshape(-1), element, count)


def _typed(tensor: TensorProto, element: DType, count: int, where: str) -> Array:
    name = _TYPED_FIELDS.get(element.name, "int32_data")
    numbers = getattr(tensor, name)
    packed = element.bits < 8
    expected = element.nbytes(count) if packed else count * (2 if element.is_complex else 1)
    _require_count(len(numbers), expected, f"numbers in {name}", tuple(tensor.dims), where)
    if element.is_complex:
        half = np.float32 if element == c64 else np.float64
        return np.array(numbers, half).view(element.numpy)
    if name != "int32_data":
        return np.array(numbers, element.numpy)
    integers: Array = np.array(numbers, np.int32)
    if packed:
        return unpack(integers.astype(np.uint8), element, count)
    if element == bool_:
        return integers.astype(np.bool_)
    if element.is_float:  # the field holds the bits of the value
        return integers.astype(np.uint16 if element.bits == 16 else np.uint8).view(element.numpy)
    return integers.astype(element.numpy)


def _strings(data: Sequence[bytes], shape: tuple[int, ...], where: str) -> Array:
    _require_count(len(data), math.prod(shape), "strings", shape, where)
    array = np.empty(len(data), object)
    array[:] = [text.decode("utf-8", "surrogateescape") for text in data]
    return _reshape(array, shape, where)


def _require_count(found: int, expected: int, what: str, shape: Any, where: str) -> None:
    if found != expected:
        raise ImportModelError(
            f"its data does not fit its shape {list(shape)}",
            where=where,
            expected=f"{expected} {what}",
            found=found,
        )


def _reshape(array: Array, shape: tuple[int, ...], where: str) -> Array:
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise ImportModelError(f"has an impossible shape: {error}", where=where) from None


def read_sparse(sparse: SparseTensorProto, file: ModelFile | None = None) -> Array:
    """A sparse tensor as a dense array; indices are linear, or rows of coordinates."""
    where = f"sparse tensor {sparse.values.name!r}"
    shape = checked_shape(sparse.dims, where)
    values, indices = read_tensor(sparse.values, file), read_tensor(sparse.indices, file)
    count = math.prod(shape)
    limit = min(DENSE_LIMIT, knobs.max_tensor_bytes())
    if count * max(values.dtype.itemsize, 1) > limit:
        raise UnsupportedError(
            f"is too large for a dense array: {list(shape)}",
            where=where,
            expected=f"at most {limit} bytes",
        )
    if values.ndim != 1 or indices.dtype != np.int64 or indices.ndim not in (1, 2):
        raise ImportModelError("its values or indices have the wrong type or rank", where=where)
    if indices.ndim == 2:
        if indices.shape[1] != len(shape):
            raise ImportModelError("its coordinates do not fit its rank", where=where)
        bad = (indices < 0) | (indices >= np.array(shape, np.int64))
        linear = (indices * _strides(shape)).sum(axis=1)
    else:
        linear = indices
        bad = (indices < 0) | (indices >= count)
    if bad.any() or len(linear) != len(values):
        raise ImportModelError("its indices are outside its shape", where=where)
    dense = np.zeros(count, values.dtype)
    dense[linear] = values
    return _reshape(dense, shape, where)


def _strides(shape: tuple[int, ...]) -> Array:
    return np.array([math.prod(shape[axis + 1 :]) for axis in range(len(shape))], np.int64)
