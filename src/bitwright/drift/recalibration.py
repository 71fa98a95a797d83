"""bw.recalibrate: continues saved calibration statistics with new data, and quantizes again.

    q = bw.quantize("model.onnx", data=batches, statistics="seen.npz")
    ... the data drifts ...
    q = bw.recalibrate("model.onnx", "seen.npz", new_batches)
    print(q.changes_text())

Ranges of the old and the new data are merged: they widen, and never shrink. The file is replaced
when the new model is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bitwright.errors import CalibrationError
from bitwright.ir.container import require_writable
from bitwright.passes.precision.policy import Policy
from bitwright.pipeline import PRECISION
from bitwright.quant.calibration.stats_file import StatsFile
from bitwright.quant.data.batches import Transform
from bitwright.quant.model.calibrated_ranges import read_calibrated_ranges
from bitwright.quant.model.config import QuantConfig
from bitwright.quant.model.quantize import Quantized, quantize
from bitwright.quant.model.recipe import Recipe

MOVED = 0.01
"""Ranges that widen by less than this part of their width do not count as moved."""


@dataclass(frozen=True)
class RangeChange:
    """The range of one quantization point before and after the new data."""

    name: str
    """The layer in words: "block1.conv1 input"."""
    before: tuple[float, float]
    after: tuple[float, float]

    @property
    def widening(self) -> float:
        """The growth of the range, relative to its width before."""
        (low, high), (new_low, new_high) = self.before, self.after
        width = high - low
        grown = (low - new_low) + (new_high - high)
        return grown / width if width > 0 else float("inf") if grown > 0 else 0.0

    def __str__(self) -> str:
        (low, high), (new_low, new_high) = self.before, self.after
        return (
            f"{self.name}: {low:.4g} to {high:.4g} became {new_low:.4g} to {new_high:.4g} "
            f"(+{100 * self.widening:.0f}%)"
        )


@dataclass(frozen=True, repr=False)
class Recalibrated(Quantized):
    """A model that was quantized again, and how far its ranges moved."""

    changes: tuple[RangeChange, ...] = ()
    """All quantization points, the one that widened most first."""

    @property
    def moved(self) -> list[RangeChange]:
        """The ranges that widened by at least 1%."""
        return [one for one in self.changes if one.widening >= MOVED]

    def changes_text(self) -> str:
        """The ranges that moved, one per line, in words."""
        moved, count = self.moved, len(self.changes)
        if not moved:
            return f"no range of {count} moved by 1% or more: the statistics covered the new data"
        head = f"{len(moved)} of {count} range{'s' * (count != 1)} moved:"
        return "\n".join([head, *(f"  {one}" for one in moved)])


def recalibrate(
    model: Any,
    statistics: str | Path | StatsFile,
    data: Any,
    recipe: str | Path | Mapping[str, Any] | Recipe | QuantConfig | None = None,
    *,
    transform: Transform | None = None,
    subset: int | None = None,
    threads: int | None = None,
    progress: bool | None = None,
    float_precision: str | Policy | None = None,
) -> Recalibrated:
    """Continue a file of calibration statistics with new data, and quantize the model again.

    `model` is the float model, or what `bw.quantize` returned for it; the recipe and the float
    precision are then taken from there unless given. `statistics` is the file that `bw.quantize`
    wrote (`statistics=`). It is replaced by the statistics of old and new data; after an error or
    an interrupt it is as before. The other options are those of `bw.quantize`.
    """
    source, given = model, model if isinstance(model, Quantized) else None
    if given is not None:
        source = given.original
        recipe = given.recipe if recipe is None else recipe
        if float_precision is None:
            float_precision = given.graph.meta.get(PRECISION, "f32")
        if source is None:
            raise CalibrationError(
                "the float model of this quantized model is unknown",
                hint="Give the float model: bw.recalibrate('model.onnx', statistics, data).",
            )
    if data is None:
        raise CalibrationError("there is no new data", expected="batches, as bw.quantize takes")
    file = StatsFile.at(statistics)
    if file is None:
        raise CalibrationError("there is no file of statistics", expected="its path")
    file.require_usable(has_data=False)
    require_writable(file.path)
    before = file.spans()
    copy = StatsFile(file.path.with_name(f".{file.path.name}.{os.getpid()}"), is_continued=True)
    try:
        shutil.copyfile(file.path, copy.path)
        made = quantize(
            source,
            data,
            "int8" if recipe is None else recipe,
            statistics=copy,
            transform=transform,
            subset=subset,
            threads=threads,
            progress=progress,
            float_precision=float_precision or "f32",
        )
        after = copy.spans()
        os.replace(copy.path, file.path)
    finally:
        copy.path.unlink(missing_ok=True)
    kept = {field.name: getattr(made, field.name) for field in fields(Quantized)}
    return Recalibrated(**kept, changes=_changes(made, before, after))


def _changes(
    made: Quantized,
    before: Mapping[str, tuple[float, float]],
    after: Mapping[str, tuple[float, float]],
) -> tuple[RangeChange, ...]:
    names = {
        one.value: f"{next(iter(one.layers.values()))} input"
        for one in read_calibrated_ranges(made.graph.meta)
        if one.layers
    }
    found = [
        RangeChange(names.get(name, name), before.get(name, (0.0, 0.0)), ends)
        for name, ends in after.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.widening))
