"""Arrays in text: small arrays inline and exact, large arrays as `#hash` into a data section."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.errors import ParseError
from bitwright.ir.dtype import DType, Family, string
from bitwright.ir.types import TensorType

Array = np.ndarray[Any, Any]
INLINE_LIMIT = 16


def blob_key(array: Array) -> str:
    """A content address: type, shape and bytes."""
    digest = hashlib.blake2b(digest_size=12)
    digest.update(f"{array.dtype.name}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return "#" + digest.hexdigest()


def inline_text(array: Array, dtype: DType) -> str | None:
    """The array as nested brackets if that is short and exact, else None."""
    if dtype == string:
        return _nested(array, lambda x: json.dumps(_as_text(x)))
    if array.size > INLINE_LIMIT or dtype.is_complex:
        return None
    text = _nested(array, _number_shower(dtype))
    back = array_from_nested(json_like(text), TensorType(dtype, array.shape))
    return text if back.tobytes() == np.ascontiguousarray(array).tobytes() else None


def _as_text(item: Any) -> str:
    return item.decode("utf-8", "surrogateescape") if isinstance(item, bytes) else str(item)


def _number_shower(dtype: DType) -> Any:
    if dtype.family is Family.BOOL:
        return lambda x: "true" if x else "false"
    if dtype.is_integer:
        return lambda x: str(int(x))
    if dtype.bits >= 32:
        return lambda x: repr(x.item()) if dtype.bits == 64 else str(x)
    return lambda x: repr(float(x))


def _nested(array: Array, show: Any) -> str:
    if array.ndim == 0:
        return str(show(array[()]))
    if array.ndim == 1:
        return "[" + ", ".join(str(show(item)) for item in array) + "]"
    return "[" + ", ".join(_nested(part, show) for part in array) + "]"


def json_like(text: str) -> Any:
    """Nested brackets of numbers back as lists."""
    return json.loads(
        text.replace("inf", "Infinity").replace("nan", "NaN")
        if "in" in text or "na" in text
        else text
    )


def array_from_nested(nested: Any, type_: TensorType) -> Array:
    """Lists of numbers (or strings) as an array of exactly this type."""
    shape = tuple(int(size) for size in type_.shape)  # type: ignore[arg-type]
    if type_.dtype == string:
        flat = np.empty(int(np.prod(shape)), dtype=object)
        flat[:] = list(_flatten(nested))
        return flat.reshape(shape)
    wide: Any = np.float64 if type_.dtype.is_float else object
    try:
        array = np.array(list(_flatten(nested)), dtype=wide).reshape(shape)
        return (
            array.astype(np.int64).astype(type_.dtype.numpy)
            if _is_narrow(type_.dtype)
            else array.astype(type_.dtype.numpy)
        )
    except (ValueError, OverflowError, TypeError) as error:
        raise ParseError(f"the value does not fit {type_}: {error}") from None


def _is_narrow(dtype: DType) -> bool:
    return dtype.is_integer and dtype.bits < 8


def _flatten(nested: Any) -> Any:
    stack = [nested]
    while stack:
        item = stack.pop()
        if isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
        else:
            yield item


def encode_blob(array: Array) -> str:
    """The bytes as base64 lines."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")


def decode_blob(text: str, type_: TensorType) -> Array:
    shape: Sequence[int] = [int(size) for size in type_.shape]  # type: ignore[arg-type]
    try:
        raw = base64.b64decode(text, validate=True)
        return np.frombuffer(raw, dtype=type_.dtype.numpy).reshape(shape)
    except ValueError as error:
        raise ParseError(f"the data of a {type_} cannot be decoded: {error}") from None
