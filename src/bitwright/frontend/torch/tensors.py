"""Torch tensors as numpy arrays that share their memory, and element types of both worlds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bitwright.errors import UnsupportedError
from bitwright.ir.dtype import DTYPES, DType

Array = np.ndarray[Any, Any]

_ELEMENTS = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e4m3fnuz": "f8e4m3fnuz",
    "float8_e5m2": "f8e5m2",
    "float8_e5m2fnuz": "f8e5m2fnuz",
    "float8_e8m0fnu": "f8e8m0",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
    "complex128": "c128",
}
_BITS = {8: torch.uint8, 16: torch.int16}


def element_type(name: torch.dtype) -> DType:
    """The element type of a torch dtype."""
    found = _ELEMENTS.get(str(name).removeprefix("torch."))
    if found is None:
        raise UnsupportedError(
            f"there is no element type for {name}", expected=", ".join(_ELEMENTS)
        )
    return DTYPES[found]


def array_of(tensor: torch.Tensor) -> Array:
    """A numpy array with the tensor's elements: the same memory, where it is the CPU's."""
    element = element_type(tensor.dtype)
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(
            "a tensor is not dense", expected="torch.strided", found=str(tensor.layout)
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:  # numpy itself does not know bfloat16 and float8
        return tensor.view(_BITS[element.bits]).numpy().view(element.numpy)


def has_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds elements, which a fake or meta tensor does not."""
    return type(tensor).__name__ != "FakeTensor" and tensor.device.type != "meta"


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that two tensors share exactly when they are the same elements in memory."""
    if not has_data(tensor) or not tensor.numel() or tensor.layout != torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
