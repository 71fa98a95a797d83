"""Allocation of single tensors under a size limit.

    require_room((n, 4), 4, "its result")        # RunError if that is more than the limit
    y = new_array((n, 4), np.float32, "its result")

`BITWRIGHT_MAX_TENSOR_BYTES` sets the limit; the default is the machine's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright import knobs
from bitwright.errors import RunError

Array = np.ndarray[Any, Any]


def require_bytes(nbytes: int, what: str, where: str = "") -> None:
    """Raise a `RunError` if a tensor of this many bytes exceeds the limit."""
    limit = knobs.max_tensor_bytes()
    if nbytes > limit:
        raise RunError(
            f"{what} would need {nbytes:,} bytes",
            where=where,
            expected=f"at most {limit:,}",
            hint=f"{knobs.MAX_TENSOR_BYTES.name} moves the limit.",
        )


def require_room(shape: Sequence[int], itemsize: int, what: str, where: str = "") -> int:
    """The bytes of a tensor; a `RunError` if a size is negative or the limit is exceeded."""
    if any(size < 0 for size in shape):
        raise RunError(f"{what} would have a negative size", where=where, found=list(shape))
    nbytes = math.prod(shape) * itemsize
    require_bytes(nbytes, what, where)
    return nbytes


def new_array(shape: Sequence[int], element: Any, what: str, where: str = "") -> Array:
    """An uninitialized array; a `RunError` if there is no memory for it."""
    shape = tuple(int(size) for size in shape)
    nbytes = require_room(shape, np.dtype(element).itemsize, what, where)
    try:
        return np.empty(shape, element)
    except (MemoryError, ValueError):  # ValueError: more than an array can hold
        raise no_memory(nbytes, what, where) from None


def no_memory(nbytes: int, what: str, where: str = "") -> RunError:
    """The error for an allocation that the system refused."""
    return RunError(
        f"there is no memory for the {nbytes:,} bytes of {what}",
        where=where,
        hint=f"{knobs.MAX_TENSOR_BYTES.name} sets a limit that is checked before allocation.",
    )
