"""QuantParams: scale, zero point, granularity, element type and range of quantized values.

    signed symmetric     scale = max(|low|, |high|) / qmax            zero_point = 0
    asymmetric           scale = (high - low) / (qmax - qmin)         low <= 0 <= high
                         zero_point = saturate(rne(qmin - low / scale))
    logarithmic          scale = max(|low|, |high|), the largest magnitude

Scales are f32. An all-zero range, or one whose scale is not a normal f32, gets scale 1 and a note.
Scales may be stored in a narrower type, `scale_type`, multiplied by one f32 `tensor_scale`.
Calibration (`ir.calibration`, `quant.calibration.methods`), the tensor API (`quant.tensor`) and
`passes.insert_q_dq` all use this class.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir import quant_types
from bitwright.ir.dtype import DType, bf16, dtype, f8e4m3fn, f8e8m0, f16, f32, u8
from bitwright.ir.quant_types import MIXED, WIDTHS, Granularity, QuantType, Scheme
from bitwright.ir.types import normalize_axis

Array = np.ndarray[Any, Any]
SCALE_TYPES = (f32, f16, bf16, f8e8m0, f8e4m3fn, u8)
_NORMAL = np.finfo(np.float32)


def _as_f32(scale: Array) -> Array:
    return np.asarray(scale, np.float32)


@runtime_checkable
class ObservedValues(Protocol):
    """Statistics of a tensor, or of each index of an axis (`quant.calibration.statistics`)."""

    axis: int | None

    def observed_range(self) -> tuple[Array, Array]:
        """Minimum and maximum, in the shape of the scales."""


@dataclass(frozen=True, eq=False)
class QuantParams:
    """Scales have shape () per tensor and [size] per axis. Per group they have the tensor's rank,
    with the number of groups in place of the axis. Zero points have the same shape.
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
        kind = quant_types.get(self.dtype)

        def set_(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        set_("dtype", kind)
        set_("axis", None if self.axis is None else whole_axis(self.axis))
        set_("scheme", quant_types.scheme(self.scheme, kind))
        set_("scale_type", scale_type(self.scale_type))
        with np.errstate(over="ignore"):  # `validate` rejects infinite scales
            set_("scale", np.asarray(self.scale, self.scale_type.numpy))
        set_("zero_point", self._converted_zero_point(np.asarray(self.zero_point)))

    def _converted_zero_point(self, zero_point: Array) -> Array:
        """Zero points in the integer type of the quantized values; `validate` rejects others."""
        if zero_point.ndim == 0:
            zero_point = np.broadcast_to(zero_point, self.scale.shape)
        if zero_point.dtype.kind == "f":
            return zero_point
        zero_point = zero_point.astype(np.int64)
        if not self.dtype.is_integer:
            return zero_point.astype(np.int32)
        sign = "i" if self.dtype.is_signed else "u"
        narrow = zero_point.astype(f"{sign}{max(self.dtype.bits, 8) // 8}")
        return narrow if np.array_equal(narrow, zero_point) else zero_point

    @property
    def granularity(self) -> Granularity:
        return quant_types.granularity(self.axis, self.block)

    @property
    def nbytes(self) -> int:
        """Bytes of scales and zero points."""
        second = 4 if self.scale_type != f32 and self.tensor_scale != 1 else 0
        points = self.zero_point.nbytes if self.scheme is Scheme.asymmetric else 0
        return self.scale.nbytes + second + points + len(self.widths)

    @property
    def effective_scale(self) -> Array:
        """The f32 scales, with `tensor_scale` multiplied in."""
        if self.scale_type == f32:
            return self.scale
        return np.asarray(self.scale.astype(np.float32) * np.float32(self.tensor_scale), np.float32)

    def with_notes(self, *notes: str) -> QuantParams:
        return replace(self, notes=(*self.notes, *notes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantParams):
            return NotImplemented
        same = ("dtype", "scheme", "axis", "block", "base", "widths", "scale_type", "tensor_scale")
        return all(getattr(self, name) == getattr(other, name) for name in same) and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("scale", "zero_point")
        )

    __hash__ = None  # type: ignore[assignment]

    # Constructors

    @staticmethod
    def linear(
        dtype: str | QuantType | DType,
        scale: Any,
        zero_point: Any = 0,
        axis: int | None = None,
        block: int = 0,
    ) -> QuantParams:
        """Symmetric for signed types with zero points 0, else asymmetric; not validated."""
        kind = quant_types.get(dtype)
        is_asymmetric = np.any(zero_point) or not kind.is_signed
        by = Scheme.asymmetric if is_asymmetric else Scheme.symmetric
        return QuantParams(kind, by, scale, zero_point, axis, block)

    @staticmethod
    def symmetric(
        dtype: str | QuantType, scale: Any, axis: int | None = None, block: int = 0
    ) -> QuantParams:
        return _validated(dtype, Scheme.symmetric, scale, axis=axis, block=block)

    @staticmethod
    def asymmetric(
        dtype: str | QuantType, scale: Any, zero_point: Any, axis: int | None = None, block: int = 0
    ) -> QuantParams:
        return _validated(dtype, Scheme.asymmetric, scale, zero_point, axis, block)

    @staticmethod
    def logarithmic(
        dtype: str | QuantType,
        scale: Any,
        base: float = 2.0,
        axis: int | None = None,
        block: int = 0,
    ) -> QuantParams:
        return _validated(dtype, Scheme.logarithmic, scale, axis=axis, block=block, base=base)

    @staticmethod
    def binary(scale: Any, axis: int | None = None, block: int = 0) -> QuantParams:
        return _validated(quant_types.BINARY, Scheme.binary, scale, axis=axis, block=block)

    @staticmethod
    def mixed(scale: Any, widths: Sequence[int], axis: int) -> QuantParams:
        """Signed values with a width of 2, 4 or 8 bits for each index of an axis."""
        return _validated(MIXED, Scheme.symmetric, scale, axis=axis, widths=tuple(widths))

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
        round_scale: Callable[[Array], Array] = _as_f32,
    ) -> QuantParams:
        """Parameters whose quantized values span low..high (arrays for more than one scale)."""
        kind = quant_types.get(dtype)
        by = quant_types.scheme(scheme, kind)
        low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        _check_range(low, high)
        require_negative_values(kind, by, low)
        scale, zero_point, fault = scale_and_zero_point(kind, by, low, high, widths, round_scale)
        notes = (_degenerate_note(fault),) if fault.any() else ()
        points, rest = zero_point.astype(np.int32), {"widths": tuple(widths), "notes": notes}
        return _validated(kind, by, scale, points, axis, block, low, high, base=base, **rest)

    @staticmethod
    def from_statistics(
        statistics: ObservedValues,
        dtype: str | QuantType,
        scheme: str | Scheme | None = None,
        base: float = 2.0,
        widths: Sequence[int] = (),
    ) -> QuantParams:
        """Parameters that span the observed range; `choose` has the other methods."""
        require_statistics(statistics)
        low, high = statistics.observed_range()
        found = QuantParams.from_range(
            dtype, low, high, scheme, statistics.axis, base=base, widths=widths
        )
        return replace(found, method="minmax")

    # Checks

    def validate(self, shape: tuple[int, ...] | None = None) -> QuantParams:
        """Return itself, or raise for the first fault; `shape` is that of the quantized tensor."""
        quant_types.check(self.dtype, self.scheme, self.granularity)
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
        for is_good, what in ((np.isfinite(scale), "finite"), (scale > 0, "positive")):
            if not is_good.all():
                at = "" if scale.size == 1 else f" at index {int(np.argmin(is_good))}"
                raise QuantizationError(f"a scale{at} is not {what}", found=_first(scale, ~is_good))

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
        if self.axis is not None and not self.block and self.scale.ndim != 1:
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


def _validated(
    dtype: str | QuantType, by: Scheme, scale: Any, *rest: Any, **fields: Any
) -> QuantParams:
    return QuantParams(quant_types.get(dtype), by, scale, *rest, **fields).validate()


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
    round_scale: Callable[[Array], Array] = _as_f32,
) -> tuple[Array, Array, Array]:
    """Scale (f32, after `round_scale`), zero point (f64) and a mask of degenerate ranges.

    The range is widened to contain 0. Where the scale is not a normal f32 it becomes 1, and the
    zero point 0.
    """
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if by is Scheme.asymmetric:
        exact = high / (kind.max - kind.min) - low / (kind.max - kind.min)
    else:
        exact = np.maximum(-low, high)
    if by is Scheme.symmetric:
        exact = exact / (2.0 ** (np.asarray(widths) - 1) - 1 if kind == MIXED else float(kind.max))
    fault = np.asarray(~((exact >= _NORMAL.tiny) & (exact <= _NORMAL.max)))
    scale = round_scale(np.where(fault, 1.0, exact).astype(np.float32))
    if by is not Scheme.asymmetric:
        return scale, np.zeros(scale.shape), fault
    with np.errstate(over="ignore"):
        zero_point = np.clip(np.rint(kind.min - low / scale), kind.min, kind.max)
    return scale, np.where(fault, 0.0, zero_point), fault


def scale_type(name: str | DType | None) -> DType:
    """A type that scales can have; None is f32."""
    found = f32 if name is None else dtype(name)
    if found not in SCALE_TYPES:
        raise QuantizationError(
            "scales do not have this type", expected=", ".join(map(str, SCALE_TYPES)), found=found
        )
    return found


def whole_axis(axis: Any) -> int:
    """The axis as an int; raises for anything but a whole number."""
    try:
        if not isinstance(axis, bool):
            return operator.index(axis)
    except TypeError:
        pass
    raise QuantizationError("an axis is not a whole number", found=repr(axis))


def require_statistics(found: Any) -> None:
    """Raise unless this is a `Statistics`."""
    if not isinstance(found, ObservedValues):
        raise QuantizationError(
            "this is not a Statistics object",
            expected="a Statistics: `Observer.statistics`, or a value of bw.calibrate's result",
            found=type(found).__name__,
        )


def require_negative_values(kind: QuantType, by: Scheme, low: Any) -> None:
    """Raise if there are negative values and the type cannot represent them."""
    if by is not Scheme.asymmetric and not kind.is_signed and np.min(low, initial=0) < 0:
        raise QuantizationError(
            f"{by} {kind} cannot represent negative values",
            expected="a minimum of 0 or more",
            found=f"{np.min(low):g}",
            hint="Use the asymmetric scheme, or a signed type",
        )


def require_widths(kind: QuantType, widths: Sequence[int], channels: int) -> None:
    """Raise unless `mixed` has one width for each channel."""
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
