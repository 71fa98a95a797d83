"""Writes model files, with streamed initializers or with external data.

Initializers are inserted into the protobuf stream piece by piece. The fields of a message may come
in any order, so the graph is its proto without initializers, followed by one field 5 for each:

    ModelProto: rest | tag 7, length, (GraphProto: rest | tag 5, length, (TensorProto: rest | tag 9,
    length, raw bytes) …)
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from onnx import ModelProto, StringStringEntryProto, TensorProto

from bitwright.errors import ExportError
from bitwright.export.onnx.tensors import Array, byte_length, describe, raw_pieces
from bitwright.ir.container import ALIGN, write_atomically

PROTOBUF_LIMIT = (1 << 31) - 1
PAGE_ALIGNED_FROM = 1 << 20
"""Tensors of at least this size start on a page, so that they can be mapped separately."""
PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)
EXTERNAL_FROM = 1024
"""Smaller tensors stay in the model, because shape inference reads them."""

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
Items = list[tuple[str, Array]]


def write_model(
    model: ModelProto, tensors: Items, path: Path, external_data: bool | str | None
) -> None:
    """Write the model, whose graph has no initializers yet, with these tensors."""
    size = model.ByteSize() + sum(byte_length(a) + len(n) + 128 for n, a in tensors)
    if external_data is None:
        external_data = size > PROTOBUF_LIMIT
    if not external_data:
        if size > PROTOBUF_LIMIT:
            raise ExportError(
                f"{path} would take {size:,} bytes",
                expected=f"at most {PROTOBUF_LIMIT:,} in one ONNX file",
                hint="external_data=None or True writes the tensors to a separate file.",
            )
        write_atomically(path, lambda file: _write_stream(file, model, _inline(tensors)))
        return
    name = external_data if isinstance(external_data, str) else f"{path.name}.data"
    if Path(name).name != name or name == path.name:
        raise ExportError(
            f"external data cannot be named {name!r}", expected="another file in the model's folder"
        )
    inside = [(n, a) for n, a in tensors if byte_length(a) < EXTERNAL_FROM]
    outside = [(n, a) for n, a in tensors if byte_length(a) >= EXTERNAL_FROM]
    protos, offsets = _external(outside, name)
    body = [*_inline(inside), *((proto, None) for proto in protos)]

    def write(file: IO[bytes]) -> None:
        _write_stream(file, model, body)
        if outside:  # both files are complete before either is renamed, the data first
            write_atomically(path.parent / name, lambda data: _write_data(data, outside, offsets))

    write_atomically(path, write)


def fill(model: ModelProto, tensors: Items) -> ModelProto:
    """The model with its tensors as initializers, in memory."""
    total = sum(byte_length(array) for _, array in tensors)
    if total > PROTOBUF_LIMIT:
        raise ExportError(
            f"a model of {total:,} bytes does not fit one ModelProto",
            expected=f"at most {PROTOBUF_LIMIT:,}",
            hint="Give a path: the tensors then go into a separate file.",
        )
    for name, array in tensors:
        tensor = model.graph.initializer.add()
        tensor.CopyFrom(describe(name, array))
        if byte_length(array) or not tensor.string_data:
            tensor.raw_data = b"".join(raw_pieces(array))
    return model


Piece = tuple[TensorProto, Array | None]


def _inline(tensors: Items) -> list[Piece]:
    return [
        (describe(name, array), None if array.dtype == object else array) for name, array in tensors
    ]


def _external(tensors: Items, location: str) -> tuple[list[TensorProto], list[int]]:
    """Tensors that refer to the data file, and their offsets."""
    protos, offsets, offset = [], [], 0
    for name, array in tensors:
        length = byte_length(array)
        align = PAGE if length >= PAGE_ALIGNED_FROM else ALIGN
        offset += -offset % align
        proto = describe(name, array)
        proto.data_location = TensorProto.EXTERNAL
        entries = {"location": location, "offset": str(offset), "length": str(length)}
        proto.external_data.extend(
            StringStringEntryProto(key=k, value=v) for k, v in entries.items()
        )
        protos.append(proto)
        offsets.append(offset)
        offset += length
    return protos, offsets


def _write_data(file: IO[bytes], tensors: Items, offsets: list[int]) -> None:
    position = 0
    for (_, array), offset in zip(tensors, offsets, strict=True):
        file.write(b"\0" * (offset - position))
        position = offset + byte_length(array)
        _write_raw(file, array)


def _write_raw(file: IO[bytes], array: Array) -> None:
    for piece in raw_pieces(array):
        file.write(piece)


def _write_stream(file: IO[bytes], model: ModelProto, pieces: Iterable[Piece]) -> None:
    """Write the model, with the graph last and its initializers inserted."""
    graph = model.graph.SerializeToString()
    shell = ModelProto()
    shell.CopyFrom(model)
    shell.ClearField("graph")
    parts = [(proto.SerializeToString(), array) for proto, array in pieces]
    length = len(graph)
    heads = []
    for head, array in parts:
        if array is not None:
            head += _field(_RAW_DATA, byte_length(array))
        head = _field(_INITIALIZER, len(head) + (0 if array is None else byte_length(array))) + head
        heads.append((head, array))
        length += len(head) + (0 if array is None else byte_length(array))
    file.write(shell.SerializeToString())
    file.write(_field(_GRAPH, length))
    file.write(graph)
    for head, array in heads:
        file.write(head)
        if array is not None:
            _write_raw(file, array)


def _field(number: int, length: int) -> bytes:
    """The tag and length of a length-delimited field."""
    return _varint(number << 3 | 2) + _varint(length)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
