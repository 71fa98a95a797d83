"""Finds the first op of a step that gives NaN or infinity, by running it in the interpreter.

An infinity that comes from a constant (a mask of -inf) is not the cause; the cause is an op with
finite operands, or the first op that makes a NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Value
from bitwright.ops.core.interpret import run


class _FoundError(Exception):
    """Ends the run at the value that is the cause."""


class _Search:
    """Observes the values of a run in their order."""

    def __init__(self, graph: Graph) -> None:
        self.given = set(graph.inputs)
        self.infinite: set[Value] = set()
        self.first: Value | None = None
        """The first value that is not finite and may be right."""

    def observe(self, value: Value, array: Any) -> None:
        if not isinstance(array, np.ndarray) or array.dtype.kind in "iub":
            return
        wide = array.astype(np.float32) if array.dtype.itemsize < 4 else array
        if np.isfinite(wide).all():
            return
        has_nan = bool(np.isnan(wide).any())
        node = value.node
        if has_nan or (not node.is_boundary and not self.infinite.intersection(node.operands)):
            is_cause = not node.is_boundary or value in self.given or node.op == "state"
        else:  # inputs may hold -inf, like masks
            is_cause = node.op == "state" or (value in self.given and bool((wide == np.inf).any()))
        if is_cause:
            self.first = value
            raise _FoundError
        self.infinite.add(value)
        if self.first is None and not value.is_constant:
            self.first = value


def first_nonfinite(graph: Graph, feeds: Mapping[str, Any], states: Mapping[str, Array]) -> str:
    """The value that makes a step not finite, in words; "" if all are finite."""
    search = _Search(graph)
    try:
        run(graph, feeds, states={name: array.copy() for name, array in states.items()},
            observe=search.observe)  # fmt: skip
    except _FoundError:
        pass
    except BitwrightError as error:
        return str(error)
    return "" if search.first is None else _described(search.first)


def _described(value: Value) -> str:
    node = value.node
    if node.op == "input":
        return f"input {value.name!r} of the batch holds NaN or infinity"
    if node.op == "state":
        return f"parameter {value.name!r} holds NaN or infinity since an earlier step"
    where = f" (from {node.loc})" if node.loc else ""
    return f"the first op that gives it is {node.op} {value}{where}"
