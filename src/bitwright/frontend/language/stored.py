"""A weight as a file stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor of `shape`; `format` says what its bytes mean.

    A plain format ("F32", "F16", "BF16", …) has an array of `shape` as data. A block format
    ("Q4_0", …) has the bytes of the file, u8 [..., bytes of a row].
    """

    name: str
    format: str
    shape: tuple[int, ...]
    data: Array

    @property
    def is_plain(self) -> bool:
        return tuple(self.data.shape) == self.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
