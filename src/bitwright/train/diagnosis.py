"""Finds the first op of a step that gives NaN or infinity, by running it in the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.interpret import run


class _FoundError(Exception):
    """Ends the run at the first value that is not finite."""


def first_nonfinite(graph: Graph, feeds: Mapping[str, Any], states: Mapping[str, Array]) -> str:
    """The first value that is not finite, in words; "" if all are finite."""
    found: list[Value] = []

    def observe(value: Value, array: Any) -> None:
        if not _is_finite(array) and not value.is_constant:
            found.append(value)
            raise _FoundError

    try:
        run(graph, feeds, states={name: array.copy() for name, array in states.items()},
            observe=observe)  # fmt: skip
    except _FoundError:
        return _described(found[0])
    except BitwrightError as error:
        return str(error)
    return ""


def _described(value: Value) -> str:
    node = value.node
    if node.op == "input":
        return f"input {value.name!r} of the batch holds NaN or infinity"
    if node.op == "state":
        return f"parameter {value.name!r} holds NaN or infinity since an earlier step"
    where = f" (from {node.loc})" if node.loc else ""
    return f"the first op that gives it is {node.op} {value}{where}"


def _is_finite(array: Any) -> bool:
    if not isinstance(array, np.ndarray):
        return True
    if array.dtype.kind in "iub":
        return True
    try:
        return bool(np.isfinite(array).all())
    except TypeError:  # ml_dtypes without this function
        return bool(np.isfinite(array.astype(np.float32)).all())
