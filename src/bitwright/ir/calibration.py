"""What calibration found out: how each value is to be quantized.

    q = saturate(rne(x / scale) + zero_point)

An entry has one scale for the whole value (axis None) or one for every index of an axis. A record
maps names of values to entries; its byte form is JSON, in which the f32 scales are exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from bitwright.errors import CalibrationError, GraphError
from bitwright.ir.container import write_atomically
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.types import TensorType, ValueType, normalize_axis

Array = np.ndarray[Any, Any]
# The names that other tools (numpy, PyTorch, ONNX) give to the types of codes.
_ALIASES = {f"{word}{n}": f"{word[0]}{n}" for word in ("int", "uint") for n in (2, 4, 8, 16)}
FORMAT = "bitwright calibration record 1"


def code_dtype(name: str | DType) -> DType:
    """The element type of codes with this name: `i8`, or `int8` as others call it."""
    return dtype(_ALIASES.get(name, name) if isinstance(name, str) else name)


@dataclass(frozen=True, eq=False)
class CalibrationEntry:
    """How one value is quantized. `scales` and `zero_points` are one-dimensional."""

    axis: int | None
    scales: Array
    zero_points: Array
    dtype: DType

    def __post_init__(self) -> None:
        with np.errstate(over="ignore"):
            scales = np.atleast_1d(np.asarray(self.scales, np.float64)).astype(np.float32)
        zeros = np.zeros(scales.shape) if self.zero_points is None else self.zero_points
        zeros = np.atleast_1d(np.asarray(zeros, np.float64))
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "zero_points", zeros)
        object.__setattr__(self, "dtype", code_dtype(self.dtype))

    @classmethod
    def per_tensor(
        cls, scale: float, zero_point: int = 0, dtype: str | DType = "i8"
    ) -> CalibrationEntry:
        """One scale and zero point for the whole value."""
        return cls(None, np.asarray(scale), np.asarray(zero_point), code_dtype(dtype))

    @classmethod
    def per_channel(
        cls, axis: int, scales: Any, zero_points: Any = None, dtype: str | DType = "i8"
    ) -> CalibrationEntry:
        """One scale and zero point (0 unless given) for every index of `axis`."""
        return cls(axis, scales, zero_points, code_dtype(dtype))

    def validate(self, type_: ValueType, where: str = "") -> None:
        """Raise a `CalibrationError` unless a value of this type can be quantized like this."""

        def reject(what: str, expected: object, found: object) -> CalibrationError:
            return CalibrationError(what, where=where, expected=expected, found=found)

        if not isinstance(type_, TensorType) or not type_.dtype.is_float or type_.dtype.bits < 16:
            raise reject("only floating values are quantized", "f16, bf16, f32 or f64", type_)
        is_code = self.dtype.is_integer and self.dtype.bits <= 16
        if not is_code and not (self.dtype.is_float and self.dtype.bits <= 8):
            expected = "an integer of at most 16 bits, float8 or float4"
            raise reject("no value is quantized to this type", expected, self.dtype)
        channels = self._channels(type_, where)
        if self.scales.shape != (channels,):
            what = "scales" if self.axis is None else f"scales for axis {self.axis} of {type_}"
            raise reject(f"the number of {what} is wrong", channels, list(self.scales.shape))
        if self.zero_points.shape != self.scales.shape:
            found = list(self.zero_points.shape)
            raise reject("zero points and scales differ in number", channels, found)
        good = np.isfinite(self.scales) & (self.scales > 0)
        if not good.all():
            channel = int(np.argmin(good))
            at = "" if self.axis is None else f" of channel {channel}"
            raise reject(f"scale{at} is no f32 step", "positive, finite", self.scales[channel])
        low, high = (self.dtype.min, self.dtype.max) if self.dtype.is_integer else (0, 0)
        inside = (self.zero_points >= low) & (self.zero_points <= high)
        inside &= self.zero_points == np.rint(self.zero_points)
        if not inside.all():
            found = self.zero_points[int(np.argmin(inside))]
            whole = f"a whole number from {low} to {high}"
            raise reject(f"a zero point is outside {self.dtype}", whole, found)

    def _channels(self, type_: TensorType, where: str) -> int:
        if self.axis is None:
            return 1
        try:
            size = type_.shape[normalize_axis(self.axis, type_.rank)]
        except GraphError as error:
            raise CalibrationError(str(error), where=where) from None
        if not isinstance(size, int):
            raise CalibrationError(
                f"axis {self.axis} has no fixed number of channels", where=where, found=type_
            )
        return size

    def as_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "scales": self.scales.astype(np.float64).tolist(),
            "zero_points": self.zero_points.tolist(),
            "dtype": self.dtype.name,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CalibrationEntry) and self.as_json() == other.as_json()

    __hash__ = None  # type: ignore[assignment]


class CalibrationRecord(Mapping[str, CalibrationEntry]):
    """Entries by name of value (or path, for values of bodies), in order."""

    def __init__(self, entries: Mapping[str, CalibrationEntry] | None = None) -> None:
        self._entries = dict(entries or {})
        for name, entry in self._entries.items():
            if not isinstance(entry, CalibrationEntry):
                raise CalibrationError(
                    f"the entry of {name!r} is none",
                    expected="a CalibrationEntry",
                    found=type(entry).__name__,
                    hint="Ranges of bw.calibrate give a record: ranges.record('int8', 'minmax').",
                )

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
                    "the record has another format", expected=FORMAT, found=record["format"]
                )
            entries = {name: CalibrationEntry(**row) for name, row in record["entries"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, GraphError) as error:
            raise CalibrationError(f"this is no calibration record: {error}") from None
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
