"""Split samples into batches of the model's batch size.

    fixed batch     a model with a first axis of size 4 gets 4 samples at a time, whatever the
                    batches of the data are; an incomplete last batch is dropped
    dynamic batch   samples in one array, table or folder of images are split into batches of
                    BATCH_SIZE

The batch axis is the model's first axis, unless its symbol is named after time or length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.ir.arrays import Array, as_array
from bitwright.ir.dim import Dim
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import TensorType

Batch = dict[str, Array]
BATCH_SIZE = 32
_NOT_A_BATCH_AXIS = re.compile(r"seq|len|time|token|step|past|frame|position|height|width", re.I)


def batch_size_of(graph: Graph, wanted: int | None = None) -> int | None:
    """Samples per batch: the model's fixed size, else `wanted` or BATCH_SIZE; None if the inputs
    have no common batch axis.
    """
    firsts = {v.type.shape[0] for v in graph.inputs if isinstance(v.type, TensorType) and v.rank}
    if len(firsts) != 1:
        return None
    (first,) = firsts
    if isinstance(first, int):
        return first
    names = [symbol.name for symbol in first.symbols]
    if wanted is None and (len(names) != 1 or _NOT_A_BATCH_AXIS.search(names[0])):
        return None
    return wanted or BATCH_SIZE


class Samples(Sequence[Any]):
    """An array, or arrays by name, of many samples as a sequence of batches."""

    def __init__(self, arrays: Any, size: int) -> None:
        self._arrays, self._size = arrays, size
        first = next(iter(arrays.values())) if isinstance(arrays, Mapping) else arrays
        self._count = len(first)

    def __len__(self) -> int:
        return math.ceil(self._count / self._size)

    def __getitem__(self, number: Any) -> Any:
        if number >= len(self):
            raise IndexError(number)
        part = slice(number * self._size, (number + 1) * self._size)
        if isinstance(self._arrays, Mapping):
            return {name: np.array(array[part]) for name, array in self._arrays.items()}
        return np.array(self._arrays[part])


def in_batches(arrays: Any, graph: Graph, wanted: int | None) -> Sequence[Any]:
    """An array, or a dict of arrays, of samples as a sequence of one or more batches."""
    size = batch_size_of(graph, wanted)
    lengths = {_length(arrays)}
    if isinstance(arrays, Mapping):
        arrays = {name: as_array(value) for name, value in arrays.items()}
        lengths = {_length(array) for array in arrays.values()}
    if not size or len(lengths) != 1 or lengths.pop() <= size:
        return [arrays]
    return Samples(arrays, size)


def _length(array: Any) -> int:
    return len(array) if getattr(array, "ndim", 0) else 0


class Splitter:
    """Splits batches to the model's fixed batch size, and counts dropped samples."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self._fixed = {
            value.name: (value.rank, size)
            for value in inputs
            if isinstance(value.type, TensorType)
            for size in value.type.shape[:1]
            if not isinstance(size, Dim) and size
        }
        self.left_over = 0
        self._is_first = True

    @property
    def is_needed(self) -> bool:
        """Whether the model has a fixed batch size."""
        return bool(self._fixed)

    def split(self, batch: Batch) -> list[Batch]:
        """Split a batch; an incomplete last batch gives none.

        A batch with other shapes is returned unchanged; `Batches` raises the error.
        """
        found, is_first = self._length_and_size(batch), self._is_first
        self._is_first = False
        if found is None or (is_first and found[0] < found[1]):
            return [batch]
        length, size = found
        self.left_over += length % size
        return [
            {
                name: array[start : start + size] if _counts(array, length) else array
                for name, array in batch.items()
            }
            for start in range(0, length - size + 1, size)
        ]

    def _length_and_size(self, batch: Batch) -> tuple[int, int] | None:
        """Samples in the batch, and the model's batch size, if they differ."""
        found = set()
        for name, (rank, size) in self._fixed.items():
            array = batch.get(name)
            if array is None or array.ndim != rank:
                return None
            if len(array) != size:
                found.add((len(array), size))
        return found.pop() if len(found) == 1 else None


def _counts(array: Array, length: int) -> bool:
    """Whether the first axis of an array has this length."""
    return bool(array.ndim) and len(array) == length
