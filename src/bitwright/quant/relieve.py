"""Static ranges that cost the outputs too much are exchanged, the cheapest way first.

Each convolution's range is tried alone in the float model (`quant.effects`). Errors of different
sites hardly know of each other, so that their squares add up; where the sum is above what the
recipe allows, sites are relieved until it is not, those first that bring most for the time they
will take when the model runs:

    float     x is stored and read in f32 instead of codes, and multiplied at a quarter of the speed
    dynamic   x is stored in f32, read for its rows' ranges, and stored again in codes

Work is counted in multiply-adds of codes. What a byte and a row cost in them are round numbers for
today's processors, not a measurement: the same model and data give the same choices everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bitwright.ir.dim import evaluate
from bitwright.quant.algorithms.choosing import Coding, dynamic_coding
from bitwright.quant.algorithms.codes import decibels
from bitwright.quant.assign import Choice
from bitwright.quant.collect import Evidence
from bitwright.quant.effects import Effects
from bitwright.quant.products import Site
from bitwright.quant.recipe import Recipe
from bitwright.quant.work import Work

WORK_OF_A_BYTE = 25
"""Multiply-adds of codes in the time that a byte takes from the third-level cache."""
WORK_OF_A_ROW = 1000
"""In the time that the range of a row takes, besides its bytes."""
WORK_IN_FLOAT = 3
"""For each multiply-add in f32, on top of what it takes in codes."""
TRIED_TOGETHER = 4
WIDER = 6
"""Bytes written and read more where a number is f32 and not a code."""


def open_codings(choices: list[Choice], recipe: Recipe) -> dict[Site, Coding]:
    """The static codings that may be exchanged: of convolutions, unless the recipe names them or
    they lie in a branch."""
    if len(recipe.schemes_allowed) == 1:
        return {}
    return {
        c.site: c.coding
        for c in choices
        if c.scheme == "static"
        and c.coding is not None
        and not c.site.is_inside
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
    work: Work,
) -> list[Choice]:
    """The choices with as few static ranges exchanged as keep the outputs."""
    sites = open_codings(choices, recipe)
    budget = 10 ** (-recipe.static_sqnr / 10)
    if not sites or decibels(effects.together(*sites)) >= recipe.static_sqnr:
        return choices
    alone = _alone(list(sites), effects, budget / len(sites) / 4)
    costs = {c.site: sum(work.of(p.node) for p in c.site.products) for c in choices}
    spare = (1 - recipe.least_share) * sum(costs.values())
    current = {choice.site: choice for choice in choices}
    left = sum(alone.values())
    offers = {
        site: _exchanges(
            current[site], alone[site], evidence[site.name], recipe, costs[site], work.bindings
        )
        for site in sorted(alone, key=lambda s: -alone[s])
        if alone[site] > budget / len(sites) / 4
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


def _alone(sites: list[Site], effects: Effects, little: float) -> dict[Site, float]:
    """What each site costs by itself.

    Sites are first tried a few at once on one batch: where all of them together cost no more than
    `little` for each, they share that evenly and are not looked at one by one.
    """
    found: dict[Site, float] = {}
    for start in range(0, len(sites), TRIED_TOGETHER):
        group = sites[start : start + TRIED_TOGETHER]
        together = effects.together(*group, little=math.inf)
        if together <= little * len(group):
            found.update(dict.fromkeys(group, together / len(group)))
        else:
            found.update({site: effects.together(site, little=little) for site in group})
    return found


def _exchanges(
    choice: Choice,
    loss: float,
    evidence: Evidence,
    recipe: Recipe,
    cost: int,
    bindings: Mapping[str, int],
) -> list[_Exchange]:
    found, site = [], choice.site
    why = f"a static range would leave the outputs {decibels(loss):.1f} dB"
    size = sum(evaluate(value.tensor.count, bindings) for value in site.values)
    wider = 1 + WIDER * WORK_OF_A_BYTE * size
    if "dynamic" in recipe.schemes_allowed and site.is_rowwise:
        coding = dynamic_coding(evidence, recipe.smooth)
        left = loss * min(1.0, coding.error / max(choice.error, 1e-30))
        rows = size // max(1, len(evidence.every.low))
        extra = WIDER * WORK_OF_A_BYTE * size + WORK_OF_A_ROW * rows
        made = replace(choice, scheme="dynamic", coding=coding, reason=why)
        found.append(_Exchange(made, left, wider + extra))
    if "float" in recipe.schemes_allowed:
        made = replace(choice, scheme="float", coding=None, reason=why)
        extra = WORK_IN_FLOAT * cost
        found.append(_Exchange(made, 0.0, wider + extra, cost))
    return found
