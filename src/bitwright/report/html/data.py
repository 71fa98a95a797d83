"""ReportData: what a report shows, as plain values with a JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from bitwright.errors import ExportError
from bitwright.ir.container import require_writable, write_atomically

FORMAT = "bitwright-report"
VERSION = 1
SUFFIXES = (".html", ".htm")


@dataclass
class ReportData:
    """The sections of a report; the page leaves out those that are empty."""

    title: str
    headline: str = ""
    """What changed, in one sentence."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Pairs before and after: size, latency, memory, scores, output errors."""
    next_steps: list[dict[str, str]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)
    graph: dict[str, Any] | None = None
    ledger: dict[str, Any] | None = None
    tune: dict[str, Any] | None = None
    comparison: dict[str, Any] | None = None
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """Layers that stay in float and steps without a kernel, with reasons."""
    worst_inputs: list[dict[str, Any]] = field(default_factory=list)
    """Batches with the largest error, by number; their contents only if asked for."""
    notes: list[str] = field(default_factory=list)
    reproduce: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values only; numbers that are not finite become None."""
        sections = {one.name: getattr(self, one.name) for one in fields(self)}
        return {"format": FORMAT, "version": VERSION, **plain(sections)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ReportData:
        """The report of a JSON file that `save` wrote."""
        if found.get("format") != FORMAT:
            raise ExportError("this is not the JSON of a report", expected=FORMAT)
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in found.items() if name in known})

    def save(self, path: str | Path) -> None:
        """Write the page, and its data with the suffix .json beside it."""
        from bitwright.report.html.page import render

        check_path(path)
        found = self.to_json()
        write_text(path, render(found))
        write_text(Path(path).with_suffix(".json"), json.dumps(found, allow_nan=False) + "\n")


def check_path(path: str | Path) -> None:
    """Raise, before the work of making a report, for a path that it cannot be written to."""
    if Path(path).suffix not in SUFFIXES:
        raise ExportError(
            f"a report is an HTML file, and {Path(path).name!r} does not end in .html",
            hint="The JSON of the report is written beside it.",
        )
    require_writable(path)


def section(
    name: str, found: Mapping[str, Any] | None, tables: tuple[str, ...]
) -> dict[str, Any] | None:
    """A section that another command made; raises unless its tables are lists of dicts."""
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ExportError(f"the {name} is not a dict", found=type(found).__name__)
    for table in tables:
        rows = found.get(table) or []
        if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
            raise ExportError(f"{table!r} of the {name} has no rows", expected="a list of dicts")
    return dict(found)


def number(item: Any) -> float:
    """The item if it is a finite number, else 0."""
    is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
    return float(item) if is_number and math.isfinite(item) else 0.0


def write_text(path: str | Path, text: str) -> None:
    def write(file: IO[bytes]) -> None:
        file.write(text.encode())

    write_atomically(path, write)


def plain(item: Any) -> Any:
    """The item with arrays and tuples as lists, and numbers that JSON has."""
    if isinstance(item, Mapping):
        return {str(key): plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple, set, frozenset)):
        return [plain(value) for value in item]
    if isinstance(item, np.ndarray):
        return plain(item.tolist())
    if isinstance(item, (bool, np.bool_)):
        return bool(item)
    if isinstance(item, (int, np.integer)):
        return int(item)
    if isinstance(item, (float, np.floating)):
        # seven digits: the data of large models stays small
        return float(f"{float(item):.7g}") if math.isfinite(item) else None
    return item if item is None else str(item)
