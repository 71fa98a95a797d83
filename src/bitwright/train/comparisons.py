"""Comparisons of an output y with a target t of the same shape, each reduced to one number.

    "mse", "l1"   mean of (y - t)², of |y - t|
    "cosine"      1 - cosine of the angle between rows (the last axis), on average
    Pooled        one of these for the means over positions: what a sentence embedding is

A function `compare(b, y, t)` on builder values is a comparison too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitwright.errors import TrainingError
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Value, nearest
from bitwright.ops.core.builder import Builder

Comparison = Callable[[Builder, Value, Value], Value]


def mean(b: Builder, x: Value) -> Value:
    """The mean of all elements."""
    axes = tuple(range(x.rank))
    return b.reduce_mean(x, axes=axes, keepdims=False) if axes else x


def _mse(b: Builder, y: Value, t: Value) -> Value:
    difference = b.sub(y, t)
    return mean(b, b.mul(difference, difference))


def _l1(b: Builder, y: Value, t: Value) -> Value:
    return mean(b, b.abs(b.sub(y, t)))


def _cosine(b: Builder, y: Value, t: Value) -> Value:
    """1 - the cosine of the angle between rows (the last axis), on average.

    Norms are at least 1e-8, as in PyTorch; the cosine with a row of zeros is 0.
    """
    dot, yy, tt = (
        b.reduce_sum(b.mul(p, q), axes=[-1], keepdims=False) for p, q in ((y, t), (y, y), (t, t))
    )
    inverses = [b.rsqrt(b.maximum(square, 1e-16)) for square in (yy, tt)]
    cosine = b.mul(b.mul(dot, inverses[0]), inverses[1])
    return b.sub(1.0, mean(b, cosine))  # type: ignore[no-any-return]


COMPARISONS: dict[str, Comparison] = {"mse": _mse, "l1": _l1, "cosine": _cosine}


@dataclass(frozen=True)
class Pooled:
    """Compares means over positions: of y [n, positions ..., features] along all middle axes.

    `mask` names an input of the model [n, positions ...] that weighs the positions, such as
    "attention_mask"; those with weight 0 are left out. `compare` is the name of a comparison.
    """

    mask: str | None = None
    compare: str = "cosine"

    def __post_init__(self) -> None:
        if self.compare not in COMPARISONS:
            raise TrainingError(
                f"Pooled: there is no comparison {self.compare!r}",
                expected=", ".join(COMPARISONS),
                hint=nearest(str(self.compare), COMPARISONS),
            )

    def __call__(self, b: Builder, y: Value, t: Value) -> Value:
        weights = self._weights(b, y)
        means = [self._mean(b, value, weights) for value in (y, t)]
        return COMPARISONS[self.compare](b, *means)

    def _mean(self, b: Builder, x: Value, weights: Value | None) -> Value:
        axes = tuple(range(1, x.rank - 1))
        if weights is None:
            return b.reduce_mean(x, axes=axes, keepdims=False)  # type: ignore[no-any-return]
        total = b.reduce_sum(b.mul(x, weights), axes=axes, keepdims=False)
        count = b.reduce_sum(weights, axes=axes, keepdims=False)
        return b.div(total, b.maximum(count, 1e-9))  # type: ignore[no-any-return]

    def _weights(self, b: Builder, y: Value) -> Value | None:
        """The mask in f32 as [n, positions ..., 1]."""
        if y.rank < 3:
            raise TrainingError(
                "Pooled: the output has no axis of positions",
                expected="[n, positions ..., features]",
                found=repr(y),
            )
        if self.mask is None:
            return None
        inputs = {node.name: node.outputs[0] for node in b.nodes if node.op == "input"}
        found = inputs.get(self.mask)
        if found is None:
            raise TrainingError(
                f"Pooled: the model has no input {self.mask!r}",
                hint=nearest(self.mask, inputs),
            )
        if found.rank != y.rank - 1:
            raise TrainingError(
                f"Pooled: the mask {self.mask!r} does not fit the output",
                expected=f"{y.rank - 1} axes: those of {y!r} without the last",
                found=repr(found),
            )
        mask = found if found.dtype == f32 else b.cast(found, to=f32)
        return b.reshape(mask, shape=(*mask.shape, 1))  # type: ignore[no-any-return]
