"""Numpy helpers for reference implementations."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import DType, Family, dtype

Array = np.ndarray[Any, Any]


def wide(x: Array) -> Array:
    """The array in the type that references accumulate in: f64, i64, u64 or c128."""
    family = dtype(x.dtype).family
    if family is Family.FLOAT:
        return x.astype(np.float64)
    if family is Family.COMPLEX:
        return x.astype(np.complex128)
    if family is Family.UNSIGNED:
        return x.astype(np.uint64)
    return x.astype(np.int64)


def narrow(x: Array, element: DType) -> Array:
    """A wide result, rounded to the element type by numpy's conversion."""
    x = np.asarray(x)
    if x.dtype == element.numpy:
        return x
    if element.family is Family.STRING:
        return x.astype(object)
    if element.is_integer and element.bits < 8:
        return x.astype(np.int8).astype(element.numpy)
    return x.astype(element.numpy)
