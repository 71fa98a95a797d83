"""Gradients of pools.

max_pool_backward  each dy is added to the pixel of x that its window's maximum came from: the
                   first of equal ones, the last NaN, never padding, as in PyTorch
avg_pool_backward  each dy, divided by the pixels that its window averages, is added to them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.nn.pool import (
    POOL_ATTRS,
    arrange,
    gather_flat,
    infer_pool,
    max_pool_indices,
    pixel_counts,
)


def _infer_max(dy: TensorType, x: TensorType, **attrs: Any) -> TensorType:
    expect.floating("x", x)
    expect.same_dtype(x, dy)
    expect.shape("dy", dy, infer_pool(x, **attrs).shape)
    return x


def _max_backward(dy: Array, x: Array, **attrs: Any) -> Array:
    _, index = max_pool_indices(x, 0, **attrs)
    inside = index >= 0
    result = np.zeros(x.size)
    np.add.at(result, index[inside], wide(dy)[inside])
    return result.reshape(x.shape)


def _grad_max(b: Builder, node: Node, dys: list[Any]) -> list[Value]:
    """The gradient of dy: the pixels that it was added to. The choice of pixels is constant."""
    _, x = node.operands
    _, index = b.max_pool_indices(x, **node.attrs)
    found = gather_flat(b, dys[0], b.maximum(index, 0))
    return [b.where(b.ge(index, 0), found, 0.0)]


def _infer_avg(
    dy: TensorType, shape: Sequence[Size], count_include_pad: bool, **attrs: Any
) -> TensorType:
    expect.floating("dy", dy)
    x = dy.with_shape(shape)
    expect.shape("dy", dy, infer_pool(x, **attrs).shape)
    return x


def _avg_backward(dy: Array, shape: Sequence[int], count_include_pad: bool, **attrs: Any) -> Array:
    windows, counts = arrange(shape, **attrs)
    pixels = pixel_counts(windows, counts, shape[2:], count_include_pad)
    part = wide(dy) / np.maximum(pixels, 1)
    lead = part.shape[:2]
    columns = np.broadcast_to(
        part.reshape(*lead, *(1,) * windows.rank, *counts), (*lead, *windows.kernel, *counts)
    )
    return windows.fold(columns, shape[2:])


def _grad_avg(b: Builder, node: Node, dys: list[Any]) -> list[Value]:
    attrs = {name: value for name, value in node.attrs.items() if name != "shape"}
    return [b.avg_pool(dys[0], **attrs)]


def _cases() -> list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]]:
    """Shapes of x, windows of each axis, and attributes."""
    shape = (2, 3, 7, 8)
    around: dict[str, Any] = {"pads": (1, 1, 1, 1), "ceil": True}
    return [
        (shape, (6, 6), {"kernel": (2, 3)}),
        (shape, (4, 4), {"kernel": (3, 2), "strides": (2, 2), "pads": (1, 0, 2, 1)}),
        (shape, (4, 3), {"kernel": (3, 3), "strides": (2, 3), **around}),
        (shape, (2, 6), {"kernel": (2, 2), "dilations": (3, 2), "strides": (2, 1)}),
        ((1, 2, 9), (5,), {"kernel": (2,), "strides": (2,), "ceil": True}),
        ((1, 2, 4, 5, 4), (3, 4, 2), {"kernel": (2, 2, 3)}),
        ((0, 2, 5), (4,), {"kernel": (2,)}),
    ]


def _max_samples() -> list[Sample]:
    found = []
    for shape, counts, attrs in _cases():
        found.append(sample(draw(*shape[:2], *counts), draw(*shape, seed=1), **attrs))
    ties = draw(1, 2, 6, 6, dtype="i8").astype(np.float32)
    x = draw(1, 2, 5, dtype="bf16")
    return [
        *found,
        sample(draw(1, 2, 5, 5), ties, kernel=(2, 2)),
        sample(draw(1, 2, 4, dtype="bf16"), x, kernel=(2,), tolerance=2e-2),
    ]


def _avg_samples() -> list[Sample]:
    return [
        sample(draw(*shape[:2], *counts), shape=shape, count_include_pad=include, **attrs)
        for shape, counts, attrs in _cases()
        for include in (False, True)
    ]


OPDEFS = [
    OpDef(
        "max_pool_backward",
        Kind.REDUCTION,
        "dy, x",
        infer=_infer_max,
        reference=_max_backward,
        grad=_grad_max,
        samples=_max_samples,
        attrs=POOL_ATTRS,
        doc="The gradient of max_pool: each dy added to the first maximum of its window.",
    ),
    OpDef(
        "avg_pool_backward",
        Kind.REDUCTION,
        "dy",
        infer=_infer_avg,
        reference=_avg_backward,
        grad=_grad_avg,
        samples=_avg_samples,
        attrs={"shape": Attr("sizes"), **POOL_ATTRS, "count_include_pad": Attr("bool", False)},
        doc="The gradient of avg_pool, whose operand has the shape given.",
    ),
]
