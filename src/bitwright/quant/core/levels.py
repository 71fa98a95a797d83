"""The values that codes stand for, in units of the scale, where they are not whole numbers.

float        the finite values of the type; the nearest, halves to the even code
logarithmic  0 and sign * base**-k, k = 0..K-1: the nearest k in the logarithm; below the
             smallest magnitude by more than half a step of it, 0
binary       -1 and +1; 0 is +1
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bitwright.quant.calibration.scoring import Codebook
from bitwright.quant.core.types import QuantType, Scheme

Array = np.ndarray[Any, Any]


def magnitudes(kind: QuantType) -> int:
    """How many magnitudes a logarithmic code tells apart, 0 aside."""
    return int(kind.max)


@cache
def levels(kind: QuantType, scheme: Scheme, base: float) -> Codebook | None:
    """The codebook of a type under a scheme; None where codes are whole numbers."""
    if scheme is Scheme.binary:
        return Codebook(np.array([-1.0, 1.0]), np.array([-np.finfo(np.float64).tiny]))
    if scheme is Scheme.logarithmic:
        k = np.arange(magnitudes(kind))[::-1].astype(np.float64)  # rising magnitudes
        size, border = base**-k, base ** -(k + 0.5)
        if not kind.is_signed:
            return Codebook(np.concatenate([[0.0], size]), border)
        return Codebook(
            np.concatenate([-size[::-1], [0.0], size]), np.concatenate([-border[::-1], border])
        )
    if kind.is_integer:
        return None
    qvalues = np.arange(1 << kind.bits, dtype=np.uint8)
    values = qvalues.view(kind.element.numpy).astype(np.float64)
    finite = np.unique(values[np.isfinite(values)])
    return Codebook(finite, (finite[1:] + finite[:-1]) / 2)
