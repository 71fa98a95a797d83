"""Learning-rate schedules: a factor of the optimizer's rate for each step, counted from 0.

    warmup(500) * cosine(10_000)                 # products compose
    constant().then(1_000, cosine(9_000))        # another schedule from step 1000 on

Any function from a step to a factor is a schedule too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.errors import TrainingError


@dataclass(frozen=True)
class Schedule:
    """A factor by step; `text` describes it and identifies it in a checkpoint."""

    factor: Callable[[int], float]
    text: str

    def __call__(self, step: int) -> float:
        return float(self.factor(step))

    def __mul__(self, other: Schedule | float) -> Schedule:
        right = schedule_of(other)
        return Schedule(lambda step: self(step) * right(step), f"{self.text} * {right.text}")

    __rmul__ = __mul__

    def then(self, steps: int, after: Schedule | float) -> Schedule:
        """This schedule for `steps` steps, then `after`, whose steps start at 0."""
        _require_steps(steps, 0)
        later = schedule_of(after)
        return Schedule(
            lambda step: self(step) if step < steps else later(step - steps),
            f"({self.text}).then({steps}, {later.text})",
        )

    def __repr__(self) -> str:
        return self.text


def constant(factor: float = 1.0) -> Schedule:
    """The same factor in every step."""
    return Schedule(lambda step: factor, f"constant({factor})")


def warmup(steps: int, start: float = 0.0) -> Schedule:
    """Linear from `start` to 1: step k has start + (1 - start) * (k + 1) / steps, at most 1."""
    _require_steps(steps, 0)

    def factor(step: int) -> float:
        return 1.0 if step >= steps else start + (1 - start) * (step + 1) / steps

    return Schedule(factor, f"warmup({steps}, {start})")


def cosine(steps: int, final: float = 0.0) -> Schedule:
    """Half a cosine from 1 at step 0 to `final` at `steps`, and `final` afterwards."""
    _require_steps(steps)

    def factor(step: int) -> float:
        part = min(step, steps) / steps
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * part))

    return Schedule(factor, f"cosine({steps}, {final})")


def linear(steps: int, final: float = 0.0) -> Schedule:
    """Linear from 1 at step 0 to `final` at `steps`, and `final` afterwards."""
    _require_steps(steps)

    def factor(step: int) -> float:
        return 1 + (final - 1) * min(step, steps) / steps

    return Schedule(factor, f"linear({steps}, {final})")


def step_decay(at: int | Sequence[int], factor: float = 0.1) -> Schedule:
    """A product with `factor` every `at` steps, or at each of the steps listed."""
    if isinstance(at, int):
        _require_steps(at)
        return Schedule(lambda now: factor ** (now // at), f"step_decay({at}, {factor})")
    places = sorted(at)
    return Schedule(
        lambda now: factor ** sum(now >= place for place in places),
        f"step_decay({places}, {factor})",
    )


def schedule_of(given: Any) -> Schedule:
    """A schedule from a schedule, a number or a function of the step; None means constant."""
    if given is None:
        return constant()
    if isinstance(given, Schedule):
        return given
    if isinstance(given, (int, float)):
        return constant(float(given))
    if callable(given):
        return Schedule(given, name_of(given))
    raise TrainingError(
        "this is not a schedule",
        expected="one of bw.train, a number, or a function of the step",
        found=repr(given),
    )


def name_of(function: Any) -> str:
    """The name of a function or a callable object, which is the same in another process."""
    inner = getattr(function, "func", function)  # of functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _require_steps(steps: int, least: int = 1) -> None:
    if steps < least:
        raise TrainingError(
            "a schedule has too few steps", expected=f"at least {least}", found=steps
        )
