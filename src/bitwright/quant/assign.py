"""Which scheme each part of a model gets, from measured error, with the reason said."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bitwright.quant.algorithms.choosing import (
    Coding,
    dynamic_coding,
    dynamic_tensor_coding,
    static_coding,
)
from bitwright.quant.collect import Evidence
from bitwright.quant.products import Site
from bitwright.quant.recipe import CODED, Recipe

UNREACHED = "no calibration batch reached it"
STATIC_GAIN = 1.5
"""Decibels by which a static range must be better than one for each token."""


@dataclass(frozen=True)
class Choice:
    """What one site gets."""

    site: Site
    scheme: str
    reason: str
    coding: Coding | None = None

    @property
    def error(self) -> float:
        return 0.0 if self.coding is None else self.coding.error


def without_ignored(
    sites: list[Site], evidence: dict[str, Evidence], recipe: Recipe
) -> tuple[list[Site], dict[str, Evidence]]:
    """Sites, and what was seen at them, with the products apart that the recipe leaves in float.

    What reads the same value as one of those is quantized all the same.
    """
    found: list[Site] = []
    seen = dict(evidence)
    for site in sites:
        left = [p for p in site.products if recipe.scheme_of(p.name) == "float"]
        if not left or len(left) == len(site.products):
            found.append(site)
            continue
        rest = replace(site, products=[p for p in site.products if p not in left])
        found += [replace(site, products=left), rest]
        if site.name in evidence:
            seen[rest.name] = replace(evidence[site.name], site=rest)
    return found, seen


def assign(sites: list[Site], evidence: dict[str, Evidence], recipe: Recipe) -> list[Choice]:
    return [_choose(site, evidence.get(site.name), recipe) for site in sites]


def _choose(site: Site, evidence: Evidence | None, recipe: Recipe) -> Choice:
    kinds = {product.kind for product in site.products}
    if not kinds <= set(recipe.targets):
        return Choice(site, "float", f"{', '.join(sorted(kinds))} is no target of the recipe")
    asked = {recipe.scheme_of(product.name) for product in site.products} - {None}
    if "float" in asked:
        return Choice(site, "float", "the recipe leaves it in float")
    if evidence is None and recipe.needs_data:
        return Choice(site, "float", UNREACHED)
    if "weights" in recipe.schemes_allowed or "weights" in asked:
        return Choice(site, "weights", "the recipe quantizes weights only")
    assert evidence is not None
    if not evidence.every.peaks.any():
        return Choice(site, "float", "its input was always zero on the data, which tells no range")
    if asked:
        return _asked(site, evidence, asked, recipe)
    return _measured(site, evidence, recipe)


def _asked(site: Site, evidence: Evidence, asked: set[str | None], recipe: Recipe) -> Choice:
    if "dynamic" in asked and site.is_rowwise:
        coding = dynamic_coding(evidence, recipe.smooth)
        return Choice(site, "dynamic", "the recipe asks for it", coding)
    reason = "the recipe asks for it"
    if asked & {"dynamic", "dynamic-tensor"}:
        if "dynamic" in asked:
            reason = "rows of a window have no range of their own, so one for the tensor"
        coding = dynamic_tensor_coding(evidence, recipe.smooth)
        return Choice(site, "dynamic-tensor", reason, coding)
    coding = static_coding(evidence, recipe.smooth, recipe.symmetric)
    return Choice(site, "static", reason, coding)


def _measured(site: Site, evidence: Evidence, recipe: Recipe) -> Choice:
    allowed = recipe.schemes_allowed
    dynamic = None
    by_token = not site.products[0].is_conv
    if "dynamic" in allowed and site.is_rowwise and (by_token or allowed[0] == "dynamic"):
        dynamic = dynamic_coding(evidence, recipe.smooth)
        if allowed[0] == "dynamic":
            return Choice(site, "dynamic", f"{dynamic.sqnr:.1f} dB at the products", dynamic)
    static = static_coding(evidence, recipe.smooth, recipe.symmetric)
    # A token that no calibration text held would be cut off by a static range: tokens differ from
    # each other more than pixels do, so that a static range must be better to be chosen.
    if dynamic is not None and dynamic.sqnr > static.sqnr - STATIC_GAIN:
        reason = f"{dynamic.sqnr:.1f} dB at the products; a static range {static.sqnr:.1f}"
        return Choice(site, "dynamic", reason, dynamic)
    if "float" in allowed and static.sqnr < recipe.lowest_sqnr:
        return Choice(site, "float", f"8 bits would keep {static.sqnr:.1f} dB only", static)
    return Choice(site, "static", f"{static.sqnr:.1f} dB at the products", static)


def safer(choices: list[Choice], evidence: dict[str, Evidence], recipe: Recipe) -> list[Choice]:
    """The sites that make half of all error, one step safer; the same list if none can be."""
    coded = [c for c in choices if c.scheme in CODED]
    coded.sort(key=lambda c: -c.error)
    chosen: set[int] = set()
    limit, total = sum(c.error for c in coded) / 2, 0.0
    for choice in coded:
        if total >= limit and chosen:
            break
        chosen.add(id(choice))
        total += choice.error
    return [_step(c, evidence, recipe) if id(c) in chosen else c for c in choices]


def _step(choice: Choice, evidence: dict[str, Evidence], recipe: Recipe) -> Choice:
    found = evidence[choice.site.name]
    why = "the outputs lost too much with"
    if choice.scheme == "static" and choice.site.has_rows and "dynamic" in recipe.schemes_allowed:
        coding = dynamic_coding(found, recipe.smooth)
        if coding.error < choice.error:
            return replace(choice, scheme="dynamic", coding=coding, reason=f"{why} static codes")
    return replace(choice, scheme="float", coding=None, reason=f"{why} {choice.scheme} codes")
