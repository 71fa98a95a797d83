"""Calibration results: the quantization parameters of each value.

    q = saturate(rne(x / scale) + zero_point)

A record maps names of values to entries. An entry holds `QuantParams` that the ops `quantize` and
`dequantize` support: linear, per tensor or per axis. The file format is JSON with exact f32 scales.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np

from bitwright.errors import CalibrationError, GraphError, QuantizationError
from bitwright.ir.container import write_atomically
from bitwright.ir.dtype import DType
from bitwright.ir.quant_params import QuantParams
from bitwright.ir.quant_types import QuantType, Scheme
from bitwright.ir.types import TensorType, ValueType, normalize_axis

Array = np.ndarray[Any, Any]
FORMAT = "bitwright calibration record 1"
RECORD_HINT = "bw.calibrate's result has a method for it: ranges.record('int8', 'minmax')."


class CalibrationEntry:
    """How one value is quantized; `params` has its scales, zero points, axis and type."""

    def __init__(
        self, axis: int | None, scales: Any, zero_points: Any, dtype: str | DType | QuantType
    ) -> None:
        scales = np.asarray(scales, np.float64)
        zeros = np.asarray(0 if zero_points is None else zero_points, np.float64)
        if np.isfinite(zeros).all() and (zeros == np.rint(zeros)).all():
            zeros = zeros.astype(np.int64)
        if axis is None and scales.size == zeros.size == 1:
            scales, zeros = scales.reshape(()), zeros.reshape(())
        self.params = QuantParams.linear(dtype, scales, zeros, axis)

    @classmethod
    def per_tensor(
        cls, scale: float, zero_point: int = 0, dtype: str | DType = "i8"
    ) -> CalibrationEntry:
        """One scale and zero point for the whole value."""
        return cls(None, scale, zero_point, dtype)

    @classmethod
    def per_channel(
        cls, axis: int, scales: Any, zero_points: Any = None, dtype: str | DType = "i8"
    ) -> CalibrationEntry:
        """One scale and zero point (default 0) for every index of `axis`."""
        return cls(axis, scales, zero_points, dtype)

    @classmethod
    def from_params(cls, params: QuantParams) -> CalibrationEntry:
        """The entry with these parameters; raises if no pair of ops supports them."""
        if not isinstance(params, QuantParams):
            raise CalibrationError(
                "this is not a QuantParams object",
                expected="QuantParams, as choose and Observer.calibrate return",
                found=type(params).__name__,
            )
        by = params.scheme
        if by not in (Scheme.symmetric, Scheme.asymmetric) or params.block or params.widths:
            raise CalibrationError(
                f"the ops do not support {by} {params.dtype} {params.granularity}",
                expected="symmetric or asymmetric, per tensor or per axis",
            )
        return cls(params.axis, params.effective_scale, params.zero_point, params.dtype)

    @property
    def axis(self) -> int | None:
        return self.params.axis

    @property
    def scales(self) -> Array:
        return self.params.scale.reshape(-1)

    @property
    def zero_points(self) -> Array:
        return self.params.zero_point.reshape(-1)

    @property
    def dtype(self) -> DType:
        return self.params.dtype.element

    def validate(self, type_: ValueType, where: str = "") -> None:
        """Raise a `CalibrationError` unless a value of this type can be quantized like this."""
        if not isinstance(type_, TensorType) or not type_.dtype.is_float or type_.dtype.bits < 16:
            raise CalibrationError(
                "only floating values are quantized",
                where=where,
                expected="f16, bf16, f32 or f64",
                found=type_,
            )
        try:
            if self.axis is None:
                self.params.validate()
                return
            at = normalize_axis(self.axis, type_.rank)
            size = type_.shape[at]
            if not isinstance(size, int):
                raise CalibrationError(
                    f"axis {self.axis} has no fixed number of channels", where=where, found=type_
                )
            self.params.validate(tuple(size if i == at else 1 for i in range(type_.rank)))
        except (GraphError, QuantizationError) as error:
            raise CalibrationError(str(error), where=where) from None

    def as_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "scales": self.scales.astype(np.float64).tolist(),
            "zero_points": self.zero_points.astype(np.float64).tolist(),
            "dtype": self.dtype.name,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CalibrationEntry) and self.params == other.params

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CalibrationEntry(**{self.as_json()!r})"


def as_entry(name: str, found: Any) -> CalibrationEntry:
    """The entry of a value, from an entry or from QuantParams."""
    if isinstance(found, CalibrationEntry):
        return found
    if isinstance(found, QuantParams):
        return CalibrationEntry.from_params(found)
    raise CalibrationError(
        f"the entry of {name!r} has the wrong type",
        expected="a CalibrationEntry or QuantParams",
        found=type(found).__name__,
        hint=RECORD_HINT,
    )


class CalibrationRecord(Mapping[str, CalibrationEntry]):
    """Entries by name of value (or path, for values of bodies), in order."""

    def __init__(self, entries: Mapping[str, CalibrationEntry | QuantParams] | None = None) -> None:
        self._entries = {name: as_entry(name, found) for name, found in (entries or {}).items()}

    def __getitem__(self, name: str) -> CalibrationEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"CalibrationRecord({self._entries!r})"

    def to_bytes(self) -> bytes:
        """JSON: `{"format": ..., "entries": {name: {axis, scales, zero_points, dtype}}}`."""
        entries = {name: entry.as_json() for name, entry in self._entries.items()}
        return json.dumps({"format": FORMAT, "entries": entries}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> CalibrationRecord:
        try:
            record = json.loads(data)
            if record["format"] != FORMAT:
                raise CalibrationError(
                    "the record has an unknown format", expected=FORMAT, found=record["format"]
                )
            entries = {name: CalibrationEntry(**row) for name, row in record["entries"].items()}
        except (
            *(ValueError, KeyError, TypeError, AttributeError),
            *(GraphError, QuantizationError),
        ) as error:
            raise CalibrationError(f"this is not a calibration record: {error}") from None
        return cls(entries)

    def save(self, path: Any) -> None:
        def write(file: IO[bytes]) -> None:
            file.write(self.to_bytes())

        write_atomically(path, write)

    @classmethod
    def load(cls, path: Any) -> CalibrationRecord:
        try:
            with open(path, "rb") as file:
                return cls.from_bytes(file.read())
        except OSError as error:
            raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from None
