"""/v1/infer: any other compiled model, with arrays as npz or JSON."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.executable import Executable
from bitwright.ir.types import TensorType
from bitwright.llm.serve.fields import Fields, parse_body
from bitwright.llm.serve.settings import ApiError, Settings

Array = np.ndarray[Any, Any]


def read_npz(data: bytes, settings: Settings) -> dict[str, Array]:
    """Arrays of an npz file; it may not unpack to more than a body may have."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > settings.max_body:
            raise ApiError(413, f"the arrays take more than {settings.max_body:,} bytes")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except ApiError:
        raise
    except Exception as error:  # zipfile and numpy raise many kinds
        raise ApiError(400, f"the body is no npz file: {str(error)[:200]}") from None


def read_json(data: bytes, executable: Executable) -> dict[str, Array]:
    """Arrays of `{"inputs": {name: nested lists}}`, in the types of the model's inputs."""
    fields = Fields(parse_body(data), ("model",))
    given = fields.take("inputs", dict)
    fields.finish()
    arrays = {}
    for name, value in given.items():
        type_ = executable.inputs.get(name)
        element = type_.dtype.numpy if isinstance(type_, TensorType) else None
        try:
            arrays[name] = np.asarray(value, element)
        except (ValueError, TypeError, OverflowError) as error:
            raise ApiError(
                400, f"input {name[:80]!r} is no array: {str(error)[:200]}", param=name[:80]
            ) from None
    return arrays


def write_npz(outputs: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    arrays = {name: np.asarray(value) for name, value in outputs.items()}
    np.savez(file, allow_pickle=False, **{n: _plain(a) for n, a in arrays.items()})
    return file.getvalue()


def _plain(array: Array) -> Array:
    """Element types that numpy itself lacks become f32."""
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def write_json(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Nested lists; infinities and NaN become null, which JSON has."""
    return {"outputs": {n: _finite(_plain(np.asarray(v)).tolist()) for n, v in outputs.items()}}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    return value


def signature(executable: Executable) -> dict[str, dict[str, str]]:
    """Types of inputs and outputs, as text."""
    return {
        "inputs": {name: str(type_) for name, type_ in executable.inputs.items()},
        "outputs": {name: str(type_) for name, type_ in executable.outputs.items()},
    }
