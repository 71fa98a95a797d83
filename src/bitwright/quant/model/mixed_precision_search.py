"""Static ranges that cost the outputs too much are exchanged, the cheapest way first.

Each convolution's range is tried alone in the float model (`quant.model.sensitivity`). Errors of different
sites hardly know of each other, so that their squares add up; where the sum is above what the
recipe allows, sites are relieved until it is not, those first that bring most for the time they
will take when the model runs:

    float     x is stored and read in f32 instead of codes, and multiplied at a quarter of the speed
    dynamic   x is stored in f32, read for its rows' ranges, and stored again in codes; windows
              are laid out as rows before

Work is counted in multiply-adds of codes. What a byte and a row cost in them are round numbers for
today's processors, not a measurement: the same model and data give the same choices everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bitwright.ir.dim import evaluate
from bitwright.quant.calibration.stats import CalibrationStats
from bitwright.quant.model.assign import Choice
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.recipe import Recipe
from bitwright.quant.model.sensitivity import SensitivityAnalysis
from bitwright.quant.model.weights.choose import ActivationQuant, dynamic_activation
from bitwright.quant.model.weights.nearest import decibels
from bitwright.quant.model.work import Work

WORK_OF_A_BYTE = 25
"""Multiply-adds of codes in the time that a byte takes from the third-level cache."""
WORK_OF_A_ROW = 1000
"""In the time that the range of a row takes, besides its bytes."""
WORK_IN_FLOAT = 3
"""For each multiply-add in f32, on top of what it takes in codes."""
TRIED_TOGETHER = 4
WIDER = 6
"""Bytes written and read more where a number is f32 and not a code."""
LAID_OUT = 10
"""Bytes written and read for a number of a row that is laid out, in f32 and then as a code."""


def open_activations(
    choices: list[Choice], recipe: Recipe
) -> dict[QuantizationPoint, ActivationQuant]:
    """The static codings that may be exchanged: of convolutions, unless the recipe names them or
    they lie in the body of a loop."""
    if len(recipe.schemes_allowed) == 1:
        return {}
    return {
        c.point: c.activation
        for c in choices
        if c.scheme == "static"
        and c.activation is not None
        and not c.point.is_in_loop
        and all(p.is_conv and recipe.scheme_of(p.name) is None for p in c.point.products)
    }


@dataclass(frozen=True)
class _Exchange:
    choice: Choice
    loss: float
    """That is left with it."""
    work: float
    float_work: int = 0
    """Multiply-adds that leave 8 bits."""


def search_mixed_precision(
    choices: list[Choice],
    stats: Mapping[str, CalibrationStats],
    recipe: Recipe,
    sensitivity: SensitivityAnalysis,
    work: Work,
    is_carried: bool = False,
) -> list[Choice]:
    """The choices with as few static ranges exchanged as keep the outputs.

    Of a model with a carried state (`quant.model.carried_state`) they keep more, whatever part of the
    work that takes out of 8 bits: an error there is made again in every step.
    """
    points = open_activations(choices, recipe)
    limit = max(recipe.static_sqnr_db, recipe.carried_state_sqnr_db if is_carried else 0.0)
    budget = 10 ** (-limit / 10)
    has_branches = any(point.is_inside for point in points)
    if not points or (not has_branches and decibels(sensitivity.together(*points)) >= limit):
        return choices
    alone = _alone(list(points), sensitivity, budget / len(points) / 4)
    costs = {c.point: sum(work.of(p.node) for p in c.point.products) for c in choices}
    spare = (1 - recipe.min_int8_fraction) * sum(costs.values())
    current = {choice.point: choice for choice in choices}
    every = [
        exchange
        for point in sorted(alone, key=lambda s: -alone[s])
        if alone[point] > budget / len(points) / 4
        for exchange in _exchanges(
            current[point], alone[point], stats[point.name], recipe, costs[point], work.bindings
        )
    ]
    losses, spent = dict(alone), dict.fromkeys(alone, 0.0)
    while path := _worst_path(losses, budget):
        offers = [one for one in every if path[0].startswith(one.choice.point.path)]
        if is_carried:  # any part of the work may leave 8 bits, so that as few sites do as can be
            in_8_bits = [one for one in offers if not one.float_work]
            best = _best(in_8_bits, losses, spent) or _best(offers, losses)
        else:
            best = _best([one for one in offers if one.float_work <= spare], losses, spent)
        if best is None:
            break
        point = best.choice.point
        current[point] = best.choice
        spare -= best.float_work
        losses[point], spent[point] = best.loss, best.work
    return [current[choice.point] for choice in choices]


def _worst_path(losses: Mapping[QuantizationPoint, float], budget: float) -> list[str]:
    """The branch whose sites, with those around it, lose most, if that is above the budget."""
    paths = dict.fromkeys(point.path for point in losses)
    totals = {
        path: sum(loss for point, loss in losses.items() if path.startswith(point.path))
        for path in paths
    }
    worst = max(totals, key=lambda path: totals[path])
    return [worst] if totals[worst] > budget else []


def _best(
    exchanges: list[_Exchange],
    losses: Mapping[QuantizationPoint, float],
    spent: Mapping[QuantizationPoint, float] | None = None,
) -> _Exchange | None:
    """The exchange that brings most, for the work it adds to what was spent if that is given."""
    best, gain = None, 0.0
    for exchange in exchanges:
        point = exchange.choice.point
        gained = losses[point] - exchange.loss
        if spent is not None:
            gained /= max(1.0, exchange.work - spent[point])
        if gained > gain:
            best, gain = exchange, gained
    return best


def _alone(
    points: list[QuantizationPoint], sensitivity: SensitivityAnalysis, little: float
) -> dict[QuantizationPoint, float]:
    """What each site costs by itself.

    Sites are first tried a few at once on one batch: where all of them together cost no more than
    `little` for each, they share that evenly and are not looked at one by one. Those in branches
    are tried on every batch, since not every one comes by.
    """
    found = {
        point: sensitivity.together(point, reached=True) for point in points if point.is_inside
    }
    outside = [point for point in points if not point.is_inside]
    for start in range(0, len(outside), TRIED_TOGETHER):
        group = outside[start : start + TRIED_TOGETHER]
        together = sensitivity.together(*group, little=math.inf)
        if together <= little * len(group):
            found.update(dict.fromkeys(group, together / len(group)))
        else:
            found.update({point: sensitivity.together(point, little=little) for point in group})
    return found


def _exchanges(
    choice: Choice,
    loss: float,
    stats: CalibrationStats,
    recipe: Recipe,
    cost: int,
    bindings: Mapping[str, int],
) -> list[_Exchange]:
    found, point = [], choice.point
    why = f"a static range would leave the outputs {decibels(loss):.1f} dB"
    size = sum(evaluate(value.tensor.count, bindings) for value in point.values)
    wider = 1 + WIDER * WORK_OF_A_BYTE * size
    if "dynamic" in recipe.schemes_allowed and point.has_rows:
        activation = dynamic_activation(stats, recipe.smooth)
        left = loss * min(1.0, activation.error / max(choice.error, 1e-30))
        rows = size // max(1, len(stats.every.low))
        extra = WIDER * WORK_OF_A_BYTE * size
        for product in point.products:
            if not product.is_rowwise:  # its windows are laid out before
                rows = evaluate(product.node.outputs[0].tensor.count, bindings)
                rows //= max(1, product.weight.shape[0])
                extra += LAID_OUT * WORK_OF_A_BYTE * rows * int(product.matrix.shape[2])
        extra += WORK_OF_A_ROW * rows
        made = replace(choice, scheme="dynamic", activation=activation, reason=why)
        found.append(_Exchange(made, left, wider + extra))
    if "float" in recipe.schemes_allowed:
        made = replace(choice, scheme="float", activation=None, reason=why)
        extra = WORK_IN_FLOAT * cost
        found.append(_Exchange(made, 0.0, wider + extra, cost))
    return found
