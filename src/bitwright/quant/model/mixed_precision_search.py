"""Mixed-precision search: replaces static ranges that cost the outputs too much accuracy.

`quant.model.sensitivity` measures each convolution's static range alone in the float model. Errors
of different points are nearly independent, so their squares add. While the sum exceeds the recipe's
limit, the search replaces the static range with the largest gain per added run time:

    float               x is stored and read in f32, and multiplied at a quarter of the speed
    dynamic_per_token   x is stored in f32, read for the ranges of its rows, and quantized;
                        convolution windows are first copied into rows (im2col)

Run time is counted in int8 multiply-adds. The costs of a byte and of a row are fixed round numbers,
not measurements, so that the same model and data give the same choices on every machine.
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

MACS_PER_BYTE = 25
"""Int8 multiply-adds in the time of one byte from the L3 cache."""
MACS_PER_ROW = 1000
"""The same for the range of a row, in addition to its bytes."""
EXTRA_MACS_IN_FLOAT = 3
"""For each f32 multiply-add, in addition to its int8 cost."""
GROUP_SIZE = 4
"""Points measured together first."""
EXTRA_BYTES_F32 = 6
"""Additional bytes written and read per value in f32 instead of u8."""
BYTES_IM2COL = 10
"""Bytes written and read per value copied into a row, in f32 and then as u8."""


def open_activations(
    choices: list[Choice], recipe: Recipe
) -> dict[QuantizationPoint, ActivationQuant]:
    """Static ranges that the search may replace: of convolutions that the recipe does not name,
    outside of loops."""
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
class _Candidate:
    choice: Choice
    loss: float
    """The output error that remains."""
    work: float
    float_work: int = 0
    """Multiply-adds that move from int8 to float."""


def search_mixed_precision(
    choices: list[Choice],
    stats: Mapping[str, CalibrationStats],
    recipe: Recipe,
    sensitivity: SensitivityAnalysis,
    work: Work,
    is_carried: bool = False,
) -> list[Choice]:
    """The choices with static ranges replaced until the output error is within the limit.

    A model with a carried state (`quant.model.carried_state`) has a tighter limit and no minimum
    int8 fraction, because its errors accumulate over the steps.
    """
    points = open_activations(choices, recipe)
    limit = max(recipe.static_sqnr_db, recipe.carried_state_sqnr_db if is_carried else 0.0)
    budget = 10 ** (-limit / 10)
    has_branches = any(point.is_inside for point in points)
    if not points or (not has_branches and decibels(sensitivity.output_error(*points)) >= limit):
        return choices
    alone = _alone(list(points), sensitivity, budget / len(points) / 4)
    costs = {c.point: sum(work.macs(p.node) for p in c.point.products) for c in choices}
    spare = (1 - recipe.min_int8_fraction) * sum(costs.values())
    current = {choice.point: choice for choice in choices}
    candidates = [
        candidate
        for point in sorted(alone, key=lambda s: -alone[s])
        if alone[point] > budget / len(points) / 4
        for candidate in _candidates(
            current[point], alone[point], stats[point.name], recipe, costs[point], work.bindings
        )
    ]
    losses, spent = dict(alone), dict.fromkeys(alone, 0.0)
    while path := _worst_path(losses, budget):
        open_ = [one for one in candidates if path[0].startswith(one.choice.point.path)]
        if is_carried:  # no minimum int8 fraction: move as few points to float as possible
            int8 = [one for one in open_ if not one.float_work]
            best = _best(int8, losses, spent) or _best(open_, losses)
        else:
            best = _best([one for one in open_ if one.float_work <= spare], losses, spent)
        if best is None:
            break
        point = best.choice.point
        current[point] = best.choice
        spare -= best.float_work
        losses[point], spent[point] = best.loss, best.work
    return [current[choice.point] for choice in choices]


def _worst_path(losses: Mapping[QuantizationPoint, float], budget: float) -> list[str]:
    """The branch with the largest total loss, its enclosing points included, if over budget."""
    paths = dict.fromkeys(point.path for point in losses)
    totals = {
        path: sum(loss for point, loss in losses.items() if path.startswith(point.path))
        for path in paths
    }
    worst = max(totals, key=lambda path: totals[path])
    return [worst] if totals[worst] > budget else []


def _best(
    candidates: list[_Candidate],
    losses: Mapping[QuantizationPoint, float],
    spent: Mapping[QuantizationPoint, float] | None = None,
) -> _Candidate | None:
    """The candidate with the largest gain, per work added to `spent` if that is given."""
    best, best_gain = None, 0.0
    for candidate in candidates:
        point = candidate.choice.point
        gain = losses[point] - candidate.loss
        if spent is not None:
            gain /= max(1.0, candidate.work - spent[point])
        if gain > best_gain:
            best, best_gain = candidate, gain
    return best


def _alone(
    points: list[QuantizationPoint], sensitivity: SensitivityAnalysis, negligible: float
) -> dict[QuantizationPoint, float]:
    """The output error of each point alone.

    Small groups are measured first, on one batch. If a group's error is at most `negligible` per
    point, its points share it evenly and are not measured one by one. Points in branches are
    measured on every batch, because not every batch reaches a branch.
    """
    found = {
        point: sensitivity.output_error(point, only_reached=True)
        for point in points
        if point.is_inside
    }
    outside = [point for point in points if not point.is_inside]
    for start in range(0, len(outside), GROUP_SIZE):
        group = outside[start : start + GROUP_SIZE]
        error = sensitivity.output_error(*group, negligible=math.inf)
        if error <= negligible * len(group):
            found.update(dict.fromkeys(group, error / len(group)))
        else:
            for point in group:
                found[point] = sensitivity.output_error(point, negligible=negligible)
    return found


def _candidates(
    choice: Choice,
    loss: float,
    stats: CalibrationStats,
    recipe: Recipe,
    cost: int,
    bindings: Mapping[str, int],
) -> list[_Candidate]:
    """The replacements of one static range: dynamic per-token ranges, and float."""
    found, point = [], choice.point
    why = f"a static range would leave the outputs {decibels(loss):.1f} dB"
    size = sum(evaluate(value.tensor.count, bindings) for value in point.values)
    wider = 1 + EXTRA_BYTES_F32 * MACS_PER_BYTE * size
    if "dynamic_per_token" in recipe.schemes_allowed and point.has_rows:
        activation = dynamic_activation(stats, recipe.smooth, recipe.activation_format)
        left = loss * min(1.0, activation.error / max(choice.error, 1e-30))
        rows = size // max(1, len(stats.every.low))
        extra = EXTRA_BYTES_F32 * MACS_PER_BYTE * size
        for product in point.products:
            if not product.is_rowwise:  # needs im2col
                rows = evaluate(product.node.outputs[0].tensor.count, bindings)
                rows //= max(1, product.weight.shape[0])
                extra += BYTES_IM2COL * MACS_PER_BYTE * rows * int(product.matrix.shape[2])
        extra += MACS_PER_ROW * rows
        made = replace(choice, scheme="dynamic_per_token", activation=activation, reason=why)
        found.append(_Candidate(made, left, wider + extra))
    if "float" in recipe.schemes_allowed:
        made = replace(choice, scheme="float", activation=None, reason=why)
        extra = EXTRA_MACS_IN_FLOAT * cost
        found.append(_Candidate(made, 0.0, wider + extra, cost))
    return found
