"""Buffers and views, with symbolic sizes and strides.

A view is a buffer with an offset and one stride per axis, all in elements. Reshapes, transposes,
slices and broadcasts of a value are views of the same buffer; a kernel that needs a contiguous
operand requests a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np

from bitwright.ir.dim import Size, divide_exactly, product
from bitwright.ir.dtype import DType

Array = np.ndarray[Any, Any]


class Storage(Enum):
    """The owner of a buffer's memory."""

    ARENA = "arena"
    INPUT = "input"
    OUTPUT = "output"
    CONSTANT = "constant"
    STATE = "state"


@dataclass(eq=False)
class Buffer:
    name: str
    dtype: DType
    count: Size
    storage: Storage = Storage.ARENA
    space: str = "host"
    array: Array | None = None
    """The contents of a constant."""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{self.count}] in {self.storage.value}"


@dataclass(frozen=True)
class View:
    buffer: Buffer
    offset: Size
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]

    @property
    def dtype(self) -> DType:
        return self.buffer.dtype

    @property
    def count(self) -> Size:
        return product(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the view is contiguous in row-major order."""
        wanted = row_major(self.shape)
        return all(
            size == 1 or stride == fit
            for size, stride, fit in zip(self.shape, self.strides, wanted, strict=True)
        )

    def transpose(self, perm: Sequence[int]) -> View:
        shape, strides = (tuple(one[axis] for axis in perm) for one in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def slice(self, axis: int, start: Size, count: Size, step: int) -> View:
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[axis]
        shape[axis], strides[axis] = count, strides[axis] * step
        return replace(self, offset=offset, shape=tuple(shape), strides=tuple(strides))

    def expand(self, shape: Sequence[Size]) -> View:
        """Broadcast with numpy's rules: a new or repeated axis has stride 0."""
        missing = len(shape) - len(self.shape)
        old = [1] * missing + list(self.shape)
        strides = [0] * missing + list(self.strides)
        axes = zip(old, strides, shape, strict=True)
        wide = tuple(0 if size == 1 and new != 1 else stride for size, stride, new in axes)
        return replace(self, shape=tuple(shape), strides=wide)

    def run_stride(self, axes: Sequence[int]) -> Size | None:
        """The stride of several axes merged into one, outermost first; None if they cannot merge.

        Axes of size 1 are ignored.
        """
        sized = [(self.shape[a], self.strides[a]) for a in axes if self.shape[a] != 1]
        if not sized:
            return 1
        for (_, outer), (size, inner) in pairwise(sized):
            if outer != inner * size:
                return None
        return sized[-1][1]

    def reshape(self, shape: Sequence[Size]) -> View | None:
        """The view in another shape; None if that needs a copy.

        Axes form groups of equal products. The old axes of a group must merge into one, which the
        new axes split.
        """
        groups = _groups(self.shape, shape)
        if groups is None:
            return None
        strides: list[Size] = []
        for old, new in groups:
            run = self.run_stride(old)
            if run is None:
                return None
            inner = row_major([shape[a] for a in new])
            strides += [run * stride for stride in inner]
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def relabel(self, shape: Sequence[Size]) -> View:
        """A contiguous view in another shape of the same number of elements."""
        return replace(self, shape=tuple(shape), strides=row_major(shape))

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        text = f"{self.buffer.name}[{shape}]"
        if not self.is_contiguous:
            text += f" by [{', '.join(map(str, self.strides))}]"
        return text + (f" at {self.offset}" if self.offset != 0 else "")


def contiguous(buffer: Buffer, shape: Sequence[Size]) -> View:
    return View(buffer, 0, tuple(shape), row_major(shape))


def dense(buffer: Buffer, shape: Sequence[Size], order: Sequence[int]) -> View:
    """A dense view of a whole buffer, with the axes of `shape` in `order`, outermost first."""
    inner = row_major([shape[axis] for axis in order])
    strides: list[Size] = [0] * len(shape)
    for axis, stride in zip(order, inner, strict=True):
        strides[axis] = stride
    return View(buffer, 0, tuple(shape), tuple(strides))


def row_major(shape: Sequence[Size]) -> tuple[Size, ...]:
    strides: list[Size] = []
    total: Size = 1
    for size in reversed(shape):
        strides.append(total)
        total = total * size
    return tuple(reversed(strides))


def _groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]] | None:
    """Groups of axes of both shapes with equal products, outermost first."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a: Size = 1
        b: Size = 1
        if i < len(old):
            a, left, i = old[i], [i], i + 1
        if j < len(new):
            b, right, j = new[j], [j], j + 1
        while a != b:
            if i < len(old) and divide_exactly(b, a) is not None:
                a, left, i = a * old[i], [*left, i], i + 1
            elif j < len(new) and divide_exactly(a, b) is not None:
                b, right, j = b * new[j], [*right, j], j + 1
            elif i < len(old):
                a, left, i = a * old[i], [*left, i], i + 1
            elif j < len(new):
                b, right, j = b * new[j], [*right, j], j + 1
            else:
                return None
        groups.append((left, right))
    return groups
