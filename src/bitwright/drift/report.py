"""What a monitor says: a row per tensor, alarms in words, and the false-alarm rate."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bitwright.drift.counters import Counters
from bitwright.drift.tensors import used_part

HEADER = ("tensor", "range", "values", "below", "above", "in calibration", "used", "verdict")
VERDICTS = {
    "clipped": "clips: data has left the calibrated range",
    "outside": "data has left the calibrated range",
    "unused": "range is mostly unused",
}


@dataclass(frozen=True)
class Alarm:
    """A tensor whose data no longer fits what calibration saw."""

    tensor: str
    kind: str
    """"clipped" (static range), "outside" (dynamic range) or "unused"."""
    message: str
    run: int
    """The run that raised it."""
    since: int
    """The run at which the change most likely began."""
    fraction: float
    """Clipped or outside since then; for "unused" the part of the range that is used."""
    expected: float | None
    """The same in calibration, if known."""

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class TensorDrift:
    """One row of the report."""

    tensor: str
    is_static: bool
    low: float
    high: float
    """The quantized range; for a dynamic range that of the calibration data."""
    values: int
    below: int
    above: int
    """Values outside of the range."""
    nan: int
    minimum: float | None
    maximum: float | None
    used: float
    """The part of the range between minimum and maximum."""
    expected: float | None
    """The fraction outside of the range in calibration."""
    verdict: str

    @property
    def outside(self) -> float:
        """The fraction of values outside of the range."""
        return (self.below + self.above) / self.values if self.values else 0.0


@dataclass(repr=False)
class DriftReport:
    """The state of a monitor."""

    model: str
    runs: int
    observed: int
    level: float
    tests: int
    rows: list[TensorDrift]
    alarms: list[Alarm]
    unwatched: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def has_drift(self) -> bool:
        return bool(self.alarms)

    def to_json(self) -> dict[str, Any]:
        """The report as a dict of plain values."""
        return asdict(self)

    def summary(self) -> str:
        """The verdict in one line."""
        if not self.rows:
            return nothing_to_watch(self.unwatched)
        if not self.observed:
            return f"{_count(len(self.rows), 'quantized tensor')}, no run observed yet"
        watched = f"{self.observed:,} of {_count(self.runs, 'run')} observed"
        if not self.alarms:
            return f"no drift in {_count(len(self.rows), 'quantized tensor')}; {watched}"
        drifted = len({alarm.tensor for alarm in self.alarms})
        return f"drift in {drifted} of {_count(len(self.rows), 'quantized tensor')}; {watched}"

    def _notes(self) -> list[str]:
        found = list(self.notes)
        if any(not row.is_static for row in self.rows):
            found.append(
                "dynamic ranges follow the data and clip nothing; their values are compared with "
                "the range of the calibration data"
            )
        if unknown := sum(row.expected is None for row in self.rows):
            found.append(
                f"the file has no calibrated figures of {_count(unknown, 'tensor')}: an alarm "
                "there means that more than 1% of the values are clipped"
            )
        found += [f"{name} is not watched: {why}" for name, why in self.unwatched.items()]
        if self.tests:
            found.append(
                f"false alarms: if the data fits the calibration, the probability that any of the "
                f"{_count(self.tests, 'test')} ever raises an alarm is at most {self.level:.2g}"
            )
        return found

    def __repr__(self) -> str:
        return f"<drift of {self.model!r}: {self.summary()}>"

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        if not self.rows:
            return self.summary() + "\n"
        table = Table(*HEADER)
        for row in self.rows:
            table.add_row(*_cells(row))
        text = io.StringIO()
        console = Console(file=text, width=160)
        lines = [self.summary(), *(f"alarm: {alarm}" for alarm in self.alarms)]
        lines += [f"note: {note}" for note in self._notes()]
        console.print(table, *lines, sep="\n", highlight=False, markup=False)
        return text.getvalue()

    def _repr_html_(self) -> str:
        from bitwright.ir.html import table

        lines = [self.summary(), *(f"alarm: {alarm}" for alarm in self.alarms), *self._notes()]
        return table(f"drift of {self.model}", HEADER, map(_cells, self.rows), lines)


def nothing_to_watch(unwatched: Mapping[str, str]) -> str:
    """The line for a model without a tensor to watch."""
    if not unwatched:
        return "nothing to watch: no activation of the model is quantized"
    name, why = next(iter(unwatched.items()))
    more = f", and {len(unwatched) - 1} more" if len(unwatched) > 1 else ""
    return f"nothing to watch: {name}{more}: {why}"


def make_report(
    model: str, counters: Counters, unwatched: Mapping[str, str], notes: list[str]
) -> DriftReport:
    """The report of counters."""
    alarms = [
        make_alarm(counters, index) for index, run in enumerate(counters.alarmed_run) if run > 0
    ]
    alarms.sort(key=lambda alarm: alarm.run)
    kinds: dict[str, str] = {}
    for alarm in alarms:
        kinds.setdefault(alarm.tensor, alarm.kind)
    rows = []
    for index, one in enumerate(counters.tensors):
        total = counters.total
        count = total.count(index)
        below, above = total.beyond(index)
        low, high = (float(end[index]) if count else None for end in (total.low, total.high))
        verdict = VERDICTS[kinds[one.name]] if one.name in kinds else "ok" if count else "no data"
        used = 0.0 if low is None or high is None else used_part(low, high, one.low, one.high)
        missing = int(total.missing[index])
        figures = (one.low, one.high, count, below, above, missing, low, high, used)
        rows.append(TensorDrift(one.name, one.is_static, *figures, one.expected, verdict))
    notes = notes + [f"{row.tensor}: {_count(row.nan, 'value')} NaN" for row in rows if row.nan]
    return DriftReport(
        model,
        counters.runs,
        counters.observed,
        counters.level,
        len(counters.tests),
        rows,
        alarms,
        dict(unwatched),
        notes,
    )


def make_alarm(counters: Counters, index: int) -> Alarm:
    """The alarm of a test, with the counts since the change."""
    test = counters.tests[index]
    one = counters.tensors[test.tensor]
    window = counters.since
    count = max(window.count(index), 1)
    since, run = int(counters.since_run[index]), int(counters.alarmed_run[index])
    if test.kind == "unused":
        ends = float(window.low[index]), float(window.high[index])
        fraction = used_part(*ends, one.low, one.high)
        expected = one.calibrated_use
        known = "" if expected is None else f" ({percent(expected)} in calibration)"
        text = f"range is used to {percent(fraction)} only{known} since run {since:,}"
        return Alarm(one.name, test.kind, f"{one.name}: {text}", run, since, fraction, expected)
    below, above = window.beyond(index)
    fraction = (below + above) / count
    known = "" if one.expected is None else f" ({percent(one.expected)} in calibration)"
    what = "clipped" if one.is_static else "outside of the calibrated range"
    text = f"{percent(fraction)} of values {what}{known} since run {since:,}"
    text += f"; {_sides(below, above, one.low, one.high)}"
    if one.is_static:
        text += "; data has left the calibrated range"
    else:
        text += "; the range is dynamic, so nothing is clipped"
    return Alarm(one.name, test.kind, f"{one.name}: {text}", run, since, fraction, one.expected)


def _sides(below: int, above: int, low: float, high: float) -> str:
    """On which side values lie outside."""
    if not below:
        return f"all above {high:.4g}"
    if not above:
        return f"all below {low:.4g}"
    return f"{percent(below / (below + above))} of them below {low:.4g}, the rest above {high:.4g}"


def percent(fraction: float) -> str:
    """4.1%, 0.02%, 0%."""
    if 0 < fraction < 1e-6:
        return "<0.0001%"
    return f"{100 * fraction:.2g}%" if fraction < 0.0995 else f"{100 * fraction:.0f}%"


def _cells(row: TensorDrift) -> tuple[str, ...]:
    count = max(row.values, 1)
    kind = "static" if row.is_static else "dynamic"
    return (
        row.tensor,
        f"{kind} {row.low:.4g} to {row.high:.4g}",
        f"{row.values:,}",
        percent(row.below / count),
        percent(row.above / count),
        "unknown" if row.expected is None else percent(row.expected),
        percent(row.used) if row.values else "",
        row.verdict,
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
