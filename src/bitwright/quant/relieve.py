"""Static ranges that cost the outputs too much are exchanged, the cheapest way first.

Each convolution's range is tried alone in the float model (`quant.effects`). Errors of different
sites hardly know of each other, so that their squares add up; where the sum is above what the
recipe allows, sites are relieved until it is not, those first that bring most for the time they
will take when the model runs:

    dynamic   a range for each row must be found: so much work for every number of the input
    float     a product in f32 is several times slower than one in codes

Work is counted in multiply-adds of codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bitwright.ir.dim import evaluate
from bitwright.ops.flops import multiply_adds
from bitwright.quant.algorithms.choosing import Coding, dynamic_coding
from bitwright.quant.algorithms.codes import decibels
from bitwright.quant.assign import Choice
from bitwright.quant.collect import Evidence
from bitwright.quant.effects import Effects
from bitwright.quant.products import Site
from bitwright.quant.recipe import Recipe

WORK_OF_A_RANGE = 128
"""For each number of a value whose rows get ranges when the model runs."""
WORK_IN_FLOAT = 3
"""For each multiply-add in f32, on top of what it takes in codes."""
LEAST_WORK = 16
"""Multiply-adds that a number of a result takes at least: windows of one channel are short."""


def open_codings(choices: list[Choice], recipe: Recipe) -> dict[Site, Coding]:
    """The static codings that may be exchanged: of convolutions, unless the recipe names them."""
    if len(recipe.schemes_allowed) == 1:
        return {}
    return {
        c.site: c.coding
        for c in choices
        if c.scheme == "static"
        and c.coding is not None
        and all(p.is_conv and recipe.scheme_of(p.name) is None for p in c.site.products)
    }


@dataclass(frozen=True)
class _Exchange:
    choice: Choice
    loss: float
    """That is left with it."""
    work: float
    float_work: int = 0
    """Multiply-adds that leave 8 bits."""


def relieve(
    choices: list[Choice],
    evidence: Mapping[str, Evidence],
    recipe: Recipe,
    effects: Effects,
    bindings: Mapping[str, int],
) -> list[Choice]:
    """The choices with as few static ranges exchanged as keep the outputs."""
    sites = open_codings(choices, recipe)
    if not sites or decibels(effects.together(*sites)) >= recipe.static_sqnr:
        return choices
    alone = {site: effects.together(site) for site in sites}
    work = {c.site: sum(multiply_adds(p.node, bindings) for p in c.site.products) for c in choices}
    spare = (1 - recipe.least_share) * sum(work.values())
    current = {choice.site: choice for choice in choices}
    left, budget = sum(alone.values()), 10 ** (-recipe.static_sqnr / 10)
    offers = {
        site: _exchanges(current[site], alone[site], evidence[site.name], recipe, work, bindings)
        for site in sorted(alone, key=lambda s: -alone[s])
        if alone[site] > budget / len(alone) / 4
    }
    while left > budget:
        best, gain = None, 0.0
        for site, exchanges in offers.items():
            for exchange in exchanges:
                rate = (alone[site] - exchange.loss) / exchange.work
                if exchange.float_work <= spare and rate > gain:
                    best, gain = exchange, rate
        if best is None:
            break
        site = best.choice.site
        current[site] = best.choice
        left -= alone[site] - best.loss
        spare -= best.float_work
        del offers[site]
    return [current[choice.site] for choice in choices]


def _exchanges(
    choice: Choice,
    loss: float,
    evidence: Evidence,
    recipe: Recipe,
    work: Mapping[Site, int],
    bindings: Mapping[str, int],
) -> list[_Exchange]:
    found, site = [], choice.site
    why = f"a static range would leave the outputs {decibels(loss):.1f} dB"
    if "dynamic" in recipe.schemes_allowed and site.is_rowwise:
        coding = dynamic_coding(evidence, recipe.smooth)
        left = loss * min(1.0, coding.error / max(choice.error, 1e-30))
        size = evaluate(site.value.tensor.count, bindings)
        made = replace(choice, scheme="dynamic", coding=coding, reason=why)
        found.append(_Exchange(made, left, 1 + WORK_OF_A_RANGE * size))
    if "float" in recipe.schemes_allowed:
        results = sum(evaluate(p.node.outputs[0].tensor.count, bindings) for p in site.products)
        extra = WORK_IN_FLOAT * max(work[site], LEAST_WORK * results)
        made = replace(choice, scheme="float", coding=None, reason=why)
        found.append(_Exchange(made, 0.0, 1 + extra, work[site]))
    return found
