"""Quantization parameters: what turns codes into numbers, and the checks that they make sense.

    signed symmetric     scale = max(|low|, |high|) / qmax            zero_point = 0
    asymmetric           scale = (high - low) / (qmax - qmin)         low <= 0 <= high
                         zero_point = saturate(rne(qmin - low / scale))
    logarithmic          scale = max(|low|, |high|), the largest magnitude

Scales are f32. A range of zeros, or one whose scale is not a normal f32, gets scale 1 and a note.
A scale may itself be a code, of type `scale_type`, under one `tensor_scale` for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir.dtype import DType, f32
from bitwright.ir.types import normalize_axis
from bitwright.quant.calibration.statistics import Statistics, require_statistics, whole_axis
from bitwright.quant.core import types
from bitwright.quant.core.scales import PLAIN, ScaleFormat, scale_type
from bitwright.quant.core.types import MIXED, WIDTHS, Granularity, QuantType, Scheme

Array = np.ndarray[Any, Any]
_NORMAL = np.finfo(np.float32)


@dataclass(frozen=True, eq=False)
class QuantizationParameters:
    """Scales have shape () per tensor, [size] per axis, and per block the tensor's rank, with the
    number of blocks in place of the axis. Zero points have the same shape.
    """

    dtype: QuantType
    scheme: Scheme
    scale: Array
    zero_point: Array = field(default_factory=lambda: np.zeros((), np.int32))
    axis: int | None = None
    block: int = 0
    minimum: Array | None = None
    maximum: Array | None = None
    base: float = 2.0
    widths: tuple[int, ...] = ()
    scale_type: DType = f32
    tensor_scale: float = 1.0
    method: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        kind = types.get(self.dtype)

        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        keep("dtype", kind)
        keep("axis", None if self.axis is None else whole_axis(self.axis))
        keep("scheme", types.scheme(self.scheme, kind))
        keep("scale_type", scale_type(self.scale_type))
        with np.errstate(over="ignore"):  # `validate` tells of what is infinite then
            keep("scale", np.asarray(self.scale, self.scale_type.numpy))
        keep("zero_point", self._held_zero_point(np.asarray(self.zero_point)))

    def _held_zero_point(self, zero_point: Array) -> Array:
        """In whole bytes of the codes' own width; what is wrong is left for `validate` to tell."""
        if zero_point.ndim == 0:
            zero_point = np.broadcast_to(zero_point, self.scale.shape)
        if zero_point.dtype.kind == "f":
            return zero_point
        zero_point = zero_point.astype(np.int64)
        if not self.dtype.is_integer:
            return zero_point.astype(np.int32)
        container = np.dtype(
            f"{'i' if self.dtype.is_signed else 'u'}{max(self.dtype.bits, 8) // 8}"
        )
        narrow = zero_point.astype(container)
        return narrow if np.array_equal(narrow, zero_point) else zero_point

    @property
    def granularity(self) -> Granularity:
        return Granularity.of(self.axis, self.block)

    @property
    def nbytes(self) -> int:
        """Bytes that scales and zero points take."""
        second = 4 if self.scale_type != f32 and self.tensor_scale != 1 else 0
        points = self.zero_point.nbytes if self.scheme is Scheme.asymmetric else 0
        return self.scale.nbytes + second + points + len(self.widths)

    @property
    def effective_scale(self) -> Array:
        """The f32 that multiplies a code, the scale of the scales included."""
        if self.scale_type == f32:
            return self.scale
        return np.asarray(self.scale.astype(np.float32) * np.float32(self.tensor_scale), np.float32)

    def with_notes(self, *notes: str) -> QuantizationParameters:
        return replace(self, notes=(*self.notes, *notes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizationParameters):
            return NotImplemented
        same = ("dtype", "scheme", "axis", "block", "base", "widths", "scale_type", "tensor_scale")
        return all(getattr(self, name) == getattr(other, name) for name in same) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("scale", "zero_point")
        )

    __hash__ = None  # type: ignore[assignment]

    # Constructors

    @staticmethod
    def symmetric(
        dtype: str | QuantType, scale: Any, axis: int | None = None, block: int = 0
    ) -> QuantizationParameters:
        return QuantizationParameters(
            types.get(dtype), Scheme.symmetric, scale, axis=axis, block=block
        ).validate()

    @staticmethod
    def asymmetric(
        dtype: str | QuantType, scale: Any, zero_point: Any, axis: int | None = None, block: int = 0
    ) -> QuantizationParameters:
        return QuantizationParameters(
            types.get(dtype), Scheme.asymmetric, scale, zero_point, axis, block
        ).validate()

    @staticmethod
    def logarithmic(
        dtype: str | QuantType,
        scale: Any,
        base: float = 2.0,
        axis: int | None = None,
        block: int = 0,
    ) -> QuantizationParameters:
        return QuantizationParameters(
            types.get(dtype), Scheme.logarithmic, scale, axis=axis, block=block, base=base
        ).validate()

    @staticmethod
    def binary(scale: Any, axis: int | None = None, block: int = 0) -> QuantizationParameters:
        return QuantizationParameters(
            types.BINARY, Scheme.binary, scale, axis=axis, block=block
        ).validate()

    @staticmethod
    def mixed(scale: Any, widths: Sequence[int], axis: int) -> QuantizationParameters:
        """Signed codes with a width of 2, 4 or 8 bits for each index of an axis."""
        return QuantizationParameters(
            MIXED, Scheme.symmetric, scale, axis=axis, widths=tuple(widths)
        ).validate()

    @staticmethod
    def from_range(
        dtype: str | QuantType,
        low: Any,
        high: Any,
        scheme: str | Scheme | None = None,
        axis: int | None = None,
        block: int = 0,
        base: float = 2.0,
        widths: Sequence[int] = (),
        scales: ScaleFormat | None = None,
    ) -> QuantizationParameters:
        """Parameters whose codes span low..high (arrays for more than one scale)."""
        kind = types.get(dtype)
        by = types.scheme(scheme, kind)
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        _check_range(low, high)
        require_qvalues_for(kind, by, low)
        scales = scales or PLAIN
        scale, zero_point, fault = scale_and_zero_point(kind, by, low, high, widths, scales)
        notes = (_degenerate_note(fault),) if fault.any() else ()
        return QuantizationParameters(
            kind,
            by,
            scales.qvalues(scale),
            zero_point.astype(np.int32),
            axis,
            block,
            low,
            high,
            base=base,
            widths=tuple(widths),
            scale_type=scales.element,
            tensor_scale=scales.tensor_scale,
            notes=notes,
        ).validate()

    @staticmethod
    def from_statistics(
        statistics: Statistics,
        dtype: str | QuantType,
        scheme: str | Scheme | None = None,
        base: float = 2.0,
        widths: Sequence[int] = (),
    ) -> QuantizationParameters:
        """Codes that span the whole observed range; `choose` has the other methods."""
        require_statistics(statistics)
        low, high = observed_range(statistics)
        found = QuantizationParameters.from_range(
            dtype, low, high, scheme, statistics.axis, base=base, widths=widths
        )
        return replace(found, method="minmax")

    # Checks

    def validate(self, shape: tuple[int, ...] | None = None) -> QuantizationParameters:
        """Itself, or the first fault as an error; with a shape, against that tensor too."""
        types.check(self.dtype, self.scheme, self.granularity)
        if self.minimum is not None and self.maximum is not None:
            _check_range(np.asarray(self.minimum), np.asarray(self.maximum))
        self._check_scale()
        self._check_zero_point()
        self._check_block()
        if self.scheme is Scheme.logarithmic and self.base not in (2.0, 2.0**0.5):
            raise QuantizationError("the base is not known", expected="2 or √2", found=self.base)
        if self.dtype == MIXED and any(width not in WIDTHS for width in self.widths):
            raise QuantizationError("a width is not known", expected="2, 4 or 8", found=self.widths)
        require_widths(self.dtype, self.widths, self.scale.size)
        if shape is not None:
            self._check_shape(shape)
        return self

    def _check_scale(self) -> None:
        scale = self.effective_scale
        if not np.isfinite(scale).all():
            raise QuantizationError(
                "a scale is not finite", found=_first(scale, ~np.isfinite(scale))
            )
        if not (scale > 0).all():
            raise QuantizationError("a scale is not positive", found=_first(scale, ~(scale > 0)))

    def _check_zero_point(self) -> None:
        zero_point = self.zero_point
        if zero_point.dtype.kind == "f":
            raise QuantizationError("a zero point is not a whole number", found=zero_point.dtype)
        if zero_point.shape != self.scale.shape:
            raise QuantizationError(
                "scales and zero points differ in shape",
                expected=list(self.scale.shape),
                found=list(zero_point.shape),
            )
        if self.scheme is not Scheme.asymmetric and zero_point.any():
            raise QuantizationError(
                f"a {self.scheme} scheme has no zero point",
                expected=0,
                found=_first(zero_point, zero_point != 0),
            )
        outside = (zero_point < self.dtype.min) | (zero_point > self.dtype.max)
        if outside.any():
            raise QuantizationError(
                "a zero point is outside the type",
                expected=f"{self.dtype.min}..{self.dtype.max} for {self.dtype}",
                found=_first(zero_point, outside),
            )

    def _check_block(self) -> None:
        rank = self.scale.ndim
        if self.block < 0 or (self.block and self.axis is None):
            raise QuantizationError(
                "the block does not fit",
                expected="a size of at least 1, along an axis",
                found=f"{self.block} along {self.axis}",
            )
        if self.axis is None and self.scale.size != 1:
            raise QuantizationError(
                "a tensor has one scale; an axis is missing", expected=1, found=self.scale.size
            )
        if self.axis is not None and not self.block and rank != 1:
            raise QuantizationError(
                "scales per axis have one axis; or the block size is missing",
                expected="scales[size]",
                found=list(self.scale.shape),
            )

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if self.axis is None:
            return
        if not -len(shape) <= self.axis < len(shape):
            raise QuantizationError(
                "the axis is out of range", expected=f"rank above {self.axis}", found=list(shape)
            )
        expected = scale_shape(shape, self.axis, self.block)
        if self.scale.shape != expected:
            raise QuantizationError(
                f"the scales do not match axis {self.axis} of {list(shape)}",
                expected=list(expected),
                found=list(self.scale.shape),
            )


def scale_shape(shape: tuple[int, ...], axis: int | None, block: int) -> tuple[int, ...]:
    """The shape of the scales of a tensor of this shape."""
    if axis is None:
        return ()
    at = normalize_axis(axis, len(shape))
    if not block:
        return (shape[at],)
    return (*shape[:at], -(-shape[at] // block), *shape[at + 1 :])


def scale_and_zero_point(
    kind: QuantType,
    by: Scheme,
    low: Array,
    high: Array,
    widths: Sequence[int] = (),
    scales: ScaleFormat = PLAIN,
) -> tuple[Array, Array, Array]:
    """For a range, widened to hold 0: the scale in f32 as it is stored, the zero point in f64, and
    where the scale is not a normal f32, so that it is 1 and the zero point 0.
    """
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if by is Scheme.asymmetric:
        exact = high / (kind.max - kind.min) - low / (kind.max - kind.min)
    else:
        exact = np.maximum(-low, high)
    if by is Scheme.symmetric:
        exact = exact / (2.0 ** (np.asarray(widths) - 1) - 1 if kind == MIXED else float(kind.max))
    fault = np.asarray(~((exact >= _NORMAL.tiny) & (exact <= _NORMAL.max)))
    scale = scales.rounded(np.where(fault, 1.0, exact).astype(np.float32))
    if by is not Scheme.asymmetric:
        return scale, np.zeros(scale.shape), fault
    with np.errstate(over="ignore"):
        zero_point = np.clip(np.rint(kind.min - low / scale), kind.min, kind.max)
    return scale, np.where(fault, 0.0, zero_point), fault


def observed_range(statistics: Statistics) -> tuple[Array, Array]:
    """Minimum and maximum, in the shape of the scales."""
    if statistics.is_empty:
        raise QuantizationError(
            "nothing was observed", hint="Add at least one array with a finite value"
        )
    seen = statistics.count > 0
    low = np.where(seen, statistics.minimum, 0.0)
    high = np.where(seen, statistics.maximum, 0.0)
    widest = np.maximum(-low, high)
    if (widest > _NORMAL.max).any():
        raise QuantizationError(
            "the observed values are beyond f32, which quantizing computes in",
            expected=f"magnitudes up to {_NORMAL.max:.4g}",
            found=_first(widest, widest > _NORMAL.max),
            hint="Clip or rescale the data",
        )
    return (low[0], high[0]) if statistics.axis is None else (low, high)


def require_qvalues_for(kind: QuantType, by: Scheme, low: Any) -> None:
    """Raise if there are negative values and no codes for them."""
    if by is not Scheme.asymmetric and not kind.is_signed and np.min(low, initial=0) < 0:
        raise QuantizationError(
            f"{by} {kind} has no codes for negative values",
            expected="a minimum of 0 or more",
            found=f"{np.min(low):g}",
            hint="Take the asymmetric scheme, or a signed type",
        )


def require_widths(kind: QuantType, widths: Sequence[int], channels: int) -> None:
    """Raise unless the channels of `mixed` have a width each."""
    if kind == MIXED and len(widths) != channels:
        raise QuantizationError(
            "the widths do not match the channels",
            expected=f"{channels}, each 2, 4 or 8",
            found=len(widths) or "none",
        )


def _check_range(low: Array, high: Array) -> None:
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise QuantizationError("the range is not finite", found=f"{low.min()}..{high.max()}")
    if (low > high).any():
        raise QuantizationError(
            "the minimum is above the maximum",
            expected="minimum <= maximum",
            found=f"{_first(low, low > high)} > {_first(high, low > high)}",
        )


def _degenerate_note(fault: Array) -> str:
    if fault.ndim == 0:
        return "no usable range (all zero, or too small or large for f32): scale 1"
    return f"no usable range in {int(fault.sum())} of {fault.size} channels: scale 1 there"


def _first(values: Array, where: Array) -> str:
    return str(np.asarray(values)[np.asarray(where)].flat[0])
