"""Quantize arrays: `quantize_tensor`, and `Observer` for streams of arrays.

A tensor is split into rows, one for each scale: the tensor, an index of an axis, or a block. Short
rows are scored value by value, long rows by their histogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from bitwright.errors import QuantizationError
from bitwright.ir import quant_params, quant_types
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import MIXED, QuantType, Scheme
from bitwright.ir.types import normalize_axis
from bitwright.quant.calibration.methods import Method, choose, method_of, select
from bitwright.quant.calibration.mixed_widths import assign_widths
from bitwright.quant.calibration.scoring import Distribution
from bitwright.quant.calibration.search import RangeProblem
from bitwright.quant.calibration.statistics import Statistics, real_array
from bitwright.quant.core.formats import FORMATS
from bitwright.quant.core.quantize_values import as_f32, dequantize_values, quantize_values
from bitwright.quant.core.scales import ScaleFormat
from bitwright.quant.tensor.tensor import QuantizedTensor

_FEW = 4096  # rows up to this length are scored value by value
_CHUNK = 1 << 15  # values scored at a time


class Observer:
    """Accumulates statistics of arrays and computes parameters from them."""

    def __init__(self, axis: int | None = None, nonfinite: str = "error") -> None:
        if nonfinite not in ("error", "ignore"):
            raise QuantizationError(
                "'nonfinite' has an unknown value", expected="'error' or 'ignore'", found=nonfinite
            )
        self.statistics = Statistics(axis)
        self.nonfinite = nonfinite
        self.arrays = 0

    def add(self, array: Any) -> Self:
        """Observe one array; returns itself.

        NaN and infinities are skipped and counted, or raise an error that leaves the statistics
        unchanged.
        """
        before, statistics = self.statistics.copy(), self.statistics
        try:
            statistics.add(array)
            found = statistics.nan + statistics.infinite - before.nan - before.infinite
            if found and self.nonfinite == "error":
                raise QuantizationError(
                    f"array {self.arrays + 1} holds values that are not finite",
                    found=f"{found} of {np.size(array)}",
                    hint="nonfinite='ignore' skips them",
                )
        except BaseException:
            statistics.restore(before)
            raise
        self.arrays += 1
        return self

    def merge(self, other: Observer) -> Self:
        if not isinstance(other, Observer):
            raise QuantizationError(
                "this is not an observer", expected="Observer", found=type(other).__name__
            )
        self.statistics.merge(other.statistics)
        self.arrays += other.arrays
        return self

    def clear(self) -> None:
        self.statistics.clear()
        self.arrays = 0

    def calibrate(
        self,
        dtype: str | QuantType,
        method: Method = "minmax",
        scheme: str | Scheme | None = None,
        **options: Any,
    ) -> QuantParams:
        """Parameters for the observed values."""
        found = choose(self.statistics, dtype, scheme, method, **options)
        left_out = self.statistics.nan + self.statistics.infinite
        return found.with_notes(f"{left_out} values were not finite") if left_out else found


def quantize_tensor(
    x: Any,
    dtype: str | QuantType = "int8",
    method: Method = "adaptive",
    *,
    scheme: str | Scheme | None = None,
    axis: int | None = None,
    block: int | None = None,
    base: float = 2.0,
    widths: Sequence[int] = (),
    bits: float = 4.0,
    scale_type: str | DType | None = None,
    strict: bool = True,
) -> QuantizedTensor:
    """Quantize an array with parameters chosen for it.

    `dtype` is a type or a block format ("mxfp4", "nvfp4"...); `mixed` takes the `widths` of the
    channels, or their average in `bits`.
    """
    array = real_array(x)
    if not isinstance(dtype, QuantType) and dtype in FORMATS:
        form = FORMATS[dtype]
        dtype, scale_type = form.element, scale_type or form.scale
        axis, block = -1 if axis is None else axis, block or form.block
    options: dict[str, Any] = {"scheme": scheme, "axis": axis, "block": block or 0, "base": base}
    options |= {"widths": widths, "bits": bits, "scale_element": scale_type, "strict": strict}
    return QuantizedTensor.quantize(array, parameters_for(array, dtype, method, **options), strict)


def parameters_for(
    x: Array,
    dtype: str | QuantType,
    method: Method = "adaptive",
    *,
    scheme: str | Scheme | None = None,
    axis: int | None = None,
    block: int = 0,
    base: float = 2.0,
    widths: Sequence[int] = (),
    bits: float = 4.0,
    scale_element: str | DType | None = None,
    strict: bool = True,
) -> QuantParams:
    """Parameters chosen for the values of this array."""
    kind = quant_types.get(dtype)
    by = quant_types.scheme(scheme, kind)
    axis = None if axis is None else quant_params.whole_axis(axis)
    if block and axis is None:
        raise QuantizationError(
            "a block size needs an axis", expected="an axis", found=f"block {block}"
        )
    if block < 0:
        raise QuantizationError("the block size is out of range", expected="1 or more", found=block)
    quant_types.check(kind, by, quant_types.granularity(axis, block))
    if axis is not None:
        if not -x.ndim <= axis < x.ndim:
            raise QuantizationError(
                f"axis {axis} is out of range",
                expected=f"an axis of {list(x.shape)}" if x.ndim else "no axis, for a scalar",
            )
        axis = normalize_axis(axis, x.ndim)
    single = as_f32(x, strict)
    if x.dtype == np.float64 and not strict:
        x = np.where(np.isinf(single), single, x)
    rows = rows_of(x, axis, block)
    if kind == MIXED and not widths:
        widths = assign_widths(rows, bits)
    quant_params.require_widths(kind, widths, len(rows))
    chooser = _Chooser(rows, x.shape, kind, by, axis, block, base, tuple(widths))
    return chooser.choose(method, quant_params.scale_type(scale_element))


def rows_of(x: Array, axis: int | None, block: int) -> Array:
    """The values of each scale, [scales, n]; NaN for padding and non-finite values."""
    if x.dtype != np.float64:
        x = x.astype(np.float32, copy=False)
    if not np.isfinite(x).all():
        x = np.where(np.isfinite(x), x, np.nan).astype(x.dtype)
    if axis is None:
        return x.reshape(1, -1)
    if not block:
        rest = math.prod(x.shape[:axis]) * math.prod(x.shape[axis + 1 :])
        return np.moveaxis(x, axis, 0).reshape(x.shape[axis], rest)
    last = np.moveaxis(x, axis, -1)
    short = -last.shape[-1] % block
    if short:
        last = np.concatenate([last, np.full((*last.shape[:-1], short), np.nan, x.dtype)], -1)
    return last.reshape(-1, block)


@dataclass(frozen=True)
class _Chooser:
    """Chooses ranges for rows, in groups that fit a cache, and joins the results."""

    rows: Array
    shape: tuple[int, ...]
    kind: QuantType
    by: Scheme
    axis: int | None
    block: int
    base: float
    widths: tuple[int, ...]

    def choose(self, method: Method, element: DType) -> QuantParams:
        method = method_of(method)
        low, high = self._observed()
        quant_params.require_negative_values(self.kind, self.by, low)
        largest = quant_params.scale_and_zero_point(self.kind, self.by, low, high, self.widths)[0]
        scales = ScaleFormat.fitting(element, float(largest.max(initial=0)))
        number, size = self.rows.shape
        group = max(1, _CHUNK // max(size, 1))
        found = [
            self._group(slice(start, start + group), method, scales)
            for start in range(0, number, group)
        ]
        bottom = np.concatenate([one.minimum for one in found]) if found else low
        top = np.concatenate([one.maximum for one in found]) if found else high
        form = self.by, self.axis, self.block, self.base, self.widths, scales.rounded
        parameters = QuantParams.from_range(
            self.kind, self._placed(bottom), self._placed(top), *form
        )
        names = sorted({one.method for one in found}) or [str(method)]
        notes = found[0].notes if len(found) == 1 else ()
        return replace(
            scales.store(parameters),
            minimum=self._placed(low),
            maximum=self._placed(high),
            method=", ".join(names),
            notes=(*parameters.notes, *notes),
        )

    def _observed(self) -> tuple[Array, Array]:
        valid = ~np.isnan(self.rows)
        low = np.min(self.rows, 1, initial=np.inf, where=valid)
        high = np.max(self.rows, 1, initial=-np.inf, where=valid)
        empty = low > high
        return np.where(empty, 0.0, low), np.where(empty, 0.0, high)

    def _group(self, own: slice, method: Method, scales: ScaleFormat) -> QuantParams:
        """Per-row parameters of one group, with the method's name and notes."""
        rows, widths = self.rows[own], self.widths[own]

        def statistics() -> Statistics:
            found = Statistics(axis=0, bins=2048 if len(rows) == 1 else None)
            found.add(rows)
            return found

        few = rows.shape[1] <= _FEW
        data = Distribution.of_rows(rows) if few else Distribution.of_statistics(statistics())
        problem = RangeProblem(data, self.kind, self.by, self.base, widths, scales)

        def finish(bounds: Any, name: str) -> QuantParams:
            low, high = (np.asarray(side, np.float64) for side in bounds)
            made = QuantParams.from_range(
                self.kind, low, high, self.by, 0, 0, self.base, widths, scales.rounded
            )
            return replace(scales.store(made), method=name, notes=())

        def measured(parameters: QuantParams) -> float:
            valid = np.nan_to_num(rows)
            back = dequantize_values(quantize_values(valid, parameters), parameters)
            return float(((back.astype(np.float64) - valid) ** 2).sum())

        return select(problem, statistics, method, finish, None if few else measured)

    def _placed(self, values: Array) -> Array:
        """One value per row, reshaped to the shape of the scales."""
        if self.axis is None:
            return values.reshape(())
        shape = quant_params.scale_shape(self.shape, self.axis, self.block)
        if not self.block:
            return values.reshape(shape)
        moved = (*shape[: self.axis], *shape[self.axis + 1 :], shape[self.axis])
        return np.moveaxis(values.reshape(moved), -1, self.axis)
