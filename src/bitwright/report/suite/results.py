"""Results of the suite: rows, JSON, CSV, and the comparison with a baseline.

A row is slower than its baseline if the quartiles of both do not overlap and the medians differ by
more than `NOISE`; both conditions together keep noise of the machine out. A lower SQNR and more
memory are regressions too.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from bitwright.errors import BitwrightError, ParseError
from bitwright.ir.container import write_atomically
from bitwright.report.suite.machine import in_one_line

FORMAT = "bitwright benchmark suite 1"
NOISE = 0.05
SQNR_NOISE_DB = 1.0
MEMORY_NOISE = 0.05


@dataclass
class SuiteRow:
    """One case at one precision; unknown figures are None."""

    suite: str
    name: str
    precision: str
    threads: int
    milliseconds: float | None = None
    """The median over rounds."""
    quartiles: tuple[float, float] | None = None
    best: float | None = None
    """The fastest round, in milliseconds."""
    rounds: int = 0
    calls: int = 0
    """Calls per round."""
    gflops: float | None = None
    """10**9 operations per second of products; a multiply-add counts as two."""
    gbytes: float | None = None
    """10**9 bytes of inputs and outputs per second, for ops without products."""
    memory_bytes: int | None = None
    """Constants and arena of the executable."""
    sqnr_db: float | None = None
    """Of the outputs against the f32 graph in the reference interpreter; None where they are
    equal or no numbers."""
    error: str = ""
    baseline_ratio: float | None = None
    """Milliseconds over those of the baseline."""
    verdict: str = ""
    """Against the baseline: "same", "faster", "slower", "less accurate", "more memory", "new"."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.suite, self.name, self.precision, self.threads

    @property
    def is_regression(self) -> bool:
        return any(word in self.verdict for word in ("slower", "less accurate", "more memory"))


@dataclass(repr=False)
class SuiteResult:
    """All rows, and the machine they were measured on."""

    machine: dict[str, Any]
    rows: list[SuiteRow]
    notes: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[SuiteRow]:
        return [row for row in self.rows if row.is_regression]

    def to_json(self) -> dict[str, Any]:
        """The result as plain values."""
        rows = [asdict(row) for row in self.rows]
        return {"format": FORMAT, "machine": self.machine, "rows": rows, "notes": self.notes}

    def to_csv(self) -> str:
        """One line per row, with the machine in the last column."""
        text = io.StringIO()
        names = [one.name for one in fields(SuiteRow) if one.name != "quartiles"]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*names, "first_quartile", "third_quartile", "machine"])
        machine = in_one_line(self.machine)
        for row in self.rows:
            low, high = row.quartiles or ("", "")
            cells = ["" if (v := getattr(row, name)) is None else v for name in names]
            writer.writerow([*cells, low, high, machine])
        return text.getvalue()

    def save(self, path: str | Path) -> None:
        """Write .json or .csv, by the suffix."""
        is_csv = Path(path).suffix == ".csv"
        text = self.to_csv() if is_csv else json.dumps(self.to_json(), indent=1) + "\n"

        def write(file: IO[bytes]) -> None:
            file.write(text.encode())

        write_atomically(path, write)

    @classmethod
    def load(cls, path: str | Path) -> SuiteResult:
        """A result that `save` wrote as JSON."""
        try:
            record = json.loads(Path(path).read_bytes())
            if record["format"] != FORMAT:
                raise ValueError("it has another format")
            return cls(dict(record["machine"]), [_row(one) for one in record["rows"]])
        except OSError as error:
            raise BitwrightError(f"cannot read {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ParseError(
                f"{path} is not a result of the benchmark suite: {error}",
                expected="a file that bitwright bench --suite --json wrote",
            ) from None

    def __repr__(self) -> str:
        return f"<benchmark suite: {len(self.rows)} rows on {in_one_line(self.machine)}>"


def _row(record: Mapping[str, Any]) -> SuiteRow:
    given = dict(record)
    for name in ("milliseconds", "best", "gflops", "gbytes", "sqnr_db"):
        if given[name] is not None:
            given[name] = float(given[name])
    if given["quartiles"] is not None:
        low, high = given["quartiles"]
        given["quartiles"] = float(low), float(high)
    return SuiteRow(**given)


def compare_with(result: SuiteResult, baseline: SuiteResult) -> None:
    """Set the ratio and the verdict of every row."""
    known = {row.key: row for row in baseline.rows if not row.error}
    same = ("processor", "cores", "features")
    if any(result.machine.get(key) != baseline.machine.get(key) for key in same):
        result.notes.append(
            f"the baseline is of another machine: {in_one_line(baseline.machine)}; "
            "ratios compare machines too"
        )
    for row in result.rows:
        before = known.get(row.key)
        if row.error or before is None:
            row.verdict = "failed" if row.error else "new"
            continue
        row.baseline_ratio, row.verdict = _verdict(row, before)
    found = {row.key for row in result.rows}
    if missing := [key for key in known if key not in found]:
        result.notes.append(f"{len(missing)} rows of the baseline were not run")


def _verdict(row: SuiteRow, before: SuiteRow) -> tuple[float | None, str]:
    words = []
    ratio = None
    if row.milliseconds and before.milliseconds and row.quartiles and before.quartiles:
        ratio = row.milliseconds / before.milliseconds
        if ratio > 1 + NOISE and row.quartiles[0] > before.quartiles[1]:
            words.append("slower")
        elif ratio < 1 / (1 + NOISE) and row.quartiles[1] < before.quartiles[0]:
            words.append("faster")
    exact, was_exact = (math.inf if r.sqnr_db is None else r.sqnr_db for r in (row, before))
    if exact < was_exact - SQNR_NOISE_DB:
        words.append("less accurate")
    limit = (1 + MEMORY_NOISE) * (before.memory_bytes or math.inf)
    if row.memory_bytes is not None and row.memory_bytes > limit:
        words.append("more memory")
    return ratio, ", ".join(words) or "same"
