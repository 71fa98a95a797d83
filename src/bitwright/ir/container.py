"""The byte form of a graph: a small header, the text, then the arrays, 64-byte aligned.

    8 bytes  magic "BWGRAPH1"
    8 bytes  length of the index, little endian
    index    JSON: {"text": ..., "arrays": {key: [dtype, shape, offset, nbytes]}}
    padding, then raw little-endian arrays at their offsets, counted from the padding's end

Values of 2 and 4 bits are packed, which a fifth item of their row says; files of earlier versions
hold a byte for each. Reading memory-maps the file and copies no other array. Nothing in it is
executed (no pickle).
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitwright.errors import ExportError, ParseError
from bitwright.ir.dtype import DTYPES, dtype, string
from bitwright.ir.graph import Graph
from bitwright.ir.packing import pack_values, unpack_values
from bitwright.ir.parser import parse
from bitwright.ir.payload import Array
from bitwright.ir.printer import Printer, to_text

MAGIC = b"BWGRAPH1"
ALIGN = 64
PACKED = "packed"


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], None]) -> None:
    """Write to a temporary file in the same folder and rename it, so no partial file appears."""
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ExportError(f"cannot write {path}: {error.strerror or error}") from None
        raise


def require_writable(path: str | Path) -> None:
    """Raise the error of `write_atomically` before the work of making the contents."""
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}") from None


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def save(graph: Graph, path: str | Path) -> None:
    """Write the graph with all its arrays to one file."""
    parts = _parts(graph)

    def write(file: IO[bytes]) -> None:
        for part in parts:
            file.write(part)

    write_atomically(path, write)


def to_bytes(graph: Graph) -> bytes:
    """The contents of the file that `save` writes."""
    return b"".join(_parts(graph))


def _parts(graph: Graph) -> Iterator[Any]:
    printer = Printer()
    text = printer.graph(graph)
    arrays: dict[str, Any] = {}
    offset = 0
    for key, array in printer.blobs.items():
        element = dtype(array.dtype)
        packed = [PACKED] if element.values_per_byte > 1 else []
        nbytes = element.nbytes(array.size) if packed else array.nbytes
        arrays[key] = [element.name, list(array.shape), offset, nbytes, *packed]
        offset += -(-nbytes // ALIGN) * ALIGN
    index = json.dumps({"text": text, "arrays": arrays}).encode()
    index += b" " * (-(len(index) + 16) % ALIGN)
    yield MAGIC + len(index).to_bytes(8, "little") + index
    for array in printer.blobs.values():
        element = dtype(array.dtype)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if element.values_per_byte > 1:
            raw = pack_values(raw, element.bits)
        yield raw.data
        yield b"\0" * (-raw.nbytes % ALIGN)


def save_text(graph: Graph, path: str | Path) -> None:
    """Write the graph as text, with large arrays in its data section."""

    def write(file: IO[bytes]) -> None:
        file.write(to_text(graph).encode())

    write_atomically(path, write)


def load(path: str | Path) -> Graph:
    """The graph of a file that `save` wrote; arrays stay in the mapped file until they are read."""
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ParseError(f"cannot read {path}: {error}") from None
    return _graph(data, str(path))


def from_bytes(data: bytes) -> Graph:
    """The graph of bytes that `to_bytes` made."""
    return _graph(memoryview(data), "the data")


def _graph(data: memoryview, where: str) -> Graph:
    if bytes(data[:8]) != MAGIC:
        raise ParseError(f"{where} is not a bitwright graph file", hint="Its first bytes differ.")
    length = int.from_bytes(data[8:16], "little")
    body = data[16 + length :]
    try:
        index = json.loads(bytes(data[16 : 16 + length]))
        blobs = {key: _array(body, *row) for key, row in index["arrays"].items()}
        text = index["text"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ParseError(f"{where} is damaged: {error}") from None
    return parse(text, blobs)


def _array(
    body: memoryview, name: str, shape: list[int], offset: int, nbytes: int, form: str = ""
) -> Array:
    element = DTYPES[name]
    if element == string or offset < 0 or nbytes < 0 or offset + nbytes > len(body):
        raise ValueError("an array lies outside the file")
    raw = body[offset : offset + nbytes]
    if form == "":
        return np.frombuffer(raw, dtype=element.numpy).reshape(shape)
    count = math.prod(shape)
    if form != PACKED or element.values_per_byte == 1 or element.nbytes(count) != nbytes:
        raise ValueError(f"an array of {name} has the unknown form {form!r}")
    return unpack_values(np.frombuffer(raw, np.uint8), element, count).reshape(shape)
