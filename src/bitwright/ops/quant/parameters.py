"""Scales and zero points in gradients: broadcast over a tensor, and sums back to their shape."""

from __future__ import annotations

from bitwright.ir.graph import Value
from bitwright.ir.types import normalize_axis
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import number


def spread_value(b: Builder, parameter: Value, x: Value, axis: int | None, block: int) -> Value:
    """A scale or zero point in a shape that broadcasts over x."""
    if axis is None:
        return b.reshape(parameter, shape=())  # type: ignore[no-any-return]
    at = normalize_axis(axis, x.rank)
    if not block:
        spread = [x.shape[at] if i == at else 1 for i in range(x.rank)]
        return b.reshape(parameter, shape=spread)  # type: ignore[no-any-return]
    shape = parameter.shape
    wide = b.reshape(parameter, shape=(*shape[: at + 1], 1, *shape[at + 1 :]))
    wide = b.expand(wide, shape=(*shape[: at + 1], block, *shape[at + 1 :]))
    whole: Value = b.reshape(wide, shape=(*shape[:at], shape[at] * block, *shape[at + 1 :]))
    if shape[at] * block == x.shape[at]:
        return whole
    return b.slice(whole, starts=[0], stops=[x.shape[at]], steps=[1], axes=[at])  # type: ignore[no-any-return]


def sum_to_parameter(b: Builder, dy: Value, like: Value, axis: int | None, block: int) -> Value:
    """Sums of dy over the elements of each scale; the result has the shape of `like`."""
    if axis is None:
        total = b.reduce_sum(dy, axes=tuple(range(dy.rank)), keepdims=False)
        return b.reshape(total, shape=like.shape)  # type: ignore[no-any-return]
    at = normalize_axis(axis, dy.rank)
    if not block:
        others = tuple(i for i in range(dy.rank) if i != at)
        return b.reduce_sum(dy, axes=others, keepdims=False)  # type: ignore[no-any-return]
    blocks = like.shape[at]
    if blocks * block != dy.shape[at]:
        pads = [0] * (2 * dy.rank)
        pads[dy.rank + at] = blocks * block - dy.shape[at]
        dy = b.pad(dy, number(b, 0.0, dy), pads=pads)
    parts = b.reshape(dy, shape=(*dy.shape[:at], blocks, block, *dy.shape[at + 1 :]))
    return b.reduce_sum(parts, axes=(at + 1,), keepdims=False)  # type: ignore[no-any-return]
