"""Opens untrusted model files: runs no code and reads no file outside the model's folder.

Weights stay in the mapped file (the model itself or its external data) until they are used, so a
large model loads with little resident memory.
"""

from __future__ import annotations

import importlib
import mmap
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.text import check_text
from bitwright.frontend.onnx.wire import split_weights

Model = Any  # a path, bytes or a ModelProto
_EXTERNAL_KEYS = ("location", "offset", "length")
_DecodeError: Any = importlib.import_module("google.protobuf.message").DecodeError  # no stubs


@dataclass
class ModelFile:
    """A parsed model, and the bytes of its weights."""

    proto: ModelProto
    folder: Path | None = None
    weights: dict[int, memoryview] = field(default_factory=dict)
    """Raw data that was not parsed, by the index of its initializer."""
    mapped: dict[Path, memoryview] = field(default_factory=dict)
    """The bytes of the external data files that were read."""

    def external_bytes(self, tensor: TensorProto, expected: int, where: str) -> memoryview:
        """The external data of a tensor; its file must be in the model's folder."""
        entries = {e.key: e.value for e in tensor.external_data if e.key in _EXTERNAL_KEYS}
        path = self._external_path(entries.get("location", ""), where)
        if path not in self.mapped:
            self.mapped[path] = map_file(path, where)
        data = self.mapped[path]
        offset = _parse_natural(entries.get("offset", "0"), "offset", where)
        length = _parse_natural(entries.get("length", str(expected)), "length", where)
        if length != expected:
            raise ImportModelError(
                "the length of its external data does not fit its shape",
                where=where,
                expected=f"{expected} bytes",
                found=f"{length} bytes",
            )
        if offset + length > len(data):
            raise ImportModelError(
                f"its external data reaches past the end of {path.name!r}",
                where=where,
                expected=f"at most {len(data)} bytes",
                found=f"{offset} + {length}",
            )
        return data[offset : offset + length]

    def _external_path(self, location: str, where: str) -> Path:
        if not location:
            raise ImportModelError("its external data has no location", where=where)
        if self.folder is None:
            raise ImportModelError(
                f"its data is in another file, {location!r}, and the model was given as bytes",
                where=where,
                hint="Give the path of the model instead.",
            )
        parts = re.split(r"[\\/]", location)
        if location[0] in "\\/" or ".." in parts or re.match(r"[A-Za-z]:", location):
            raise ImportModelError(
                f"its external data {location!r} is outside the model's folder",
                where=where,
                expected="a relative path without '..'",
            )
        try:
            folder = self.folder.resolve(strict=True)
            path = (folder / location).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ImportModelError(
                f"its external data {location!r} cannot be found: {error}", where=where
            ) from None
        if not path.is_relative_to(folder):
            raise ImportModelError(
                f"its external data {location!r} is a link out of the model's folder", where=where
            )
        return path


def read_model(model: Model) -> ModelFile:
    """Open a path, the bytes of a file, or a ModelProto."""
    if isinstance(model, ModelProto):
        return _check(ModelFile(model))
    if isinstance(model, (bytes, bytearray, memoryview)):
        return _parse(memoryview(model).cast("B"), None, "the model")
    if isinstance(model, (str, os.PathLike)):
        path = Path(model)
        where = f"model {str(path)!r}"
        try:
            folder = path.resolve(strict=True).parent
        except (OSError, ValueError, RuntimeError) as error:
            raise ImportModelError(f"cannot be opened: {error}", where=where) from None
        return _parse(map_file(path, where), folder, where)
    raise ImportModelError(
        "this is not a model",
        expected="a path, bytes or an onnx.ModelProto",
        found=type(model).__name__,
    )


def map_file(path: Path, where: str) -> memoryview:
    """The bytes of a regular file, mapped read-only."""
    try:
        if not path.is_file():
            raise ImportModelError(f"{path.name!r} is not a regular file", where=where)
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise ImportModelError(f"{path.name!r} cannot be read: {error}", where=where) from None


def _parse(data: memoryview, folder: Path | None, where: str) -> ModelFile:
    rest, weights = split_weights(data)
    proto = ModelProto()
    try:
        proto.ParseFromString(rest)
    except _DecodeError as error:
        raise ImportModelError(
            "the file is damaged or is not an ONNX model",
            where=where,
            expected="a binary ModelProto",
            found=f"{len(data)} bytes that do not parse ({error})",
        ) from None
    return _check(ModelFile(proto, folder, weights), where)


def _check(model: ModelFile, where: str = "the model") -> ModelFile:
    if not model.proto.HasField("graph"):
        raise ImportModelError(
            "the file holds no graph",
            where=where,
            hint="It may be empty, damaged, or in another format.",
        )
    check_text(model.proto, where)
    return model


def _parse_natural(text: str, what: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,19}", text):
        raise ImportModelError(
            f"the {what} of its external data is not a number", where=where, found=repr(text)
        )
    return int(text)
