"""Statistics -> CalibrationRecord, the input of `insert_q_dq`.

    ranges = bw.calibrate(model, data)
    graph = insert_q_dq(bw.load(model), ranges.record("int8", "mse"))

A value whose statistics have an axis gets a scale for each channel. Channels without values, and
all-zero channels, get scale 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bitwright.errors import CalibrationError, QuantizationError
from bitwright.ir.calibration import CalibrationEntry, CalibrationRecord
from bitwright.ir.graph import nearest
from bitwright.ir.quant_types import QuantType, Scheme
from bitwright.quant.calibration.methods import Method, choose
from bitwright.warn import DataWarning

if TYPE_CHECKING:
    from bitwright.quant.calibration.ranges import Ranges


def make_record(
    ranges: Ranges,
    dtype: str | QuantType,
    method: Method,
    scheme: str | Scheme | None,
    values: Iterable[str] | None,
) -> CalibrationRecord:
    """See `Ranges.record`."""
    names = list(ranges.statistics) if values is None else _names(ranges, values)
    entries: dict[str, CalibrationEntry] = {}
    unreached: list[str] = []
    for name in names:
        found = ranges[name]
        if found.is_empty:
            unreached.append(name)
            continue
        if found.axis is not None and name in ranges.same:
            raise CalibrationError(
                f"{name!r} only moves the data of {ranges.same[name]!r}, whose channels have "
                "another axis",
                hint=f"Name {ranges.same[name]!r} instead, or calibrate without axes for it.",
            )
        try:
            entries[name] = CalibrationEntry.from_params(choose(found, dtype, scheme, method))
        except QuantizationError as error:
            raise CalibrationError(str(error), where=f"value {name!r}") from None
    if unreached:
        _report_unreached(unreached, is_requested=values is not None)
    return CalibrationRecord(entries)


def _names(ranges: Ranges, values: Iterable[str]) -> list[str]:
    names = [values] if isinstance(values, str) else list(values)
    for name in names:
        if name not in ranges:
            raise CalibrationError(f"there are no statistics of {name!r}", hint=_hint(name, ranges))
    return names


def _hint(name: Any, ranges: Ranges) -> str:
    return nearest(str(name), ranges) or "bw.calibrate(..., values=[...]) observes named values."


def _report_unreached(names: list[str], is_requested: bool) -> None:
    """Warn about values without statistics; raise if they were requested by name."""
    text = ", ".join(map(repr, names[:5])) + (" …" if len(names) > 5 else "")
    if is_requested:
        raise CalibrationError(f"the data never reached {text}")
    warnings.warn(
        f"the data never reached {text}: left out of the record", DataWarning, stacklevel=4
    )
