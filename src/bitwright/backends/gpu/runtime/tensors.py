"""Element types and raw memory in torch: buffers are uint8 tensors, arguments are typed slices of
them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bitwright.backends.gpu.requirements import load_torch
from bitwright.ir.dtype import DType

_NAMES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f8e8m0": "float8_e8m0fnu",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u64": "uint64",
    "u32": "uint32",
    "u16": "uint16",
    "u8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
}


@cache
def torch_type(dtype: DType) -> Any:
    """The torch type of an element type; types narrower than a byte are bytes."""
    torch = load_torch()
    narrow = "int8" if dtype.is_signed and dtype.is_integer else "uint8"
    return getattr(torch, _NAMES.get(dtype.name, narrow))


def typed(raw: Any, offset: int, dtype: DType) -> Any:
    """A tensor of elements from a byte offset of a raw tensor on."""
    whole = (raw.numel() - offset) // dtype.numpy.itemsize * dtype.numpy.itemsize
    if whole <= 0:
        return raw.new_empty(0, dtype=torch_type(dtype))
    return raw[offset : offset + whole].view(torch_type(dtype))


def to_raw(array: np.ndarray[Any, Any], device: Any) -> Any:
    """A copy of an array's bytes on a device."""
    torch = load_torch()
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if not flat.flags.writeable or flat.size == 0:
        flat = flat.copy()
    tensor = torch.from_numpy(flat)
    return tensor.to(device) if device.type != "cpu" else tensor.clone()


def to_array(raw: Any, dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """A numpy array of raw bytes; shares memory with a tensor on the CPU."""
    flat: np.ndarray[Any, Any] = raw.cpu().numpy()
    return flat.view(dtype.numpy).reshape(shape)
