"""Ranges: statistics by name of value, the result of `bw.calibrate`, with a file format.

8 bytes  magic "BWRANGE1"
8 bytes  length of the index, little endian
index    JSON: {"batches": ..., "values": {name: [offset, length]}, "same": {name: name}}
then the serialized statistics, at offsets from the end of the index
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from bitwright.errors import CalibrationError, ParseError
from bitwright.ir.calibration import CalibrationRecord
from bitwright.ir.container import write_atomically
from bitwright.ir.graph import nearest
from bitwright.ir.quant_types import QuantType, Scheme
from bitwright.quant.calibration.methods import Method
from bitwright.quant.calibration.record import make_record
from bitwright.quant.calibration.statistics import Statistics

MAGIC = b"BWRANGE1"


class Ranges(Mapping[str, Statistics]):
    """Statistics by name, in order; `same` maps values that only move data to their source."""

    def __init__(
        self,
        statistics: Mapping[str, Statistics] | None = None,
        batches: int = 0,
        same: Mapping[str, str] | None = None,
    ) -> None:
        self.statistics, self.batches = dict(statistics or {}), batches
        self.same = dict(same or {})
        self.remarks: list[str] = []
        """Notes of the run on its data; not saved."""

    def __getitem__(self, name: str) -> Statistics:
        source = self.same.get(name, name)
        if source not in self.statistics:
            raise KeyError(f"no statistics of {name!r}. {nearest(name, self)}".rstrip())
        return self.statistics[source]

    def __contains__(self, name: object) -> bool:
        return name in self.statistics or name in self.same

    def __iter__(self) -> Iterator[str]:
        yield from self.statistics
        yield from self.same

    def __len__(self) -> int:
        return len(self.statistics) + len(self.same)

    def __repr__(self) -> str:
        return f"<ranges of {len(self)} values from {self.batches} batches>"

    @property
    def nbytes(self) -> int:
        """Memory of the statistics; independent of the number of batches."""
        return sum(found.nbytes for found in self.statistics.values())

    def merge(self, other: Ranges) -> Ranges:
        """Add the statistics of another run with the same values; returns itself."""
        if not isinstance(other, Ranges):
            raise CalibrationError(
                "this is not a Ranges object",
                expected="Ranges, as bw.calibrate returns",
                found=type(other).__name__,
            )
        if set(self.statistics) != set(other.statistics):
            differing = sorted(set(self.statistics) ^ set(other.statistics))
            raise CalibrationError(
                "the statistics are of different values", found=", ".join(map(repr, differing[:5]))
            )
        for name, found in self.statistics.items():
            found.merge(other.statistics[name])
        self.batches += other.batches
        return self

    def clear(self) -> None:
        for found in self.statistics.values():
            found.clear()
        self.batches = 0

    def notes(self) -> list[str]:
        """Notes on the statistics: skipped values, all-zero values, too few batches."""
        found = list(self.remarks)
        for name, one in self.statistics.items():
            if one.nan or one.infinite:
                found.append(f"{name}: {one.nan} NaN and {one.infinite} infinities skipped")
            if one.is_empty and self.batches:
                found.append(f"{name}: the data never reached it")
            elif not one.max_abs.any() and self.batches:
                found.append(f"{name}: all values are zero")
            elif one.count.sum() > 1 and one.minimum.min() == one.maximum.max():
                found.append(f"{name}: all values are {one.minimum.min():g}")
        if self.batches == 1:
            found.append("only one batch was seen: ranges may be too narrow for other data")
        return found

    def rows(self) -> list[dict[str, Any]]:
        """One row per value: count, range, mean."""
        return [
            {
                "value": name,
                "count": int(one.count.sum()),
                "min": None if one.is_empty else float(one.minimum.min()),
                "max": None if one.is_empty else float(one.maximum.max()),
                "mean": None if one.is_empty else float(one.total.sum() / one.count.sum()),
                "nonfinite": one.nan + one.infinite,
            }
            for name, one in self.statistics.items()
        ]

    def record(
        self,
        dtype: str | QuantType = "int8",
        method: Method = "minmax",
        *,
        scheme: str | Scheme | None = None,
        values: Iterable[str] | None = None,
    ) -> CalibrationRecord:
        """Quantization parameters of all values (or of `values`), for `quant.insert_q_dq`.

        A value with statistics along an axis gets a scale for each channel; all-zero channels get
        scale 1. Values that only move data are skipped unless they are named. Values that the data
        never reached are skipped with a warning. `bw.quantize` does not use records, because it
        measures errors at the products.
        """
        return make_record(self, dtype, method, scheme, values)

    # file format

    def to_bytes(self) -> bytes:
        blobs, places, offset = [], {}, 0
        for name, one in self.statistics.items():
            blobs.append(one.to_bytes())
            places[name] = [offset, len(blobs[-1])]
            offset += len(blobs[-1])
        header = {"batches": self.batches, "values": places, "same": self.same}
        index = json.dumps(header).encode()
        return b"".join([MAGIC, len(index).to_bytes(8, "little"), index, *blobs])

    @classmethod
    def from_bytes(cls, data: bytes) -> Ranges:
        if data[:8] != MAGIC:
            raise ParseError("this is not a file of statistics", hint="Its first bytes differ.")
        start = 16 + int.from_bytes(data[8:16], "little")
        try:
            index = json.loads(data[16:start])
            found = {
                str(name): Statistics.from_bytes(_part(data, start + offset, length))
                for name, (offset, length) in index["values"].items()
            }
            same = {str(name): str(source) for name, source in index["same"].items()}
            return cls(found, int(index["batches"]), same)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParseError(f"the file of statistics is damaged: {error}") from None

    def save(self, path: str | Path) -> None:
        data = self.to_bytes()

        def write(file: IO[bytes]) -> None:
            file.write(data)

        write_atomically(path, write)

    @classmethod
    def load(cls, path: str | Path) -> Ranges:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise CalibrationError(f"cannot read {path}: {error.strerror or error}") from None
        return cls.from_bytes(data)


def _part(data: bytes, start: int, length: int) -> bytes:
    if start < 0 or length < 0 or start + length > len(data):
        raise ValueError("an offset is outside the file")
    return data[start : start + length]
