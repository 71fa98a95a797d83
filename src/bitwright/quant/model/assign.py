"""Which scheme each part of a model gets, from measured error, with the reason said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.recipe import INT8_SCHEMES, Recipe
from bitwright.quant.model.weights.choose import (
    ActivationQuant,
    dynamic_activation,
    dynamic_tensor_activation,
    static_activation,
)

UNREACHED = "no calibration batch reached it"
STATIC_GAIN = 1.5
"""Decibels by which a static range must be better than one for each token."""


@dataclass(frozen=True)
class Choice:
    """What one site gets."""

    point: QuantizationPoint
    scheme: str
    reason: str
    activation: ActivationQuant | None = None

    @property
    def error(self) -> float:
        return 0.0 if self.activation is None else self.activation.error


def without_ignored(
    points: list[QuantizationPoint], stats: dict[str, CalibrationStats], recipe: Recipe
) -> tuple[list[QuantizationPoint], dict[str, CalibrationStats]]:
    """Sites, and what was seen at them, with the products apart that the recipe leaves in float.

    What reads the same value as one of those is quantized all the same.
    """
    found: list[QuantizationPoint] = []
    seen = dict(stats)
    for point in points:
        left = [p for p in point.products if recipe.scheme_of(p.name) == "float"]
        if not left or len(left) == len(point.products):
            found.append(point)
            continue
        rest = replace(point, products=[p for p in point.products if p not in left])
        found += [replace(point, products=left), rest]
        if point.name in stats:
            seen[rest.name] = replace(stats[point.name], point=rest)
    return found, seen


def assign(
    points: list[QuantizationPoint], stats: dict[str, CalibrationStats], recipe: Recipe
) -> list[Choice]:
    return [_choose(point, stats.get(point.name), recipe) for point in points]


def _choose(point: QuantizationPoint, stats: CalibrationStats | None, recipe: Recipe) -> Choice:
    kinds = {product.kind for product in point.products}
    if not kinds <= set(recipe.targets):
        return Choice(point, "float", f"{', '.join(sorted(kinds))} is no target of the recipe")
    asked = {recipe.scheme_of(product.name) for product in point.products} - {None}
    if "float" in asked:
        return Choice(point, "float", "the recipe leaves it in float")
    if stats is None and recipe.needs_data:
        return Choice(point, "float", UNREACHED)
    if "weights" in recipe.schemes_allowed or "weights" in asked:
        return Choice(point, "weights", "the recipe quantizes weights only")
    assert stats is not None
    if not stats.every.peaks.any():
        return Choice(point, "float", "its input was always zero on the data, which tells no range")
    if asked:
        return _asked(point, stats, asked, recipe)
    return _measured(point, stats, recipe)


def _asked(
    point: QuantizationPoint, stats: CalibrationStats, asked: set[str | None], recipe: Recipe
) -> Choice:
    if "dynamic" in asked and point.is_rowwise:
        activation = dynamic_activation(stats, recipe.smooth)
        return Choice(point, "dynamic", "the recipe asks for it", activation)
    reason = "the recipe asks for it"
    if asked & {"dynamic", "dynamic-tensor"}:
        if "dynamic" in asked:
            reason = "rows of a window have no range of their own, so one for the tensor"
        activation = dynamic_tensor_activation(stats, recipe.smooth)
        return Choice(point, "dynamic-tensor", reason, activation)
    activation = static_activation(stats, recipe.smooth, recipe.symmetric)
    return Choice(point, "static", reason, activation)


def _measured(point: QuantizationPoint, stats: CalibrationStats, recipe: Recipe) -> Choice:
    allowed = recipe.schemes_allowed
    dynamic = None
    by_token = not point.products[0].is_conv
    if "dynamic" in allowed and point.is_rowwise and (by_token or allowed[0] == "dynamic"):
        dynamic = dynamic_activation(stats, recipe.smooth)
        if allowed[0] == "dynamic":
            return Choice(point, "dynamic", f"{dynamic.sqnr:.1f} dB at the products", dynamic)
    static = static_activation(stats, recipe.smooth, recipe.symmetric)
    # A token that no calibration text held would be cut off by a static range: tokens differ from
    # each other more than pixels do, so that a static range must be better to be chosen.
    if dynamic is not None and dynamic.sqnr > static.sqnr - STATIC_GAIN:
        reason = f"{dynamic.sqnr:.1f} dB at the products; a static range {static.sqnr:.1f}"
        return Choice(point, "dynamic", reason, dynamic)
    if "float" in allowed and static.sqnr < recipe.min_layer_sqnr_db:
        return Choice(point, "float", f"8 bits would keep {static.sqnr:.1f} dB only", static)
    return Choice(point, "static", f"{static.sqnr:.1f} dB at the products", static)


def fallback(
    choices: list[Choice], stats: dict[str, CalibrationStats], recipe: Recipe
) -> list[Choice]:
    """The sites that make half of all error, one step safer; the same list if none can be."""
    match_dequantize = [c for c in choices if c.scheme in INT8_SCHEMES]
    match_dequantize.sort(key=lambda c: -c.error)
    chosen: set[int] = set()
    limit, total = sum(c.error for c in match_dequantize) / 2, 0.0
    for choice in match_dequantize:
        if total >= limit and chosen:
            break
        chosen.add(id(choice))
        total += choice.error
    return [_step(c, stats, recipe) if id(c) in chosen else c for c in choices]


def _step(choice: Choice, stats: dict[str, CalibrationStats], recipe: Recipe) -> Choice:
    found = stats[choice.point.name]
    why = "the outputs lost too much with"
    if choice.scheme == "static" and choice.point.has_rows and "dynamic" in recipe.schemes_allowed:
        activation = dynamic_activation(found, recipe.smooth)
        if activation.error < choice.error:
            return replace(
                choice, scheme="dynamic", activation=activation, reason=f"{why} static codes"
            )
    return replace(choice, scheme="float", activation=None, reason=f"{why} {choice.scheme} codes")
