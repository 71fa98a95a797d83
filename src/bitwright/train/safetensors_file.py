"""Writes safetensors files: 8 bytes length, a JSON header, then the arrays.

Files are written under a temporary name, flushed to disk and renamed: a file with its final name
is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.container import write_atomically
from bitwright.ir.dtype import dtype

Array = np.ndarray[Any, Any]
_TAGS = {
    "f64": "F64",
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "i64": "I64",
    "i32": "I32",
    "i16": "I16",
    "i8": "I8",
    "u64": "U64",
    "u32": "U32",
    "u16": "U16",
    "u8": "U8",
    "bool": "BOOL",
    "f8e4m3fn": "F8_E4M3",
    "f8e5m2": "F8_E5M2",
    "c64": "C64",
}


def write_safetensors(
    path: str | Path, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays by name, and strings by name as metadata."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, array in arrays.items():
        tag = _TAGS.get(dtype(array.dtype).name)
        if tag is None:
            raise TrainingError(
                f"array {name!r} cannot be written to a safetensors file", found=array.dtype
            )
        header[name] = {
            "dtype": tag,
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(file: IO[bytes]) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(as_bytes(array))
        file.flush()
        os.fsync(file.fileno())

    write_atomically(path, write)


def as_bytes(array: Array) -> Any:
    """The contents of an array in row-major order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata of a file that `read_safetensors` has accepted."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = header.get("__metadata__", {})
    return {str(name): str(value) for name, value in found.items()}
