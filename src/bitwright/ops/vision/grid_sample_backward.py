"""Gradients of grid_sample, which is linear in x and piecewise smooth in the grid.

grid_sample_backward   dx[n, c, tap] += weight(tap) * dy[n, c, o...]
grid_sample_slopes     d y[n, c, o...] / d grid[n, o..., axis], with the axis last
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from bitwright.ir.graph import Node
from bitwright.ir.types import Shape, TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import (
    Array,
    Attr,
    Kind,
    NonDifferentiable,
    OpDef,
    Sample,
    draw,
    sample,
)
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.shape.gather import check_shape
from bitwright.ops.vision.grid_sample import (
    ATTRS,
    grid_gradient,
    grid_taps,
    infer_grid_sample,
    interpolated,
)


def _infer_backward(dy: TensorType, grid: TensorType, shape: Shape, **attrs: Any) -> TensorType:
    expect.floating("dy", dy)
    expect.shape("dy", dy, infer_grid_sample(dy.with_shape(shape), grid, **attrs).shape)
    return dy.with_shape(shape)


def _backward(dy: Array, grid: Array, shape: tuple[int, ...], **attrs: Any) -> Array:
    check_shape("dy", dy.shape, (*shape[:2], *grid.shape[1:-1]))
    image = np.zeros((shape[0], *shape[2:], shape[1]))
    if dy.size and image.size:
        batch = np.arange(shape[0]).reshape(-1, *(1,) * (grid.ndim - 2))
        rows = np.moveaxis(wide(dy), 1, -1)
        for taps in product(*grid_taps(grid, shape[2:], **attrs)):
            weight = np.prod([w for _, w in taps], axis=0)[..., None]
            places = (batch, *(index for index, _ in taps))
            np.add.at(image, places, np.where(weight == 0, 0, rows * weight))
    return np.moveaxis(image, -1, 1)


def _grad_backward(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """The op is linear in dy, and its transpose is grid_sample."""
    dy, grid = node.operands
    attrs = {name: node.attrs[name] for name in ATTRS}
    return [b.grid_sample(dys[0], grid, **attrs), grid_gradient(b, dy, dys[0], grid, attrs)]


def _infer_slopes(x: TensorType, grid: TensorType, **attrs: Any) -> TensorType:
    y = infer_grid_sample(x, grid, **attrs)
    expect.floating("x", x)
    return y.with_shape((*y.shape, grid.shape[-1]))


def _slopes(x: Array, grid: Array, **attrs: Any) -> Array:
    check_shape("the batch of the grid", grid.shape[:1], x.shape[:1])
    axes = x.ndim - 2
    shape = (*x.shape[:2], *grid.shape[1:-1], axes)
    if 0 in shape or attrs["mode"] == "nearest":
        return np.zeros(shape)
    found = [
        interpolated(x, grid_taps(grid, x.shape[2:], **attrs, slope_axis=axis))
        for axis in reversed(range(axes))  # a grid vector begins with the innermost axis
    ]
    return np.stack(found, axis=-1)


def _backward_samples() -> list[Sample]:
    def case(mode: str, padding_mode: str, align: bool) -> Sample:
        grid = draw(2, 3, 4, 2, seed=1, low=-1.4, high=1.4)
        attrs: dict[str, Any] = {"padding_mode": padding_mode, "align_corners": align}
        return sample(draw(2, 3, 3, 4), grid, shape=(2, 3, 5, 6), mode=mode, **attrs)

    return [
        case("linear", "zeros", False),
        case("linear", "border", True),
        case("cubic", "reflection", False),
        case("nearest", "zeros", True),
        sample(draw(1, 2, 2, 2, 2), draw(1, 2, 2, 2, 3, seed=1), shape=(1, 2, 3, 4, 2)),
        sample(draw(1, 2, 0, 2), draw(1, 0, 2, 2), shape=(1, 2, 3, 3)),
    ]


def _slope_samples() -> list[Sample]:
    grid = draw(2, 3, 4, 2, seed=1, low=-1.4, high=1.4)
    return [
        sample(draw(2, 3, 5, 6), grid),
        sample(draw(2, 3, 5, 6), grid, mode="cubic", padding_mode="reflection"),
        sample(draw(2, 3, 5, 6), grid, mode="nearest"),
        sample(draw(1, 2, 3, 3), draw(1, 0, 2, 2)),
    ]


OPDEFS = [
    OpDef(
        "grid_sample_backward",
        Kind.REDUCTION,
        "dy, grid",
        _infer_backward,
        _backward,
        _backward_samples,
        grad=_grad_backward,
        attrs={"shape": Attr("sizes"), **ATTRS},
        doc="The gradient of grid_sample by x, whose sizes are `shape`.",
        keeps=("grid",),
    ),
    OpDef(
        "grid_sample_slopes",
        Kind.REDUCTION,
        "x, grid",
        _infer_slopes,
        _slopes,
        _slope_samples,
        grad=NonDifferentiable("second derivatives by the grid are not supported"),
        attrs=ATTRS,
        doc="The derivatives of grid_sample by each coordinate of the grid, in a last axis.",
        keeps=("grid",),
    ),
]
