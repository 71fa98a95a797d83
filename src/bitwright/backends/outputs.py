"""Checks of the arrays that a caller passes for the outputs of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from bitwright.errors import RunError

Array = np.ndarray[Any, Any]


def check_out(name: str, array: Any, shape: tuple[int, ...], element: Any) -> None:
    """Raise a `RunError` if the array cannot hold a result of this shape and type."""
    is_array = isinstance(array, np.ndarray)
    fits = is_array and array.shape == shape and array.dtype == element
    if not fits or not array.flags.c_contiguous or not array.flags.writeable:
        raise RunError(
            f"the array given for output {name!r} does not fit",
            expected=f"{element} {list(shape)}, contiguous and writeable",
            found=f"{array.dtype} {list(array.shape)}" if is_array else type(array).__name__,
        )


def check_distinct(out: Mapping[str, Any]) -> None:
    """Raise a `RunError` if two output arrays share memory."""
    for (name, array), (other, another) in combinations(out.items(), 2):
        arrays = isinstance(array, np.ndarray) and isinstance(another, np.ndarray)
        if arrays and np.may_share_memory(array, another):
            raise RunError(
                f"the arrays given for outputs {name!r} and {other!r} share memory",
                expected="a separate array for each output",
                hint="One result would overwrite the other.",
            )


def disjoint_from(out: Mapping[str, Array], inputs: Iterable[Any]) -> dict[str, Array]:
    """The output arrays that share no memory with an input; kernels can write to them directly."""
    read = [array for array in inputs if isinstance(array, np.ndarray)]
    return {
        name: array
        for name, array in out.items()
        if not any(np.may_share_memory(array, other) for other in read)
    }
