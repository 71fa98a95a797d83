"""Casts to narrow float types, without scales or with one scale for each block.

    CastConfiguration.plain("bf16")                  no scales
    CastConfiguration.named("mxfp4")                 f4e2m1, blocks (1, 32), powers of two
    CastConfiguration("f8e4m3fn", (128, 128))        f32 scales for 128 x 128 blocks

    scale = max |x| of a block / largest number of the type, stored in `scale_type`
    q     = x / scale rounded to the type, ties to even, saturating

A block is (rows, columns) of the last two axes; blocks at the edges may be smaller. Data is packed,
and a scale is never 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, dtype, f8e8m0, f32
from bitwright.ir.quant_params import scale_type
from bitwright.ops.math.cast import cast
from bitwright.quant.core.formats import FORMATS
from bitwright.quant.core.measure import Quality, quality
from bitwright.quant.core.packing import pack, unpack
from bitwright.quant.core.scales import PLAIN, ScaleFormat

_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class CastConfiguration:
    dtype: DType
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale; None: no scales."""
    power_of_two: bool = False
    """Scales are powers of two (e8m0), rounded up."""
    scale_type: DType = f32

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype(self.dtype))
        element = f8e8m0 if self.power_of_two else scale_type(self.scale_type)
        object.__setattr__(self, "scale_type", element)
        object.__setattr__(self, "power_of_two", element == f8e8m0)
        if not self.dtype.is_float:
            raise QuantizationError(
                "a cast goes to a floating type",
                expected="f4e2m1, f8e4m3fn, f8e5m2, f16, bf16 or f32",
                found=self.dtype,
                hint="quantize_tensor quantizes to integers",
            )
        if self.block is not None and (len(self.block) != 2 or min(self.block) < 1):
            raise QuantizationError(
                "the block size is invalid", expected="(rows, columns), 1 or more", found=self.block
            )

    @staticmethod
    def plain(to: str | DType) -> CastConfiguration:
        """A cast without scales."""
        return CastConfiguration(dtype(to))

    @staticmethod
    def named(format: str) -> CastConfiguration:
        """A block format, along the last axis."""
        if format not in FORMATS:
            raise QuantizationError(
                f"no block format is named {format!r}", expected=", ".join(FORMATS), found=format
            )
        form = FORMATS[format]
        return CastConfiguration(dtype(form.element), (1, form.block), scale_type=dtype(form.scale))

    def is_noop(self, source: str | DType) -> bool:
        """Whether the cast leaves arrays of this type unchanged."""
        return self.block is None and dtype(source) == self.dtype

    def cast(self, x: Any) -> CastArray:
        """Cast an array; returns data and scales."""
        array = np.asarray(x)
        if self.block is None:
            qvalues = cast(array, self.dtype)
            return CastArray(_stored(qvalues, self.dtype), array.shape, None, PLAIN, self)
        if np.isnan(array.astype(np.float32, copy=False)).any():
            raise QuantizationError("NaN cannot be quantized", where="CastConfiguration.cast")
        peaks = self._peaks(array.astype(np.float64))
        exact = peaks / float(self.dtype.max)
        exact = np.where((exact >= _TINY) & np.isfinite(exact), exact, 1.0)
        form = ScaleFormat.fitting(self.scale_type, float(exact.max(initial=0)))
        scales = form.qvalues(exact.astype(np.float32))
        ratio = array.astype(np.float32) / self._spread(form.values(scales), array.shape)
        limit = float(self.dtype.max)
        qvalues = cast(np.clip(ratio, -limit, limit), self.dtype)
        return CastArray(_stored(qvalues, self.dtype), array.shape, scales, form, self)

    def round_trip(self, x: Any) -> Array:
        return self.cast(x).values()

    def quality(self, x: Any) -> Quality:
        return quality(x, self.round_trip(x))

    def _grid(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
        """Leading axes, rows and columns of an array."""
        rows, columns = (1, 1, *shape)[-2:]
        return shape[:-2], rows, columns

    def _peaks(self, x: Array) -> Array:
        """The largest magnitude of every block, [..., rows / block, columns / block]."""
        assert self.block is not None
        outer, rows, columns = self._grid(x.shape)
        height, width = self.block
        padded = np.zeros((*outer, -(-rows // height) * height, -(-columns // width) * width))
        finite = np.where(np.isfinite(x), np.abs(x), float(f32.max))
        padded[..., :rows, :columns] = finite.reshape(*outer, rows, columns)
        down, across = padded.shape[-2] // height, padded.shape[-1] // width
        cut = padded.reshape(*outer, down, height, across, width)
        return np.asarray(cut.max(axis=(-3, -1), initial=0))

    def _spread(self, scales: Array, shape: tuple[int, ...]) -> Array:
        assert self.block is not None
        _, rows, columns = self._grid(shape)
        wide = np.repeat(np.repeat(scales, self.block[0], axis=-2), self.block[1], axis=-1)
        return wide[..., :rows, :columns].reshape(shape)


@dataclass(frozen=True, eq=False)
class CastArray:
    """A cast array: packed data and scales."""

    data: Array
    """Packed values."""
    shape: tuple[int, ...]
    scales: Array | None
    scale_format: ScaleFormat
    configuration: CastConfiguration

    @property
    def qvalues(self) -> Array:
        """Unpacked values, in shape."""
        element = self.configuration.dtype
        if element.bits >= 8:
            return self.data.reshape(self.shape)
        flat = unpack(self.data, element.bits, math.prod(self.shape), signed=False)
        return flat.view(element.numpy).reshape(self.shape)

    def values(self) -> Array:
        """The array in f32."""
        wide = self.qvalues.astype(np.float32)
        if self.scales is None:
            return wide
        factor = self.configuration._spread(self.scale_format.values(self.scales), self.shape)
        with np.errstate(over="ignore"):  # scales are rounded up, so products may exceed f32
            return np.clip(wide * factor, f32.min, f32.max)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        second = 4 if self.scale_format.tensor_scale != 1 else 0
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes + second)


def _stored(qvalues: Array, element: DType) -> Array:
    return qvalues.reshape(-1) if element.bits >= 8 else pack(qvalues, element.bits)
