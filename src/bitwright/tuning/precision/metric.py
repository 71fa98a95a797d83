"""The score that a tuned model must keep, and how much of it may be lost.

    "0.5%"    half a percent of the float model's score
    0.01      in units of the score

Without a function of the user, the score is the agreement of the outputs with the float model on
held-out batches: 1 - |error|^2 / |signal|^2 of the worst float output, and the fraction of equal
elements for integer outputs. 0.5% then means an SQNR of at least 23 dB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import BitwrightError
from bitwright.quant.data.batches import Batch
from bitwright.quant.model.sensitivity import Losses

Run = Callable[[Mapping[str, Any]], dict[str, Any]]
Evaluate = Callable[[Run], Any]
AGREEMENT = "agreement with float"


@dataclass(frozen=True)
class MaxDrop:
    """The largest loss of score that is allowed."""

    text: str
    amount: float
    is_relative: bool

    @classmethod
    def of(cls, given: str | float) -> MaxDrop:
        """From "0.5%" or a number."""
        text = str(given).strip()
        is_relative = text.endswith("%")
        try:
            amount = float(text.removesuffix("%")) / (100 if is_relative else 1)
        except ValueError:
            amount = math.nan
        if isinstance(given, bool) or not (amount >= 0 and math.isfinite(amount)):
            raise BitwrightError(
                "max_drop is not a loss of score", expected='"0.5%" or 0.01', found=repr(given)
            )
        return cls(text, amount, is_relative)

    def allowed(self, reference: float) -> float:
        return self.amount * abs(reference) if self.is_relative else self.amount


class Metric:
    """Scores models, and says whether a score is within the allowed drop."""

    def __init__(
        self,
        evaluate: Evaluate | None,
        max_drop: MaxDrop,
        batches: Sequence[Batch],
        lower_is_better: bool = False,
    ) -> None:
        self._evaluate, self.max_drop = evaluate, max_drop
        self._batches, self._sign = batches, -1.0 if lower_is_better else 1.0
        self.name = AGREEMENT if evaluate is None else getattr(evaluate, "__name__", "score")
        self.reference = math.nan
        self._expected: list[dict[str, Any]] = []

    def set_reference(self, run: Run, known: float | None = None) -> float:
        """Score the float model (or use the score that is known), and keep its outputs."""
        self._expected = [_copied(run(batch)) for batch in self._batches]
        if known is None:
            known = 1.0 if self._evaluate is None else self.score(run)
        self.reference = known
        if not math.isfinite(known):
            raise BitwrightError("the float model has no finite score", found=known)
        return known

    def score(self, run: Run) -> float:
        """The score of a model; higher is better unless stated otherwise."""
        if self._evaluate is None:
            return agreement(self._expected, [run(batch) for batch in self._batches])
        return as_number(self._evaluate(run))

    def error(self, run: Run) -> float:
        """The output error energy relative to the signal, of the worst float output."""
        losses = Losses()
        for batch, expected in zip(self._batches, self._expected, strict=True):
            losses.add(expected, run(batch))
        return losses.worst

    def drop(self, score: float) -> float:
        """How much worse a score is than the float model's; negative if it is better."""
        return self._sign * (self.reference - score)

    def is_within(self, score: float | None) -> bool:
        if score is None or not math.isfinite(score):
            return False
        return self.drop(score) <= self.max_drop.allowed(self.reference) * (1 + 1e-12)

    def goodness(self, score: float | None) -> float:
        """A number that is larger for better scores."""
        return -math.inf if score is None or math.isnan(score) else self._sign * score


def agreement(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> float:
    """The worst over outputs of 1 - relative error energy, or of the fraction of equal elements."""
    losses, scores = Losses(), [1.0]
    same: dict[str, list[float]] = {}
    for exact, given in zip(expected, found, strict=True):
        losses.add(exact, given)
        for name, array in exact.items():
            if isinstance(array, np.ndarray) and array.dtype.kind in "biu" and array.size:
                is_equal = array.shape == given[name].shape and array == given[name]
                same.setdefault(name, []).append(float(np.mean(is_equal)))
    scores += [1.0 - loss for loss in losses.relative.values()]
    scores += [float(np.mean(fractions)) for fractions in same.values()]
    return min(scores)


def as_number(found: Any) -> float:
    """A number, or the first number of a dict of scores."""
    if isinstance(found, Mapping):
        if not found:
            raise BitwrightError("the evaluation returned no score", expected="a number")
        found = next(iter(found.values()))
    try:
        return float(np.asarray(found).reshape(()))
    except (TypeError, ValueError):
        raise BitwrightError(
            "the evaluation returned no number", expected="a number", found=type(found).__name__
        ) from None


def _copied(outputs: Mapping[str, Any]) -> dict[str, Any]:
    return {n: np.array(a) if isinstance(a, np.ndarray) else a for n, a in outputs.items()}
