"""What weights are rounded to: the numbers that codes stand for, and how scales are stored.

f8 or f4, in blocks whose scales are f32, powers of two (MX) or f8 themselves (NV).

A scale lets the largest weight of a block have the last code. Where that wastes codes (a power of
two is rounded up; f4 has few codes near its end) other scales are tried, and each block keeps the
one with the least squared error, weighed by how large the inputs of its terms are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from bitwright.ir.dtype import DType, dtype, f4e2m1, f8e8m0, f32
from bitwright.quant.core.formats import FORMATS
from bitwright.quant.core.scales import ScaleFormat
from bitwright.quant.model.weights.nearest import weight_scales

Array = np.ndarray[Any, Any]
_FRACTION_BITS, _EXPONENT, _BIAS = 23, 255, 127
_SMALLER = (1.0, 0.5)
"""A power of two, and the next below it: the largest weights are cut off then."""
_OTHERS = (1.0, 1.5, 0.9)
"""For f4: the largest weight at 6, at 4, or cut off a little."""


@dataclass(frozen=True)
class Grid:
    element: DType
    scale: DType = f32

    @classmethod
    def named(cls, format: str) -> Grid:
        """The grid of a block format."""
        found = FORMATS[format]
        return cls(dtype(found.element), dtype(found.scale))

    @property
    def limit(self) -> float:
        """The largest number a code stands for."""
        return float(self.element.max)

    @property
    def storage(self) -> np.dtype[Any]:
        """The numpy type of a code."""
        return self.element.numpy

    def nearest(self, ratio: Array) -> None:
        """Numbers in steps of their scale become the nearest that have a code."""
        # the distance of neighbouring numbers is a power of two, which x has in its exponent
        np.clip(ratio, -self.limit, self.limit, out=ratio)
        facts = ml_dtypes.finfo(self.element.numpy)  # type: ignore[no-untyped-call]
        exponent = (ratio.view(np.int32) >> _FRACTION_BITS) & _EXPONENT
        np.maximum(exponent, int(facts.minexp) + _BIAS, out=exponent)
        exponent -= int(facts.nmant)
        step = (exponent << _FRACTION_BITS).view(np.float32)
        ratio /= step
        np.rint(ratio, out=ratio)
        ratio *= step

    def format(self, largest: float) -> ScaleFormat:
        """How scales are stored where the largest weight has this size."""
        return ScaleFormat.fitting(self.scale, largest / self.limit)

    def scales(
        self, matrix: Array, block: int, form: ScaleFormat, importance: Array | None = None
    ) -> Array:
        """Scales [groups, columns, blocks] of weights [groups, columns, terms], as stored.

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
        """The squared error of every block."""
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
    """Scales so that they broadcast over the weights."""
    return np.repeat(scales, block, axis=2)[:, :, :terms] if block else scales
