"""What would reduce a line of the ledger, and what it costs: bytes of weights, and time measured on
this machine in rounds that alternate between the variants.

    restore_float        the layer in float
    float_activations    the layer's activations in float, its weights as they are
    dynamic_range        ranges of the activations computed at run time
    per_token            the same with one range per token, for products
    finer_weights        its weights in blocks of 32, activations in float, for products
    smoothing            activations divided by one factor per channel, for products
    correct_bias         a constant that cancels the layer's mean error
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bitwright.executable import Executable
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Value
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.recipe import INT8_SCHEMES
from bitwright.quant.model.report import weight_bytes
from bitwright.tuning.attribution import BIAS, run
from bitwright.tuning.float_layers import Change, in_float, restore_layers
from bitwright.tuning.local_errors import (
    CLIPPING,
    ROUNDING,
    SHIFT,
    WEIGHTS,
    LocalErrors,
    Pair,
)
from bitwright.tuning.matching import LayerPair, Matching
from bitwright.tuning.requantized import Ends, per_token, with_finer_weights, with_smoothing

RESTORE, FLOAT_ACTIVATIONS, DYNAMIC, CORRECT, PER_TOKEN, FINER, SMOOTHING = (
    "restore_float",
    "float_activations",
    "dynamic_range",
    "correct_bias",
    "per_token",
    "finer_weights",
    "smoothing",
)
TEXTS = {
    RESTORE: "restore this layer to float",
    FLOAT_ACTIVATIONS: "keep its activations in float",
    DYNAMIC: "compute its range at run time",
    CORRECT: "correct its bias",
    PER_TOKEN: "compute its range per token",
    FINER: "round its weights in blocks of 32",
    SMOOTHING: "smooth its activations",
}
ROUNDS = 15
ENOUGH = 0.5
"""The fraction of the best fix's effect from which the fastest fix is chosen."""


def action_for(cause: str, scheme: str) -> str:
    """The change that removes a cause at the least cost."""
    if cause == BIAS:
        return CORRECT
    if scheme == "static" and cause in (CLIPPING, SHIFT, ROUNDING):
        return DYNAMIC if cause != ROUNDING else FLOAT_ACTIVATIONS
    return RESTORE


def actions_for(cause: str, scheme: str, is_product: bool) -> list[str]:
    """The changes that may reduce a cause, that of `action_for` first."""
    found = [action_for(cause, scheme)]
    if is_product and cause == WEIGHTS:
        found.append(FINER)
    if is_product and cause in (CLIPPING, SHIFT, ROUNDING):
        found += [PER_TOKEN] * (scheme in ("static", "dynamic_per_tensor"))
        found += [SMOOTHING] * (scheme in INT8_SCHEMES)
    return list(dict.fromkeys([*found, RESTORE]))


@dataclass
class Fix:
    """A change of one layer and its measured cost; None where it was not measured."""

    action: str
    text: str
    bytes: int | None = None
    """Weights added to the file."""
    seconds: float | None = None
    """Time added to a run."""
    metric: float | None = None
    """Change of the user's metric."""
    sqnr_db: float | None = None
    """Measured SQNR of the outputs with this change alone."""
    error: float | None = None
    """Measured error energy of the outputs with this change alone."""


class Variants:
    """Quantized graphs with one layer changed."""

    def __init__(
        self,
        matching: Matching,
        shares: Mapping[str, Array],
        means: Mapping[str, Array],
        seen: Mapping[str, Ends],
    ) -> None:
        """`means` are the mean errors of results, `seen` the channel ranges of products."""
        self._matching, self._shares, self._means, self._seen = matching, shares, means, seen
        self._bytes = weight_bytes(matching.quantized)

    def graph(self, layer: str, action: str, scheme: str) -> Graph:
        """The graph with a layer changed, which has this scheme."""
        changes: dict[str, Change] = {
            RESTORE: in_float,
            FLOAT_ACTIVATIONS: _with_float_activations,
            DYNAMIC: _with_dynamic_range,
            CORRECT: self._corrected,
            PER_TOKEN: _with_ranges_per_token,
            FINER: with_finer_weights,
            SMOOTHING: with_smoothing(self._seen, scheme == "static"),
        }
        return restore_layers(self._matching, [layer], self._shares, change=changes[action])

    def added_bytes(self, graph: Graph) -> int:
        return weight_bytes(graph) - self._bytes

    def _corrected(self, errors: LocalErrors, site: LayerPair) -> Value:
        b, found = errors.b, errors.here[site.partner]
        mean = self._means.get(site.value.name)
        if mean is None:
            return found
        axis = site.channel_axis % site.value.rank
        shape = [-1 if i == axis else 1 for i in range(site.value.rank)]
        shift = errors.scaled(site, b.constant(-mean.reshape(shape), "f32"))
        return b.add(found, shift)  # type: ignore[no-any-return]


def _with_float_activations(errors: LocalErrors, site: LayerPair) -> Value:
    return errors.variant(site, lambda pair, x: x)[0]


def _with_dynamic_range(errors: LocalErrors, site: LayerPair) -> Value:
    b = errors.b

    def pair(found: Pair, x: Value) -> Value:
        return b.dequantize(*b.dynamic_quantize(x, to="u8", per_token=False))  # type: ignore[no-any-return]

    return errors.variant(site, pair)[0]


def _with_ranges_per_token(errors: LocalErrors, site: LayerPair) -> Value:
    return errors.variant(site, lambda pair, x: per_token(errors, x))[0]


def best_of(fixes: Sequence[Fix], error: float) -> Fix:
    """Of the measured fixes that remove about as much of the error as the best, the fastest."""
    gains = [error - (error if fix.error is None else fix.error) for fix in fixes]
    most = max(gains)
    if most <= 0:
        return fixes[0]
    good = [fix for fix, gain in zip(fixes, gains, strict=True) if gain >= ENOUGH * most]
    return min(good, key=lambda fix: fix.seconds or 0.0)


def time_added(
    base: Executable, variants: Sequence[Executable], batch: Batch, rounds: int = ROUNDS
) -> list[float]:
    """Seconds that each variant adds to a run of the base, medians of alternating rounds."""
    every = [base, *variants]
    times: list[list[float]] = [[] for _ in every]
    for number in range(rounds + 1):
        for exe, found in zip(every, times, strict=True):
            begin = time.perf_counter()
            run(exe, batch)
            if number:  # the first round warms up
                found.append(time.perf_counter() - begin)
    first, *others = (median(found) for found in times)
    return [one - first for one in others]


def describe(fix: Fix, before_db: float | None, metric: str) -> str:
    """The fix and its effects in one line."""
    facts = []
    if fix.metric is not None:
        facts.append(f"{fix.metric:+.4g} {metric}")
    if fix.sqnr_db is not None and before_db is not None:
        facts.append(f"{fix.sqnr_db - before_db:+.2f} dB")
    if fix.seconds is not None:
        facts.append(f"{fix.seconds * 1e3:+.2f} ms")
    if fix.bytes is not None:
        facts.append(_size(fix.bytes))
    return TEXTS[fix.action] + (f": {', '.join(facts)}" if facts else "")


def _size(count: int) -> str:
    """Added bytes with a unit that shows them."""
    if abs(count) >= 1e6:
        return f"{count / 1e6:+.2f} MB"
    return f"{count / 1e3:+.1f} kB" if abs(count) >= 1e3 else f"{count:+d} B"


def score(evaluate: Any, exe: Executable) -> tuple[str, float]:
    """Name and value of the user's metric; the first one of several."""
    found = evaluate(exe)
    if isinstance(found, Mapping):
        name = str(next(iter(found)))
        return name, float(np.asarray(found[name]).reshape(()))
    return "score", float(np.asarray(found).reshape(()))
