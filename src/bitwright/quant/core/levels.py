"""Codebooks: the representable values, in units of the scale, of types that are not integers.

float        the finite values of the type; rounds to nearest, ties to even
logarithmic  0 and sign * base**-k, k = 0..K-1; rounds to the nearest k in the log domain; values
             below the smallest magnitude by more than half a step become 0
binary       -1 and +1; 0 maps to +1
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.quant_types import QuantType, Scheme


@dataclass(frozen=True)
class Codebook:
    """Values in ascending order, and the thresholds between neighbours."""

    levels: Array
    thresholds: Array

    @cached_property
    def offsets(self) -> Array:
        """C of each level (see `quant.calibration.scoring`): makes F continuous at thresholds."""
        left = (self.thresholds - self.levels[:-1]) ** 3
        right = (self.thresholds - self.levels[1:]) ** 3
        return np.concatenate([[0.0], np.cumsum(left - right) / 3])

    def values(self, u: Array) -> tuple[Array, Array]:
        """The nearest level of each u, and its offset."""
        at = np.searchsorted(self.thresholds, u)
        return self.levels[at], self.offsets[at]


def magnitudes(kind: QuantType) -> int:
    """The number of nonzero magnitudes of a logarithmic type."""
    return int(kind.max)


@cache
def codebook(kind: QuantType, scheme: Scheme, base: float) -> Codebook | None:
    """The codebook of a type under a scheme; None for linear integer quantization."""
    if scheme is Scheme.binary:
        return Codebook(np.array([-1.0, 1.0]), np.array([-np.finfo(np.float64).tiny]))
    if scheme is Scheme.logarithmic:
        k = np.arange(magnitudes(kind))[::-1].astype(np.float64)  # ascending magnitudes
        size, border = base**-k, base ** -(k + 0.5)
        if not kind.is_signed:
            return Codebook(np.concatenate([[0.0], size]), border)
        return Codebook(
            np.concatenate([-size[::-1], [0.0], size]), np.concatenate([-border[::-1], border])
        )
    if kind.is_integer:
        return None
    patterns = np.arange(1 << kind.bits, dtype=np.uint8)
    values = patterns.view(kind.element.numpy).astype(np.float64)
    finite = np.unique(values[np.isfinite(values)])
    return Codebook(finite, (finite[1:] + finite[:-1]) / 2)
