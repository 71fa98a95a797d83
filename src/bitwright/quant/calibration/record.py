"""From statistics to what `insert_q_dq` takes: an entry for each value, by a calibration method.

    ranges = bw.calibrate(model, data)
    graph = insert_q_dq(bw.load(model), ranges.record("int8", "mse"))

A value whose statistics have an axis gets a scale for each channel. A channel that was never
reached, or was always zero, gets scale 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from bitwright.errors import CalibrationError, QuantizationError
from bitwright.ir.calibration import CalibrationEntry, CalibrationRecord
from bitwright.ir.graph import nearest
from bitwright.quant.calibration.methods import Method, choose
from bitwright.quant.core.parameters import QuantizationParameters
from bitwright.quant.core.types import QuantType, Scheme
from bitwright.warn import DataWarning

if TYPE_CHECKING:
    from bitwright.quant.calibration.ranges import Ranges


def entry_of(parameters: QuantizationParameters) -> CalibrationEntry:
    """The same scales and zero points as an entry of a calibration record."""
    if not isinstance(parameters, QuantizationParameters):
        raise CalibrationError(
            "these are no quantization parameters",
            expected="QuantizationParameters, as choose and Observer.calibrate give them",
            found=type(parameters).__name__,
        )
    by = parameters.scheme
    if by not in (Scheme.symmetric, Scheme.asymmetric) or parameters.block or parameters.widths:
        raise CalibrationError(
            f"a graph has no pair of ops for {by} {parameters.dtype} {parameters.granularity}",
            expected="symmetric or asymmetric, per tensor or per axis",
        )
    scales = np.reshape(parameters.effective_scale, -1)
    zero_points = np.reshape(parameters.zero_point, -1)
    return CalibrationEntry(parameters.axis, scales, zero_points, parameters.dtype.element)


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
    unseen: list[str] = []
    for name in names:
        found = ranges[name]
        if found.is_empty:
            unseen.append(name)
            continue
        if found.axis is not None and name in ranges.same:
            raise CalibrationError(
                f"{name!r} only moves the data of {ranges.same[name]!r}, whose channels lie "
                "elsewhere",
                hint=f"Name {ranges.same[name]!r} instead, or calibrate without axes for it.",
            )
        try:
            entries[name] = entry_of(choose(found, dtype, scheme, method))
        except QuantizationError as error:
            raise CalibrationError(str(error), where=f"value {name!r}") from None
    if unseen:
        _refuse_unseen(unseen, is_asked=values is not None)
    return CalibrationRecord(entries)


def _names(ranges: Ranges, values: Iterable[str]) -> list[str]:
    names = [values] if isinstance(values, str) else list(values)
    for name in names:
        if name not in ranges:
            raise CalibrationError(f"there are no statistics of {name!r}", hint=_hint(name, ranges))
    return names


def _hint(name: Any, ranges: Ranges) -> str:
    return nearest(str(name), ranges) or "bw.calibrate(..., values=[...]) observes named values."


def _refuse_unseen(names: list[str], is_asked: bool) -> None:
    """Values without a range are left out, or an error where they were asked for by name."""
    text = ", ".join(map(repr, names[:5])) + (" …" if len(names) > 5 else "")
    if is_asked:
        raise CalibrationError(f"the data never reached {text}")
    warnings.warn(
        f"the data never reached {text}: left out of the record", DataWarning, stacklevel=4
    )
