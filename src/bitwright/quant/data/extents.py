"""The sizes and ranges of a model's inputs, as calibration batches have them.

Golden inputs are drawn from them (`bitwright.proof`), so that a file needs none of the user's data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array, as_array


@dataclass(frozen=True)
class InputExtent:
    """The shape of an input in one batch, and its range over several."""

    shape: tuple[int, ...]
    low: float
    high: float


def input_extents(batches: Iterable[Mapping[str, Array]]) -> dict[str, InputExtent]:
    """The extent of every numeric input; the shapes are those of the first batch."""
    found: dict[str, InputExtent] = {}
    for batch in batches:
        for name, given in batch.items():
            array = as_array(given)
            if array.dtype.kind in "OSUc":
                continue
            values = array.astype(np.float64).reshape(-1)
            values = values[np.isfinite(values)]
            low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
            if name in found:
                before = found[name]
                low, high = min(low, before.low), max(high, before.high)
            shape = found[name].shape if name in found else tuple(array.shape)
            found[name] = InputExtent(shape, low, high)
    return found
