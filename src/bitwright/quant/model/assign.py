"""Assigns a scheme to each quantization point from measured error, with the reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.recipe import INT8_SCHEMES, Recipe
from bitwright.quant.model.weights import choose

UNREACHED = "no calibration batch reached it"
ZERO_INPUT = "its input is zero on all data, so its range is unknown"
STATIC_GAIN = 1.5
"""Decibels by which a static range must beat dynamic per-token ranges."""
F8_STATIC_GAIN = -0.5
"""The same in f8, where a static range has headroom for values beyond those of calibration, and
saves the pass that finds the scales of rows."""


@dataclass(frozen=True)
class Choice:
    """The scheme of one quantization point."""

    point: QuantizationPoint
    scheme: str
    reason: str
    activation: choose.ActivationQuant | None = None

    @property
    def error(self) -> float:
        return 0.0 if self.activation is None else self.activation.error


def without_ignored(
    points: list[QuantizationPoint], stats: dict[str, CalibrationStats], recipe: Recipe
) -> tuple[list[QuantizationPoint], dict[str, CalibrationStats]]:
    """Points and statistics, with the products that the recipe leaves in float split off.

    Other products that read the same value are still quantized.
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
    """One choice per point: what the recipe asks for, or else by measured error."""
    return [_choose(point, stats.get(point.name), recipe) for point in points]


def asked_schemes(point: QuantizationPoint, recipe: Recipe) -> set[str]:
    """The schemes that the recipe asks for by name."""
    found = {recipe.scheme_of(product.name) for product in point.products}
    return {scheme for scheme in found if scheme is not None}


def why_float(point: QuantizationPoint, recipe: Recipe) -> str:
    """The reason why the recipe leaves a point in float, or ""."""
    kinds = {product.kind for product in point.products}
    if not kinds <= set(recipe.targets):
        return f"the recipe has no target {', '.join(sorted(kinds))}"
    return "the recipe leaves it in float" if "float" in asked_schemes(point, recipe) else ""


def _choose(point: QuantizationPoint, stats: CalibrationStats | None, recipe: Recipe) -> Choice:
    if reason := why_float(point, recipe):
        return Choice(point, "float", reason)
    asked = asked_schemes(point, recipe)
    if stats is None and recipe.needs_data:
        return Choice(point, "float", UNREACHED)
    if "weight_only" in recipe.schemes_allowed or "weight_only" in asked:
        return Choice(point, "weight_only", "the recipe quantizes weights only")
    assert stats is not None
    if not stats.every.peaks.any():
        return Choice(point, "float", ZERO_INPUT)
    if asked:
        return _asked(point, stats, asked, recipe)
    return _measured(point, stats, recipe)


def _asked(
    point: QuantizationPoint, stats: CalibrationStats, asked: set[str], recipe: Recipe
) -> Choice:
    form = recipe.activation_format
    if "dynamic_per_token" in asked and point.is_rowwise:
        activation = choose.dynamic_activation(stats, recipe.smooth, form)
        return Choice(point, "dynamic_per_token", "the recipe asks for it", activation)
    reason = "the recipe asks for it"
    if asked & {"dynamic_per_token", "dynamic_per_tensor"}:
        if "dynamic_per_token" in asked:
            reason = "a convolution window has no per-token range, so the range is per tensor"
        activation = choose.dynamic_tensor_activation(stats, recipe.smooth, form)
        return Choice(point, "dynamic_per_tensor", reason, activation)
    activation = choose.static_activation(stats, recipe.smooth, recipe.symmetric, form)
    return Choice(point, "static", reason, activation)


def _measured(point: QuantizationPoint, stats: CalibrationStats, recipe: Recipe) -> Choice:
    allowed = recipe.schemes_allowed
    dynamic = None
    by_token = not point.products[0].is_conv
    is_first = allowed[0] == "dynamic_per_token"
    if "dynamic_per_token" in allowed and point.is_rowwise and (by_token or is_first):
        dynamic = choose.dynamic_activation(stats, recipe.smooth, recipe.activation_format)
        if is_first and recipe.activation_format:
            return _measured_f8(point, stats, recipe, dynamic)
        if is_first:
            reason = f"{dynamic.sqnr:.1f} dB at the products"
            return Choice(point, "dynamic_per_token", reason, dynamic)
    static = choose.static_activation(stats, recipe.smooth, recipe.symmetric)
    # A static range clips tokens that the calibration text does not contain. Tokens vary more than
    # pixels, so a static range must have a margin to be chosen.
    if dynamic is not None and dynamic.sqnr > static.sqnr - STATIC_GAIN:
        reason = f"{dynamic.sqnr:.1f} dB at the products; a static range {static.sqnr:.1f}"
        return Choice(point, "dynamic_per_token", reason, dynamic)
    if "float" in allowed and static.sqnr < recipe.min_layer_sqnr_db:
        return Choice(point, "float", f"8 bits would reach only {static.sqnr:.1f} dB", static)
    return Choice(point, "static", f"{static.sqnr:.1f} dB at the products", static)


def _measured_f8(
    point: QuantizationPoint,
    stats: CalibrationStats,
    recipe: Recipe,
    dynamic: choose.ActivationQuant,
) -> Choice:
    """One static scale where it is as accurate as a scale per row, which costs a pass more."""
    if "static" in recipe.schemes_allowed:
        static = choose.static_activation(stats, recipe.smooth, format=recipe.activation_format)
        if static.sqnr >= dynamic.sqnr + F8_STATIC_GAIN:
            reason = f"{static.sqnr:.1f} dB at the products; a scale per row {dynamic.sqnr:.1f}"
            return Choice(point, "static", reason, static)
    reason = f"{dynamic.sqnr:.1f} dB at the products"
    return Choice(point, "dynamic_per_token", reason, dynamic)


def fallback(
    choices: list[Choice], stats: dict[str, CalibrationStats], recipe: Recipe
) -> list[Choice]:
    """The choices with the points that cause half of all error moved to a more accurate scheme.

    The list is unchanged if no point is in 8 bits.
    """
    int8 = sorted((c for c in choices if c.scheme in INT8_SCHEMES), key=lambda c: -c.error)
    chosen: set[int] = set()
    limit, total = sum(c.error for c in int8) / 2, 0.0
    for choice in int8:
        if total >= limit and chosen:
            break
        chosen.add(id(choice))
        total += choice.error
    return [_more_accurate(c, stats, recipe) if id(c) in chosen else c for c in choices]


def _more_accurate(choice: Choice, stats: dict[str, CalibrationStats], recipe: Recipe) -> Choice:
    """The choice with dynamic per-token ranges in place of a static one, or in float."""
    why = f"the outputs lost too much with {choice.scheme}"
    allows_dynamic = "dynamic_per_token" in recipe.schemes_allowed
    if choice.scheme == "static" and choice.point.has_rows and allows_dynamic:
        form = recipe.activation_format
        activation = choose.dynamic_activation(stats[choice.point.name], recipe.smooth, form)
        if activation.error < choice.error:
            scheme = "dynamic_per_token"
            return replace(choice, scheme=scheme, activation=activation, reason=why)
    return replace(choice, scheme="float", activation=None, reason=why)
