"""One sentence per unit: why it has its precision."""

from __future__ import annotations

from collections.abc import Mapping

from bitwright.tuning.precision.precisions import BF16, FLOAT, SCHEMES
from bitwright.tuning.precision.tables import Tables
from bitwright.tuning.precision.units import Unit

_NOTABLE = 0.002
"""Fractions of the run time below this are not mentioned."""
UNTIMED = "not timed: the search ended before it"


def reasons(tables: Tables, chosen: Mapping[str, str], objective: str) -> dict[str, str]:
    """The reason for the precision of each unit."""
    fastest: dict[str, str] = {}
    for unit in tables.units:
        options = _quantized(tables, unit)
        if options:
            fastest[unit.name] = min(options, key=lambda name: options[name])
    total_error = sum(_error(tables, unit, name) for unit, name in fastest.items())
    total_time = sum(tables.seconds(u.name, chosen[u.name]) or 0.0 for u in tables.units)
    return {
        unit.name: _reason(tables, unit, chosen[unit.name], fastest.get(unit.name),
                           total_error, total_time, objective)
        for unit in tables.units
    }  # fmt: skip


def _quantized(tables: Tables, unit: Unit) -> dict[str, float]:
    """Seconds of the unit in the precisions that are not float."""
    found = {name: tables.seconds(unit.name, name) for name in tables.times}
    return {n: s for n, s in found.items() if s is not None and SCHEMES[n] != "float"}


def _error(tables: Tables, unit: str, precision: str) -> float:
    return tables.errors.get(precision, {}).get(unit, 0.0)


def _reason(
    tables: Tables,
    unit: Unit,
    chosen: str,
    fastest: str | None,
    total_error: float,
    total_time: float,
    objective: str,
) -> str:
    own, plain = tables.seconds(unit.name, chosen), tables.seconds(unit.name, FLOAT)
    if own is None or plain is None:
        return UNTIMED
    if chosen in (FLOAT, BF16):
        if fastest is None:
            return "kept float here: no other precision is possible"
        other = tables.seconds(unit.name, fastest) or 0.0
        if other >= own:
            return f"kept float here: {fastest} would cost {milliseconds(other - own)}"
        error = _error(tables, unit.name, fastest) / total_error if total_error else 0.0
        time = own / total_time if total_time else 0.0
        return f"float here: {error:.0%} of the error, {time:.0%} of the time"
    error = _error(tables, unit.name, chosen) / total_error if total_error else 0.0
    is_equal = abs(own - plain) < _NOTABLE * total_time
    speed = "as fast as f32" if is_equal else f"{milliseconds(own - plain)} against f32"
    gain = f"{speed}, {error:.0%} of the error"
    if objective != "latency":
        return f"{chosen} for its {objective}: {gain}"
    others = {n: s for n, s in _quantized(tables, unit).items() if n != chosen}
    best = min(others, key=lambda name: others[name], default=chosen)
    times = _error(tables, unit.name, best) / (_error(tables, unit.name, chosen) or 1.0)
    if best != chosen and times > 1 and own - others[best] > _NOTABLE * total_time:
        more = f"{best} would take {milliseconds(others[best] - own)} for {times:.2g} times"
        return f"{gain}; {more} the error"
    return gain


def milliseconds(seconds: float) -> str:
    """A signed difference in ms."""
    return f"{seconds * 1e3:+.2g} ms"
