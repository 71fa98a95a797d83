"""Quantization error, measured on values.

sqnr     10 log10(sum x**2 / sum (x - y)**2) in dB; infinite if x == y
cosine   cosine similarity of x and y as vectors; 1 if both are zero
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError


@dataclass(frozen=True)
class Quality:
    """Error of an approximation, on the finite values of the original."""

    sqnr: float
    max_error: float
    mean_squared_error: float
    cosine: float

    def __str__(self) -> str:
        return f"SQNR {self.sqnr:.1f} dB, max error {self.max_error:.4g}, cosine {self.cosine:.6f}"


def quality(x: Any, y: Any) -> Quality:
    """The error of y (an array or a QuantizedTensor) against x."""
    exact = np.asarray(x)
    other = y.dequantize() if hasattr(y, "dequantize") else np.asarray(y)
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
