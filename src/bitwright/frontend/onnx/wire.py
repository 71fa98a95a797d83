"""Separates the weights from a serialized model without copying them.

A ModelProto is nested length-delimited fields: model.graph (7) contains initializer (5), which
contains raw_data (9). Parsing copies those bytes into the protobuf arena, and reading them copies
again. `split_weights` scans the fields instead and returns views of large raw_data, and the rest of
the model for the parser.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
KEEP_BELOW = 4096


class IrregularError(Exception):
    """The layout is unusual; the protobuf parser handles the whole file."""


class Field(NamedTuple):
    number: int
    whole: memoryview
    content: memoryview | None


def split_weights(data: memoryview) -> tuple[bytes | memoryview, dict[int, memoryview]]:
    """The model without its large weights, and these by index of their initializer."""
    try:
        return _split_model(data)
    except IrregularError:
        return data, {}


def _split_model(data: memoryview) -> tuple[bytes, dict[int, memoryview]]:
    weights: dict[int, memoryview] = {}
    parts: list[bytes | memoryview] = []
    graphs = 0
    for field in _fields(data):
        if field.number == _GRAPH and field.content is not None:
            graphs += 1
            if graphs > 1:  # the parser merges repeated messages
                raise IrregularError
            parts.append(_delimited(_GRAPH, _split_graph(field.content, weights)))
        else:
            parts.append(field.whole)
    return b"".join(parts), weights


def _split_graph(data: memoryview, weights: dict[int, memoryview]) -> bytes:
    parts: list[bytes | memoryview] = []
    index = -1
    for field in _fields(data):
        if field.number != _INITIALIZER or field.content is None:
            parts.append(field.whole)
            continue
        index += 1
        if len(field.content) < KEEP_BELOW:
            parts.append(field.whole)
        else:
            parts.append(_delimited(_INITIALIZER, _split_tensor(field.content, index, weights)))
    return b"".join(parts)


def _split_tensor(data: memoryview, index: int, weights: dict[int, memoryview]) -> bytes:
    fields = list(_fields(data))
    raw = [field for field in fields if field.number == _RAW_DATA]
    if len(raw) != 1 or raw[0].content is None:
        return bytes(data)
    weights[index] = raw[0].content
    return b"".join(field.whole for field in fields if field.number != _RAW_DATA)


def _fields(data: memoryview) -> Iterator[Field]:
    position = 0
    while position < len(data):
        start = position
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        content = None
        if kind == 0:
            _, position = _varint(data, position)
        elif kind == _LENGTH_DELIMITED:
            length, position = _varint(data, position)
            content = data[position : position + length]
            position += length
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise IrregularError
        if position > len(data):
            raise IrregularError
        yield Field(number, data[start:position], content)


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise IrregularError
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise IrregularError


def _delimited(number: int, content: bytes) -> bytes:
    return _encode(number << 3 | _LENGTH_DELIMITED) + _encode(len(content)) + content


def _encode(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
