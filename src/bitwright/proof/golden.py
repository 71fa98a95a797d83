"""Golden inputs: synthetic arrays that a short description reproduces on every machine.

    float     low + (high - low) * u / 2^24, u from 24 bits of SHAKE-128(seed, name)
    integer   low + u mod (high - low + 1)
    mask      integers from 0 to 1: the first three quarters of the last axis are 1

Ranges and sizes come from the calibration data. Without data, indices are bounded by the table that
they select from, floats are drawn from -1 to 1, and several sizes are tried.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DTYPES, DType, string
from bitwright.ir.feeds import solve
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import TensorType
from bitwright.quant.data.extents import InputExtent

MOST_ELEMENTS = 1 << 24
"""The largest golden input; a file cannot ask for a larger one."""
SHORT = 16
"""Sequences are cut to this length."""
TRIED = (8, 1, 16, 32, 64, 224)
"""Sizes to try if there is no data."""
_SAME_INDICES = ("cast", "reshape", "unsqueeze", "squeeze", "transpose", "expand", "clip", "where")


@dataclass(frozen=True)
class InputSpec:
    """One golden input."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float

    def array(self, seed: int) -> Array:
        """The values; equal on every machine."""
        element = DTYPES[self.dtype]
        count = math.prod(self.shape)
        if count > MOST_ELEMENTS:
            raise BitwrightError(
                f"golden input {self.name!r} has {count:,} elements",
                expected=f"at most {MOST_ELEMENTS:,}",
            )
        stream = hashlib.shake_128(f"{seed} {self.name}".encode()).digest(4 * count)
        u = np.frombuffer(stream, "<u4")
        if element.is_float or element.is_complex:
            values = self.low + (self.high - self.low) * ((u >> 8) / float(1 << 24))
        elif (self.low, self.high) == (0, 1) and self.shape and self.shape[-1] >= 4:
            position = np.arange(count) % self.shape[-1]
            values = (position < self.shape[-1] - self.shape[-1] // 4).astype(np.float64)
        else:
            values = self.low + u.astype(np.float64) % (self.high - self.low + 1)
        with np.errstate(invalid="ignore", over="ignore"):
            made: Array = values.reshape(self.shape).astype(element.numpy)
        return made


def input_specs(
    graph: Graph, extents: Mapping[str, InputExtent], states: frozenset[str] = frozenset()
) -> Iterator[list[InputSpec]]:
    """Descriptions of golden inputs to try, smallest first; states start from zero."""
    unfit = [v for v in graph.inputs if not isinstance(v.type, TensorType) or v.dtype == string]
    if unfit:
        raise BitwrightError(f"no synthetic {unfit[0].type} can be made for {unfit[0].name!r}")
    ranges = {
        v.name: (0.0, 0.0) if v.name in states else _range(graph, v, extents) for v in graph.inputs
    }
    made: set[tuple[tuple[str, int], ...]] = set()
    for sizes in _size_choices(graph, extents):
        key = tuple(sorted(sizes.items()))
        if key in made:
            continue
        made.add(key)
        specs = []
        for value in graph.inputs:
            shape = value.tensor.concrete(sizes)
            low, high = ranges[value.name]
            specs.append(InputSpec(value.name, value.dtype.name, shape, low, high))
        if all(math.prod(spec.shape) <= MOST_ELEMENTS for spec in specs):
            yield specs


def _size_choices(graph: Graph, extents: Mapping[str, InputExtent]) -> Iterator[dict[str, int]]:
    names = {s.name: s.bound for v in graph.inputs for s in v.type.symbols}
    seen: dict[str, int] = {}
    short: set[str] = set()
    batch: set[str] = set()
    for value in graph.inputs:
        found = extents.get(value.name)
        if found is None or len(found.shape) != value.rank:
            continue
        for size, actual in zip(value.shape, found.shape, strict=True):
            solve(size, actual, seen)
        symbols = [getattr(size, "symbols", ()) for size in value.shape]
        if symbols:
            batch.update(s.name for s in symbols[0])
        if value.rank <= 3:
            short.update(s.name for group in symbols[1:] for s in group)
    if names.keys() <= seen.keys():
        seen = {name: seen[name] for name in names}
        for limit in (SHORT, max(seen.values(), default=1)):
            yield {
                name: 1 if name in batch else min(size, limit) if name in short else size
                for name, size in seen.items()
            }
        yield seen
    for size in TRIED:
        yield {
            name: seen.get(name, size if bound is None else min(size, bound))
            for name, bound in names.items()
        }


def _range(graph: Graph, value: Value, extents: Mapping[str, InputExtent]) -> tuple[float, float]:
    """The range that the values of an input are drawn from."""
    found = extents.get(value.name)
    if found is not None:
        return found.low, found.high
    if value.dtype.is_float or value.dtype.is_complex:
        return -1.0, 1.0
    return 0.0, float(_index_bound(graph, value, value.dtype))


def _index_bound(graph: Graph, value: Value, element: DType) -> int:
    """The largest valid index, if the input selects rows of a table; else 1."""
    if element.name == "bool":
        return 1
    reached = {value}
    least = 1 << 15
    is_index = False
    for node in graph.nodes:  # in topological order
        if not reached & set(node.operands):
            continue
        if node.op in _SAME_INDICES:
            reached.update(node.outputs)
        elif node.op == "gather" and node.inputs[1] in reached and node.inputs[0] is not None:
            axis = int(node.attrs.get("axis", 0))
            rows: Any = node.inputs[0].shape[axis]
            if isinstance(rows, int):
                least, is_index = min(least, rows - 1), True
    return max(least, 0) if is_index else 1
