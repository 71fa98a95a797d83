"""A weight as a file stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ROW_FORMAT = "I8"
"""Rows of 8-bit integers with one scale each: they multiply 8-bit rows as integers."""
SCALE = ".scale"
"""What the scales of a tensor are named behind its name."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of `shape`; `format` says what its bytes mean.

    A plain format ("F32", "F16", "BF16", …) has an array of `shape` as data. A block format
    ("Q4_0", …) has the bytes of the file, u8 [..., bytes of a row]. The row format, which only this
    package has, has integers i8 of `shape` and a scale [rows] in f32 that f16 holds.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: Array
    scale: Array | None = None

    @property
    def is_plain(self) -> bool:
        return self.scale is None and tuple(self.data.shape) == self.shape

    def part(self, rows: Any) -> StoredTensor:
        """Some rows of a matrix, by their numbers or a slice."""
        data, scale = self.data[rows], None if self.scale is None else self.scale[rows]
        return StoredTensor(self.name, self.format, (*data.shape[:-1], self.shape[-1]), data, scale)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)
