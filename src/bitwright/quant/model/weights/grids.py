"""Float grids for weights (f8, f4) in blocks with scales in f32, powers of two (MX) or f8 (NV).

The default scale maps the largest weight of a block to the largest grid value. Where that wastes
resolution (MX rounds scales up to powers of two; f4 is coarse near its maximum), other scales are
tried. Each block takes the scale with the least squared error, weighted by the inputs' mean
square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, dtype, f4e2m1, f8e8m0, f32
from bitwright.quant.core.formats import FORMATS
from bitwright.quant.core.scales import ScaleFormat
from bitwright.quant.model.weights.nearest import weight_scales

_FRACTION_BITS, _EXPONENT, _BIAS = 23, 255, 127
_SMALLER = (1.0, 0.5)
"""The default power of two, and the next lower one, which clips the largest weights."""
_OTHERS = (1.0, 1.5, 0.9)
"""For f4: the largest weight at 6, at 4, or clipped by 10%."""


@dataclass(frozen=True)
class Grid:
    """The values of a block format's element type, and the type of its scales."""

    element: DType
    scale: DType = f32

    @classmethod
    def named(cls, format: str) -> Grid:
        found = FORMATS[format]
        return cls(dtype(found.element), dtype(found.scale))

    @property
    def limit(self) -> float:
        return float(self.element.max)

    @property
    def storage(self) -> np.dtype[Any]:
        return self.element.numpy

    def nearest(self, ratio: Array) -> None:
        """Round weight / scale to the nearest grid values, in place."""
        # the spacing of grid values is a power of two, given by the exponent of x
        np.clip(ratio, -self.limit, self.limit, out=ratio)
        facts = ml_dtypes.finfo(self.element.numpy)  # type: ignore[no-untyped-call]
        exponent = (ratio.view(np.int32) >> _FRACTION_BITS) & _EXPONENT
        np.maximum(exponent, int(facts.minexp) + _BIAS, out=exponent)
        exponent -= int(facts.nmant)
        spacing = (exponent << _FRACTION_BITS).view(np.float32)
        ratio /= spacing
        np.rint(ratio, out=ratio)
        ratio *= spacing

    def format(self, largest: float) -> ScaleFormat:
        """The scale format for weights whose largest magnitude is `largest`."""
        return ScaleFormat.fitting(self.scale, largest / self.limit)

    def scales(
        self, matrix: Array, block: int, form: ScaleFormat, importance: Array | None = None
    ) -> Array:
        """Stored scales [groups, columns, blocks] of weights [groups, columns, terms].

        `importance` [groups, terms] is the mean square of the inputs.
        """
        plain = weight_scales(matrix, self.limit, block)
        factors: tuple[float, ...] = (1.0,)
        if self.scale == f8e8m0:
            factors = _SMALLER
        elif self.element == f4e2m1:
            factors = _OTHERS
        tried = [form.rounded(plain * np.float32(factor)) for factor in factors]
        if len(tried) == 1:
            return tried[0]
        weight = np.float32(1) if importance is None else importance[:, None, :]
        errors = [self._errors(matrix, scales, block, weight) for scales in tried]
        best = np.argmin(errors, axis=0)
        return np.asarray(np.choose(best, tried))

    def _errors(self, matrix: Array, scales: Array, block: int, weight: Any) -> Array:
        each = spread(scales, block, matrix.shape[2])
        qvalues = matrix / each
        self.nearest(qvalues)
        qvalues *= each
        qvalues -= matrix
        np.square(qvalues, out=qvalues)
        qvalues *= weight
        if not block:
            return np.asarray(qvalues.sum(axis=2, keepdims=True))
        return np.add.reduceat(qvalues, list(range(0, matrix.shape[2], block)), axis=2)


def spread(scales: Array, block: int, terms: int) -> Array:
    """Scales repeated so that they broadcast over the weights."""
    return np.repeat(scales, block, axis=2)[:, :, :terms] if block else scales
