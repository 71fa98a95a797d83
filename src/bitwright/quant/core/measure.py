"""What quantization cost, measured on the values: never a table of constants.

sqnr     10 log10(sum x**2 / sum (x - y)**2) in dB, infinite where nothing was lost
cosine   of the angle between x and y as vectors; 1 where both are zero
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.quant.tensor.tensor import QuantizedTensor

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Quality:
    """Of an approximation, on the finite values of what it approximates."""

    sqnr: float
    max_error: float
    mean_squared_error: float
    cosine: float

    def __str__(self) -> str:
        return f"SQNR {self.sqnr:.1f} dB, max error {self.max_error:.4g}, cosine {self.cosine:.6f}"


def quality(x: Any, y: Any) -> Quality:
    """How well y (an array or a quantized tensor) stands for x."""
    exact = np.asarray(x)
    other = y.dequantize() if isinstance(y, QuantizedTensor) else np.asarray(y)
    if exact.shape != other.shape:
        raise QuantizationError(
            "the shapes differ", expected=list(exact.shape), found=list(other.shape)
        )
    exact, other = exact.astype(np.float64).reshape(-1), other.astype(np.float64).reshape(-1)
    finite = np.isfinite(exact)
    if not finite.all():
        exact, other = exact[finite], other[finite]
    if not exact.size:
        return Quality(np.inf, 0.0, 0.0, 1.0)
    error = other - exact
    noise, power, other_power = error @ error, exact @ exact, other @ other
    sqnr = 10 * np.log10(power / noise) if noise and power else (-np.inf if noise else np.inf)
    product = np.sqrt(power * other_power)
    cosine = exact @ other / product if product else float(power == other_power)
    return Quality(
        float(sqnr), float(np.abs(error).max()), float(noise / exact.size), float(cosine)
    )
