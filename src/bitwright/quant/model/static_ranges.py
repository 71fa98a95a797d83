"""Quantization from saved ranges (`bw.calibrate`): static schemes, and no measurement.

Ranges hold the minimum and maximum of each value but no rows, so smoothing, GPTQ, bias correction
and the mixed-precision search are not available.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.ir.graph import Value
from bitwright.quant.calibration.observed import MOVES
from bitwright.quant.calibration.ranges import MAGIC, Ranges
from bitwright.quant.calibration.statistics import Statistics
from bitwright.quant.model.assign import UNREACHED, ZERO_INPUT, Choice, asked_schemes, why_float
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.recipe import Recipe
from bitwright.quant.model.weights.choose import ActivationQuant, AnyRange
from bitwright.quant.model.weights.nearest import F8Range, Range
from bitwright.quant.model.weights.round_scales import rounded_down


def find_ranges(statistics: Any, has_data: bool) -> Ranges | None:
    """The ranges in `statistics` (`Ranges` or their file); None for anything else or with data."""
    if has_data:
        return None
    if isinstance(statistics, Ranges):
        return statistics
    if not isinstance(statistics, str | Path) or not Path(statistics).is_file():
        return None
    with Path(statistics).open("rb") as file:
        is_ranges = file.read(len(MAGIC)) == MAGIC
    return Ranges.load(statistics) if is_ranges else None


def unmeasured(recipe: Recipe) -> Recipe:
    """The recipe without the options that need rows of data."""
    return replace(recipe, rounding="nearest", bias_correction=False, smooth=False)


def assign_from_ranges(
    points: list[QuantizationPoint], ranges: Ranges, recipe: Recipe
) -> list[Choice]:
    """One choice per point: static, unless the recipe asks for another scheme."""
    return [_choose(point, ranges, recipe) for point in points]


def _choose(point: QuantizationPoint, ranges: Ranges, recipe: Recipe) -> Choice:
    if reason := why_float(point, recipe):
        return Choice(point, "float", reason)
    asked = asked_schemes(point, recipe) or {recipe.schemes_allowed[0]}
    if "weight_only" in asked:
        return Choice(point, "weight_only", "the recipe quantizes weights only")
    if asked & {"dynamic_per_token", "dynamic_per_tensor"}:
        is_per_token = "dynamic_per_token" in asked and point.is_rowwise
        scheme = "dynamic_per_token" if is_per_token else "dynamic_per_tensor"
        activation = ActivationQuant(scheme, None, None, 0.0, format=recipe.activation_format)
        return Choice(point, scheme, "the recipe asks for it", activation)
    found = [_statistics(value, point.path, ranges) for value in point.values]
    known = [one for one in found if one is not None]
    if len(known) < len(found):
        return Choice(point, "float", "the statistics have no range of its input")
    if any(one.is_empty for one in known):
        return Choice(point, "float", UNREACHED)
    if not any(one.max_abs.any() for one in known):
        return Choice(point, "float", ZERO_INPUT)
    low = min(float(one.minimum.min()) for one in known)
    high = max(float(one.maximum.max()) for one in known)
    over = Range.around_zero if recipe.symmetric else Range.over
    found_range: AnyRange = (F8Range.over if recipe.activation_format else over)(low, high)
    range_ = found_range._replace(scale=np.float32(rounded_down(found_range.scale)))
    activation = ActivationQuant("static", None, range_, 0.0, format=recipe.activation_format)
    return Choice(point, "static", f"the range {low:.4g} to {high:.4g} of the data", activation)


def _statistics(value: Value, path: str, ranges: Ranges) -> Statistics | None:
    """The statistics of a value, or of the value whose data it moves."""
    while path + value.name not in ranges:
        source = value.node.inputs[0] if value.node.op in MOVES else None
        if source is None:
            return None
        value = source
    return ranges[path + value.name]
