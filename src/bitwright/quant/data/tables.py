"""Calibration data from .csv files; a row is a sample.

Columns map to inputs by their names in the header:

    x                   an input [batch] or [batch, 1]
    x.0 x.1 x.2         an input [batch, 3]; x_0 and x[0] are equivalent
    other names         in order, if the model has one input with as many values as columns

Other columns, such as labels, are ignored. Without a header, columns map in order.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import CalibrationError
from bitwright.ir.arrays import Array
from bitwright.ir.dim import Dim
from bitwright.ir.graph import Graph, Value
from bitwright.ir.types import TensorType
from bitwright.quant.data.folders import files_in
from bitwright.quant.data.splitting import BATCH_SIZE

SUFFIXES = (".csv",)
_WORDS = {"true": 1, "false": 0}


class Tables:
    """Tables at a path, mapped to the model's inputs."""

    def __init__(self, path: str | Path, *, batch_size: int | None = None) -> None:
        self.path, self.batch_size = Path(path), batch_size

    @staticmethod
    def are_in(folder: Path) -> bool:
        return any(file.suffix in SUFFIXES for file in folder.iterdir())

    def batches_for(self, graph: Graph) -> _Rows:
        """Batches for the model's inputs; columns are checked now, rows on access."""
        files = files_in(self.path, SUFFIXES) if self.path.is_dir() else [self.path]
        tables = [_Table(file, graph) for file in files]
        firsts = {v.type.shape[0] for v in graph.inputs if isinstance(v.type, TensorType)}
        fixed = next((size for size in firsts if not isinstance(size, Dim)), None)
        return _Rows(tables, fixed or self.batch_size or BATCH_SIZE)


class _Rows:
    """The rows of all tables in batches."""

    def __init__(self, tables: list[_Table], size: int) -> None:
        self._tables, self._size = tables, size

    @property
    def notes(self) -> list[str]:
        names = dict.fromkeys(name for table in self._tables for name in table.ignored)
        if not names:
            return []
        return [f"columns {', '.join(map(repr, names))} match no input: ignored"]

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for table in self._tables:
            yield from table.batches(self._size)


class _Table:
    """One file, with the mapping of its columns to inputs."""

    def __init__(self, path: Path, graph: Graph) -> None:
        self._path, self._inputs = path, {value.name: value for value in graph.inputs}
        first = next(self._rows(), None)
        if first is None:
            raise CalibrationError(f"{path.name} is empty")
        self._has_header = any(_number(cell) is None for cell in first)
        self._width = len(first)
        names = [cell.strip() for cell in first] if self._has_header else []
        widths = {name: self._width_of(value) for name, value in self._inputs.items()}
        self._columns = self._by_name(names, widths) or self._in_order(widths)
        used = {at for columns in self._columns.values() for at in columns}
        self.ignored = [name for at, name in enumerate(names) if at not in used]

    def _rows(self) -> Iterator[list[str]]:
        try:
            with self._path.open(newline="", encoding="utf-8-sig") as file:
                yield from (row for row in csv.reader(file) if row)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise CalibrationError(f"cannot read {self._path.name}: {error}") from None

    def _width_of(self, value: Value) -> int:
        """Values per sample."""
        type_ = value.type
        if not isinstance(type_, TensorType) or not type_.rank:
            raise CalibrationError(
                f"a table cannot provide samples of input {value.name!r}",
                expected="an input with a batch axis",
                found=type_,
            )
        sizes = type_.shape[1:]
        if any(isinstance(size, Dim) for size in sizes):
            raise CalibrationError(
                f"a table cannot provide input {value.name!r} with dynamic sizes",
                expected="a fixed size on every axis but the first",
                found=type_,
                hint="Use .npz files.",
            )
        return math.prod(size for size in sizes if isinstance(size, int))

    def _by_name(self, names: list[str], widths: Mapping[str, int]) -> dict[str, list[int]] | None:
        found: dict[str, list[int]] = {}
        for name, width in widths.items():
            pattern = re.compile(re.escape(name) + r"(?:[._](\d+)|\[(\d+)\])")
            places = {}
            for at, column in enumerate(names):
                if matched := pattern.fullmatch(column):
                    places[int(matched[1] or matched[2])] = at
            if width == 1 and name in names:
                places = {0: names.index(name)}
            if sorted(places) == list(range(1, width + 1)):  # counted from 1
                places = {at - 1: column for at, column in places.items()}
            if sorted(places) != list(range(width)):
                return None
            found[name] = [places[at] for at in range(width)]
        return found

    def _in_order(self, widths: Mapping[str, int]) -> dict[str, list[int]]:
        if sum(widths.values()) != self._width or (self._has_header and len(widths) > 1):
            wanted = ", ".join(f"{n} ({w})" if w > 1 else n for n, w in widths.items())
            raise CalibrationError(
                f"the columns of {self._path.name} do not match the inputs of the model",
                expected=f"{sum(widths.values())} columns for {wanted}",
                found=f"{self._width} columns",
                hint="A header names them: x for one number, x.0, x.1, … for several.",
            )
        found, start = {}, 0
        for name, width in widths.items():
            found[name] = list(range(start, start + width))
            start += width
        return found

    def batches(self, size: int) -> Iterator[dict[str, Array]]:
        pending: list[list[str]] = []
        for number, row in enumerate(self._rows()):
            if number == 0 and self._has_header:
                continue
            if len(row) != self._width:
                raise self._fault(number, "has the wrong number of columns", self._width, len(row))
            pending.append(row)
            if len(pending) == size:
                yield self._batch(pending, number - size + 1)
                pending = []
        if pending:
            yield self._batch(pending, number - len(pending) + 1)

    def _batch(self, rows: Sequence[list[str]], first: int) -> dict[str, Array]:
        batch = {}
        for name, columns in self._columns.items():
            value = self._inputs[name]
            numbers = [
                [self._cell(row[at], at, first + i) for at in columns] for i, row in enumerate(rows)
            ]
            shape = (len(rows), *(size for size in value.tensor.shape[1:] if isinstance(size, int)))
            batch[name] = self._converted(np.array(numbers), value, first).reshape(shape)
        return batch

    def _converted(self, numbers: Array, value: Value, first: int) -> Array:
        """Numbers [rows, columns] in the type of an input; raises if one does not fit."""
        with np.errstate(over="ignore", invalid="ignore"):
            found = numbers.astype(value.dtype.numpy)
            if value.dtype.is_float:
                lost = np.isfinite(numbers) & ~np.isfinite(found.astype(np.float64))
            else:
                lost = found.astype(numbers.dtype) != numbers
        if lost.any():
            row, column = (int(place[0]) for place in np.nonzero(lost))
            text = f"has a number that does not fit {value.dtype}, for input {value.name!r}"
            raise self._fault(first + row, text, value.dtype, numbers[row, column])
        return np.asarray(found)

    def _cell(self, text: str, column: int, row: int) -> float:
        found = _number(text)
        if found is None:
            raise self._fault(row, f"has no number in column {column + 1}", "a number", repr(text))
        return found

    def _fault(self, row: int, what: str, expected: Any, found: Any) -> CalibrationError:
        where = f"{self._path.name}, row {row + 1}"
        return CalibrationError(what, where=where, expected=expected, found=found)


def _number(text: str) -> float | int | None:
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return None
