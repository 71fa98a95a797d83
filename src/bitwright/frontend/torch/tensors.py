"""Torch tensors as numpy arrays that share memory, and their element types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bitwright.ir.arrays import array_of_tensor as array_of
from bitwright.ir.arrays import element_of_torch as element_type

Array = np.ndarray[Any, Any]

__all__ = ["array_of", "element_type", "has_data", "memory_of"]


def has_data(tensor: torch.Tensor) -> bool:
    """Whether the tensor has data; a fake or meta tensor has none."""
    return type(tensor).__name__ != "FakeTensor" and tensor.device.type != "meta"


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors if and only if they share the same elements."""
    if not has_data(tensor) or not tensor.numel() or tensor.layout != torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
