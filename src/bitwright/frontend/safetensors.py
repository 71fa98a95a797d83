"""Reads safetensors files; arrays are views of the mapped file.

    8 bytes  length of the header, little endian
    header   JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}
    data     raw little-endian arrays; offsets count from the end of the header

The header is validated: every array must be inside the data and have the size of its shape.
A sharded model is read through its index, `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.ir.dtype import DTYPES

Array = np.ndarray[Any, Any]

MAX_HEADER = 100_000_000
_ELEMENTS = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "F8_E4M3": "f8e4m3fn",
    "F8_E5M2": "f8e5m2",
    "F8_E8M0": "f8e8m0",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U64": "u64",
    "U32": "u32",
    "U16": "u16",
    "U8": "u8",
    "BOOL": "bool",
    "C64": "c64",
}


def read_safetensors(path: str | Path) -> dict[str, Array]:
    """Every array of a file by name."""
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ImportModelError(f"cannot read {path}: {error}") from None
    if len(data) < 8:
        raise ImportModelError(f"{path} is not a safetensors file: it ends in its first bytes")
    length = int.from_bytes(data[:8], "little")
    if length > min(len(data) - 8, MAX_HEADER):
        raise ImportModelError(
            f"{path} is not a safetensors file: its header is longer than it can be", found=length
        )
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        header.pop("__metadata__", None)
        rows = {
            str(name): (row["dtype"], list(row["shape"]), *row["data_offsets"])
            for name, row in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImportModelError(f"the header of {path} is damaged: {error}") from None
    body = data[8 + length :]
    return {name: _array(body, name, *row) for name, row in rows.items()}


def _array(body: memoryview, name: str, tag: Any, shape: list[Any], *offsets: Any) -> Array:
    where = f"array {name!r}"
    element_name = _ELEMENTS.get(tag) if isinstance(tag, str) else None
    if element_name is None:
        raise ImportModelError(
            "has an unknown type", where=where, expected=", ".join(_ELEMENTS), found=repr(tag)
        )
    element = DTYPES[element_name]
    numbers = (*shape, *offsets)
    if len(offsets) != 2 or any(type(n) is not int or n < 0 for n in numbers):
        raise ImportModelError("has no shape or offsets", where=where, found=numbers)
    begin, end = offsets
    if not begin <= end <= len(body) or end - begin != math.prod(shape) * element.numpy.itemsize:
        raise ImportModelError(
            "does not fit its offsets in the file",
            where=where,
            expected=f"{math.prod(shape) * element.numpy.itemsize} bytes of {len(body)}",
            found=f"{begin} to {end}",
        )
    return np.frombuffer(body[begin:end], element.numpy).reshape(shape)


def read_index(path: str | Path) -> dict[str, Array]:
    """Every array of a sharded model; the shards are in the folder of the index."""
    path = Path(path)
    try:
        shards_by_name = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(shards_by_name.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImportModelError(f"cannot read the index {path}: {error}") from None
    arrays: dict[str, Array] = {}
    for file in files:
        if (
            not isinstance(file, str)
            or "\0" in file
            or Path(file).name != file
            or file in ("", ".", "..")
        ):
            raise ImportModelError(
                f"index {path} names the file {file!r}", expected="a file in its own folder"
            )
        shard = read_safetensors(path.parent / file)
        arrays |= {name: array for name, array in shard.items() if shards_by_name.get(name) == file}
    if missing := sorted(set(shards_by_name) - set(arrays)):
        raise ImportModelError(f"index {path} names arrays that no file has", found=missing[:5])
    return arrays
