"""Scales that are codes themselves, under one f32 for the whole tensor.

    f8e8m0     powers of two, rounded up, and no second level (MX)
    f8e4m3fn   the largest scale is 448 of the second level (NV)
    u8         the largest scale is 255 of the second level
    f16, bf16  a second level only where the largest scale is not a normal number of theirs

What is rounded to 0 becomes the smallest positive code: a scale is never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir.dtype import DType, bf16, dtype, f8e4m3fn, f8e8m0, f16, f32, u8
from bitwright.ops.math.cast import cast

Array = np.ndarray[Any, Any]

_TWO_LEVELS = (f8e4m3fn, u8)
_LEAST = {f16: 2.0**-14, bf16: 2.0**-126}
_TYPES = (f32, f16, bf16, f8e8m0, *_TWO_LEVELS)


def scale_type(name: str | DType | None) -> DType:
    """A type that scales can have; None is f32."""
    found = f32 if name is None else dtype(name)
    if found not in _TYPES:
        raise QuantizationError(
            "scales do not have this type", expected=", ".join(map(str, _TYPES)), found=found
        )
    return found


@dataclass(frozen=True)
class ScaleFormat:
    """How scales are stored: their type, and the f32 that multiplies them."""

    element: DType = f32
    tensor_scale: float = 1.0

    @staticmethod
    def fitting(element: DType, largest: float) -> ScaleFormat:
        """The format in which a scale of this size is the largest code."""
        fits = element not in _TWO_LEVELS and _LEAST.get(element, 0) <= largest <= element.max
        if fits or element == f8e8m0 or not largest > 0:
            return ScaleFormat(element)
        top = np.float32(largest / float(element.max))
        return ScaleFormat(element, float(max(top, np.finfo(np.float32).tiny)))

    def qvalues(self, scale: Array) -> Array:
        """Scales in their stored type."""
        if self.element == f32:
            return np.asarray(scale, np.float32)
        ratio = np.asarray(scale, np.float64) / self.tensor_scale
        if self.element == u8:
            return np.clip(np.rint(ratio), 1, 255).astype(np.uint8)
        if self.element != f8e8m0:  # whose cast saturates
            ratio = np.minimum(ratio, float(self.element.max))
        found = cast(np.asarray(ratio, np.float32), self.element)
        least = np.asarray(1, np.uint8 if self.element.bits == 8 else np.uint16)
        if self.element == f8e8m0:
            return found
        return np.where(found > 0, found, least.view(self.element.numpy))

    def rounded(self, scale: Array) -> Array:
        """The f32 that the stored scales stand for."""
        if self.element == f32:
            return np.asarray(scale, np.float32)
        return np.asarray(
            self.qvalues(scale).astype(np.float32) * np.float32(self.tensor_scale), np.float32
        )


PLAIN = ScaleFormat()
