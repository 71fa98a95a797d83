"""Conversion of array-like objects to numpy arrays; CPU tensors of PyTorch share their memory.

PyTorch is not imported here: a caller with a tensor has imported it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError, UnsupportedError
from bitwright.ir.dtype import DTYPES, DType

Array = np.ndarray[Any, Any]

_TORCH_ELEMENTS = {
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


def as_array(item: Any) -> Array:
    """A numpy array of an array-like object or a PyTorch tensor of any type and device."""
    if type(item) is np.ndarray:
        return item
    return array_of_tensor(item) if hasattr(item, "detach") else np.asarray(item)


def read_arrays(
    path: str | Path, fault: type[BitwrightError], *, what: str = "", mapped: bool = False
) -> Any:
    """The array of an .npy file, or the arrays of an .npz by name; pickled contents are refused.

    `mapped` memory-maps an .npy file. An unreadable file raises `fault` with its name.
    """
    import zipfile  # slow to import, and not needed to run a model
    import zlib

    try:
        found = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            arrays = {name: found[name] for name in found.files}
        if other := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{other[0]!r} in it is no array")
        return arrays
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise fault(
            f"cannot read {what or Path(path).name}: {str(error) or type(error).__name__}",
            expected="an .npz or .npy file of plain numbers",
        ) from None


def element_of_torch(name: Any) -> DType:
    """The element type of a torch dtype."""
    found = _TORCH_ELEMENTS.get(str(name).removeprefix("torch."))
    if found is None:
        raise UnsupportedError(
            f"there is no element type for {name}", expected=", ".join(_TORCH_ELEMENTS)
        )
    return DTYPES[found]


def array_of_tensor(tensor: Any) -> Array:
    """The elements of a PyTorch tensor, without its gradient."""
    element = element_of_torch(tensor.dtype)
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        raise UnsupportedError(
            "a tensor is not dense", expected="torch.strided", found=str(tensor.layout)
        )
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:  # numpy has no bfloat16 and float8
        torch = sys.modules["torch"]
        bits = tensor.view({8: torch.uint8, 16: torch.int16}[element.bits])
        return np.asarray(bits.numpy().view(element.numpy))
