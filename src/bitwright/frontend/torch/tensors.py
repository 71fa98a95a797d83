"""Torch tensors as numpy arrays that share their memory, and element types of both worlds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bitwright.ir.arrays import array_of_tensor as array_of
from bitwright.ir.arrays import element_of_torch as element_type

Array = np.ndarray[Any, Any]

__all__ = ["array_of", "element_type", "has_data", "memory_of"]


def has_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds elements, which a fake or meta tensor does not."""
    return type(tensor).__name__ != "FakeTensor" and tensor.device.type != "meta"


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that two tensors share exactly when they are the same elements in memory."""
    if not has_data(tensor) or not tensor.numel() or tensor.layout != torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
