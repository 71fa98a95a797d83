"""Ranges that are observed in the first steps of training and then frozen.

A moving average is a state. A step reads the value that the last step left, so that training and
evaluation with the same states compute the same, and updates it while fewer than `steps` steps were
taken:

    range' = range + momentum * (observed - range)   if step < steps, else range
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder

PREFIX = "qat."
"""The start of the names of states that observers keep."""


@dataclass
class Observers:
    """The moving averages of one training graph."""

    steps: int
    momentum: float
    _open: Value | None = None

    def averaged(self, b: Builder, name: str, start: Array, observed: Value) -> Value:
        """A state that starts at an array and follows a value."""
        state = b.state(PREFIX + name, start)
        b.update(state, self._moved(b, state, observed))
        return state

    def ranges(
        self, b: Builder, name: str, x: Value, scale: Array, zero: Array, low: int, high: int
    ) -> tuple[Value, Value]:
        """Scale and zero point of an activation, from the average of its smallest and largest
        values; both start as given."""
        zeros = np.float32(zero.reshape(-1)[0])
        step = np.float32(scale.reshape(-1)[0])
        every = tuple(range(x.rank))
        nothing = b.constant(np.float32(0))
        seen = (
            b.minimum(b.reduce_min(x, axes=every, keepdims=False), nothing),
            b.maximum(b.reduce_max(x, axes=every, keepdims=False), nothing),
        )
        ends = []
        for word, end, found in zip(("low", "high"), (low, high), seen, strict=True):
            at = np.asarray((np.float32(end) - zeros) * step, np.float32)
            state = b.state(f"{PREFIX}{name}.{word}", at)
            ends.append(self._moved(b, state, found))
            b.update(state, ends[-1])
        held = b.state(f"{PREFIX}{name}.scale", np.asarray(step))
        point = b.state(f"{PREFIX}{name}.zero_point", zero.reshape(()))
        levels = b.constant(np.float32(high - low))
        width = b.maximum(b.sub(ends[1], ends[0]), b.constant(np.float32(1e-30)))
        wide = b.div(width, levels)
        offset = b.sub(b.constant(np.float32(low)), b.div(ends[0], wide))
        bounds = (b.constant(np.float32(end)) for end in (low, high))
        moved = b.cast(b.round(b.clip(offset, *bounds)), to=point.dtype)
        b.update(held, b.where(self._observes(b), wide, held))
        b.update(point, b.where(self._observes(b), moved, point))
        return held, point

    def _moved(self, b: Builder, state: Value, observed: Value) -> Value:
        rate = b.constant(np.float32(self.momentum))
        moved = b.add(state, b.mul(rate, b.sub(observed, state)))
        return b.where(self._observes(b), moved, state)  # type: ignore[no-any-return]

    def _observes(self, b: Builder) -> Value:
        """Whether this step still observes."""
        if self._open is None:
            step = b.state(f"{PREFIX}step", np.zeros((), np.int64))
            b.update(step, b.add(step, b.constant(np.int64(1))))
            self._open = b.lt(step, b.constant(np.int64(self.steps)))
        return self._open
