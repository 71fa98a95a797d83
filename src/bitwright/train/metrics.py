"""Metrics of a run: JSON lines, and event files that TensorBoard reads.

An event file is a sequence of records: length (u64), checksum of the length, an `Event` message,
checksum of the message. The messages have few fields, which are written here directly.
"""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from bitwright.errors import BitwrightError, TrainingError
from bitwright.ir.container import write_atomically

EVALUATION = "eval_"
"""The start of the names of numbers that an evaluation gave."""


class MetricsFile:
    """One JSON object a line. A run that is resumed removes the lines of steps after `step`, and
    those of evaluations after the step `evaluated`. Numbers that are not finite are null."""

    def __init__(self, path: str | Path, step: int = 0, evaluated: int = 0) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = self._lines_until(step, evaluated)
            write_atomically(self.path, lambda file: _write_lines(file, kept))
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except (OSError, BitwrightError) as error:
            raise TrainingError(f"metrics cannot be written to {self.path}: {error}") from None

    def _lines_until(self, step: int, evaluated: int) -> list[str]:
        if not step or not self.path.exists():
            return []
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue  # a line that was cut off
            if not isinstance(found, dict) or not isinstance(found.get("step"), int):
                continue
            is_evaluation = any(str(name).startswith(EVALUATION) for name in found)
            if found["step"] <= (min(step, evaluated) if is_evaluation else step):
                kept.append(line)
        return kept

    def add(self, record: Mapping[str, Any]) -> None:
        known = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(known) + "\n")  # JSON has no NaN
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _write_lines(file: IO[bytes], lines: list[str]) -> None:
    file.write("".join(f"{line}\n" for line in lines).encode())


class EventFile:
    """Scalars for TensorBoard, in a new file of a folder.

    A run that resumes after `step` says so, and TensorBoard drops what older files have behind it.
    """

    def __init__(self, folder: str | Path, step: int = 0) -> None:
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._file = open(place / f"events.out.tfevents.{now:.6f}.bitwright", "wb")  # noqa: SIM115
        self._record(_double(1, now) + _bytes(3, b"brain.Event:2"))
        if step:
            session = _number(1, 1)  # SessionLog.START
            self._record(_double(1, now) + _number(2, step + 1) + _bytes(7, session))

    def add(self, record: Mapping[str, Any]) -> None:
        values = b"".join(
            _bytes(1, _bytes(1, name.encode()) + _float(2, float(value)))
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float))
        )
        now, step = _double(1, time.time()), _number(2, int(record["step"]))
        self._record(now + step + _bytes(5, values))

    def _record(self, message: bytes) -> None:
        length = struct.pack("<Q", len(message))
        self._file.write(length + _checksum(length) + message + _checksum(message))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _double(tag: int, value: float) -> bytes:
    return _varint(tag << 3 | 1) + struct.pack("<d", value)


def _float(tag: int, value: float) -> bytes:
    return _varint(tag << 3 | 5) + struct.pack("<f", value)


def _bytes(tag: int, value: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(value)) + value


def _table() -> list[int]:
    """The table of CRC-32C (Castagnoli), bits reversed."""
    found = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0x82F63B78 if number & 1 else 0)
        found.append(number)
    return found


_CRC = _table()


def crc32c(data: bytes) -> int:
    found = 0xFFFFFFFF
    for byte in data:
        found = _CRC[(found ^ byte) & 255] ^ found >> 8
    return found ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    """The masked checksum of a record."""
    found = crc32c(data)
    return struct.pack("<I", ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF)
