"""Scales in a narrow type, multiplied by one f32 `tensor_scale`.

    f8e8m0     powers of two, rounded up; tensor_scale is 1 (MX)
    f8e4m3fn   tensor_scale maps the largest scale to 448 (NV)
    u8         tensor_scale maps the largest scale to 255
    f16, bf16  tensor_scale is 1 unless the largest scale is not a normal number of the type

A scale that would round to 0 becomes the smallest positive number of the type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, bf16, f8e4m3fn, f8e8m0, f16, f32, u8
from bitwright.ir.quant_params import QuantParams
from bitwright.ops.math.cast import cast

_TWO_LEVELS = (f8e4m3fn, u8)
_LEAST = {f16: 2.0**-14, bf16: 2.0**-126}


@dataclass(frozen=True)
class ScaleFormat:
    """The type of stored scales, and the f32 that multiplies them."""

    element: DType = f32
    tensor_scale: float = 1.0

    @staticmethod
    def fitting(element: DType, largest: float) -> ScaleFormat:
        """The format whose largest number represents the largest scale."""
        fits = element not in _TWO_LEVELS and _LEAST.get(element, 0) <= largest <= element.max
        if fits or element == f8e8m0 or not largest > 0:
            return ScaleFormat(element)
        top = np.float32(largest / float(element.max))
        return ScaleFormat(element, float(max(top, np.finfo(np.float32).tiny)))

    def qvalues(self, scale: Array) -> Array:
        """Scales in the stored type."""
        if self.element == f32:
            return np.asarray(scale, np.float32)
        ratio = np.asarray(scale, np.float64) / self.tensor_scale
        if self.element == u8:
            return np.clip(np.rint(ratio), 1, 255).astype(np.uint8)
        if self.element != f8e8m0:  # the cast to f8e8m0 saturates
            ratio = np.minimum(ratio, float(self.element.max))
        found = cast(np.asarray(ratio, np.float32), self.element)
        least = np.asarray(1, np.uint8 if self.element.bits == 8 else np.uint16)
        if self.element == f8e8m0:
            return found
        return np.where(found > 0, found, least.view(self.element.numpy))

    def rounded(self, scale: Array) -> Array:
        """Scales in f32, rounded as stored."""
        return self.values(self.qvalues(scale))

    def values(self, qvalues: Array) -> Array:
        """Stored scales in f32."""
        wide = np.asarray(qvalues, np.float32)
        return wide if self.element == f32 else np.asarray(wide * np.float32(self.tensor_scale))

    def store(self, params: QuantParams) -> QuantParams:
        """Parameters with their scales in this format."""
        return replace(
            params,
            scale=self.qvalues(params.scale),
            scale_type=self.element,
            tensor_scale=self.tensor_scale,
        ).validate()


PLAIN = ScaleFormat()
