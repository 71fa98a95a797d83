"""QuantizedTensor: packed quantized values, a logical shape and QuantParams.

    data        one flat array: the element's numpy type from 8 bits up, packed bytes below
    mixed       the values of each channel packed at its width; channels start at whole bytes

See `operations` for arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from bitwright import aliases
from bitwright.errors import QuantizationError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.quant_params import QuantParams, scale_shape
from bitwright.ir.quant_types import BINARY, MIXED, PerAxis
from bitwright.ir.types import normalize_axis
from bitwright.quant.calibration.statistics import real_array
from bitwright.quant.core.packing import pack, unpack
from bitwright.quant.core.quantize_values import dequantize_values, quantize_values


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Packed data with shape and parameters; `device` names the memory it is in."""

    data: Array
    shape: tuple[int, ...]
    parameters: QuantParams
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        self.parameters.validate(self.shape)
        element = storage(self.parameters)
        if self.data.dtype != element or self.data.ndim != 1:
            raise QuantizationError(
                f"the data of {self.parameters.dtype} does not fit",
                expected=f"a flat array of {element}",
                found=f"{self.data.dtype}{list(self.data.shape)}",
            )
        expected = stored_elements(self.shape, self.parameters)
        if self.data.size != expected:
            raise QuantizationError(
                f"data and shape {list(self.shape)} of {self.parameters.dtype} disagree",
                expected=f"{expected} elements",
                found=self.data.size,
            )

    @staticmethod
    def quantize(x: Any, parameters: QuantParams, strict: bool = True) -> QuantizedTensor:
        array = real_array(x)
        return QuantizedTensor.from_qvalues(quantize_values(array, parameters, strict), parameters)

    @staticmethod
    def from_qvalues(qvalues: Array, parameters: QuantParams) -> QuantizedTensor:
        """Pack quantized values of any integer or ml_dtypes type; they must be in range."""
        parameters.validate(qvalues.shape)
        kind = parameters.dtype
        if kind.is_integer and (qvalues.dtype != kind.element.numpy or kind == BINARY):
            least, most = (int(qvalues.min()), int(qvalues.max())) if qvalues.size else (0, 0)
            if least < kind.min or most > kind.max:
                raise QuantizationError(
                    "a quantized value is outside the type",
                    expected=f"{kind.min}..{kind.max} for {kind}",
                    found=f"{least}..{most}",
                )
        elif qvalues.dtype != kind.element.numpy:
            raise QuantizationError(
                "the quantized values have the wrong type", expected=kind, found=qvalues.dtype
            )
        return QuantizedTensor(_packed(qvalues, parameters), qvalues.shape, parameters)

    def __getattr__(self, name: str) -> Any:
        """Methods under the names of the last release."""
        if name not in aliases.TENSOR:
            raise AttributeError(f"a quantized tensor has no attribute {name!r}")
        return getattr(self, aliases.current(aliases.TENSOR, name, "method of a quantized tensor"))

    def qvalues(self) -> Array:
        """Unpacked values in shape (ml_dtypes for types that numpy lacks)."""
        kind, size = self.parameters.dtype, self.size
        if kind == MIXED:
            return self._mixed_qvalues()
        if kind.bits >= 8:
            return self.data.reshape(self.shape)
        signed = kind.is_signed and kind.is_integer
        flat = unpack(self.data, kind.bits, size, signed).reshape(self.shape)
        if kind.bits == 1:
            return flat
        return flat.astype(kind.element.numpy) if kind.is_integer else flat.view(kind.element.numpy)

    def _mixed_qvalues(self) -> Array:
        assert self.parameters.axis is not None
        at = normalize_axis(self.parameters.axis, len(self.shape))
        moved = (self.shape[at], *self.shape[:at], *self.shape[at + 1 :])
        each = math.prod(moved[1:])
        qvalues = np.empty((moved[0], each), np.int8)
        start = 0
        for row, width in zip(qvalues, self.parameters.widths, strict=True):
            size = (each * width + 7) // 8
            part = self.data[start : start + size]
            row[:] = part.view(np.int8) if width == 8 else unpack(part, width, each, signed=True)
            start += size
        return np.moveaxis(qvalues.reshape(moved), 0, at)

    def dequantize(self, to: str | DType = "f32") -> Array:
        return dequantize_values(self.qvalues(), self.parameters, dtype(to))

    # Size

    @property
    def dtype(self) -> Any:
        return self.parameters.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and zero points."""
        return self.data.nbytes + self.parameters.nbytes

    @property
    def compression_ratio(self) -> float:
        """Bytes of the values in f32, divided by `nbytes`."""
        return self.size * 4 / max(self.nbytes, 1)

    @property
    def saving(self) -> float:
        """The fraction of f32's bytes that is saved, counting scales and zero points."""
        return 1 - self.nbytes / max(self.size * 4, 1)

    def __repr__(self) -> str:
        kind = f"{self.parameters.scheme} {self.dtype} {self.parameters.granularity}"
        return f"QuantizedTensor({list(self.shape)}, {kind}, {self.nbytes} bytes)"

    # Movement

    def reshape(self, *shape: int | Sequence[int]) -> QuantizedTensor:
        """The same data in another shape; every scale must still apply to the same values."""
        new = _shape(shape, self.size)
        axis = self.parameters.axis
        if axis is None:
            return QuantizedTensor(self.data, new, self.parameters, self.device)
        at = normalize_axis(axis, self.ndim)
        before = math.prod(self.shape[:at])
        for i, size in enumerate(new):
            if math.prod(new[:i]) == before and size == self.shape[at]:
                shaped = partial(np.reshape, shape=scale_shape(new, i, self.parameters.block))
                parameters = moved(self.parameters, shaped, axis=i)
                return QuantizedTensor(self.data, new, parameters, self.device)
        raise QuantizationError(
            f"{list(self.shape)} quantized along axis {at} cannot have this shape",
            expected=f"a shape that keeps axis {at} whole and in its place",
            found=list(new),
            hint="Dequantize first",
        )

    def transpose(self, *axes: int | Sequence[int]) -> QuantizedTensor:
        """Permute axes (default: reverse them); moves data and scales."""
        given = axes[0] if axes and not isinstance(axes[0], int) else axes
        order = [normalize_axis(int(i), self.ndim) for i in given]  # type: ignore[arg-type]
        order = order or list(range(self.ndim))[::-1]
        if sorted(order) != list(range(self.ndim)):
            raise QuantizationError(
                "the axes are not a permutation", expected=f"{self.ndim} axes", found=order
            )
        parameters = self.parameters
        if parameters.axis is not None:
            at = normalize_axis(parameters.axis, self.ndim)
            has_blocks = bool(parameters.block)
            change = lambda array: array.transpose(order) if has_blocks else array
            parameters = moved(parameters, change, axis=order.index(at))
        return QuantizedTensor.from_qvalues(self.qvalues().transpose(order), parameters)

    def __getitem__(self, rows: slice) -> QuantizedTensor:
        """A view of rows of the first axis; the first row must start at a whole byte."""
        start, stop, step = _rows(rows, self.shape)
        each = self.size // max(self.shape[0], 1)
        per_byte = self.dtype.values_per_byte
        parameters = self._parameters_of_rows(start, stop)
        if self.dtype == MIXED or step != 1 or start * each % per_byte:
            raise QuantizationError(
                "these rows are not a view of packed data",
                expected=f"step 1, starting at a multiple of {per_byte} values",
                found=rows,
                hint="Dequantize first, or use qvalues()",
            )
        first = start * each // per_byte
        data = self.data[first : first + -(-(stop - start) * each // per_byte)]
        return QuantizedTensor(data, (stop - start, *self.shape[1:]), parameters, self.device)

    def _parameters_of_rows(self, start: int, stop: int) -> QuantParams:
        parameters = self.parameters
        if parameters.axis is None:
            return parameters
        at = normalize_axis(parameters.axis, self.ndim)
        block = parameters.block
        if block and at == 0:
            if start % block:
                raise QuantizationError(
                    "the first row is inside a block",
                    expected=f"a multiple of {block}",
                    found=start,
                )
            start, stop = start // block, -(-stop // block)
        elif at and isinstance(parameters.granularity, PerAxis):
            return parameters
        return moved(parameters, lambda array: array[start:stop])


def moved(parameters: QuantParams, change: Callable[[Array], Array], **others: Any) -> QuantParams:
    """The parameters with changed scales and zero points, and without the observed range."""
    scale, zero_point = change(parameters.scale), change(parameters.zero_point)
    others |= {"minimum": None, "maximum": None}
    return replace(parameters, scale=scale, zero_point=zero_point, **others)


def storage(parameters: QuantParams) -> np.dtype[Any]:
    """The numpy type of a tensor's data."""
    kind = parameters.dtype
    packed = kind.bits < 8 or kind == MIXED
    return np.dtype(np.uint8) if packed else kind.element.numpy


def stored_elements(shape: tuple[int, ...], parameters: QuantParams) -> int:
    """The number of elements of `storage` for a tensor of this shape."""
    count = math.prod(shape)
    if parameters.dtype == MIXED:
        each = count // max(len(parameters.widths), 1)
        return sum((each * width + 7) // 8 for width in parameters.widths)
    return -(-count // parameters.dtype.values_per_byte)


def _packed(qvalues: Array, parameters: QuantParams) -> Array:
    kind = parameters.dtype
    if kind == MIXED:
        assert parameters.axis is not None
        rows = np.moveaxis(qvalues.astype(np.int8), parameters.axis, 0)
        parts = [
            np.ascontiguousarray(row).reshape(-1).view(np.uint8) if width == 8 else pack(row, width)
            for row, width in zip(rows, parameters.widths, strict=True)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)
    if kind.bits >= 8:
        return np.ascontiguousarray(qvalues.astype(kind.element.numpy, copy=False)).reshape(-1)
    return pack(qvalues.astype(np.int8) if kind.is_integer else qvalues, kind.bits)


def _shape(given: tuple[int | Sequence[int], ...], size: int) -> tuple[int, ...]:
    parts = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    new = [int(one) for one in parts]  # type: ignore[arg-type]
    known = math.prod(one for one in new if one != -1)
    if new.count(-1) == 1 and known and size % known == 0:
        new[new.index(-1)] = size // known
    if -1 in new or math.prod(new) != size:
        raise QuantizationError("the shape does not fit", expected=f"{size} values", found=new)
    return tuple(new)


def _rows(rows: slice, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if not isinstance(rows, slice) or not shape:
        raise QuantizationError(
            "only rows can be sliced", expected="a slice of the first axis", found=rows
        )
    start, stop, step = rows.indices(shape[0])
    return start, max(stop, start), step
