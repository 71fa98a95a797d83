"""Sampling at arbitrary positions (ONNX GridSample), for any number of spatial axes.

    y[n, c, o...] = sum over taps of weight(tap) * x[n, c, tap],   taps around grid[n, o..., :]

Grid values -1 and 1 are the borders of the image (the centres of its border pixels with
`align_corners`). A grid vector lists its coordinates from the innermost axis outwards.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import zeros_like
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients
from bitwright.ops.shape.gather import check_shape
from bitwright.ops.vision.resize import cubic_kernel, linear_kernel

_OFFSETS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}


def infer_grid_sample(
    x: TensorType, grid: TensorType, mode: str, padding_mode: str, align_corners: bool
) -> TensorType:
    expect.number("x", x)
    expect.floating("the grid", grid)
    if x.rank < 3:
        raise InferenceError("x has no spatial axis", expected="rank 3 or more", found=x)
    expect.rank("the grid", grid, x.rank)
    expect.size("the last axis of the grid", grid.shape[-1], x.rank - 2)
    expect.size("the batch of the grid", grid.shape[0], x.shape[0])
    return x.with_shape((*x.shape[:2], *grid.shape[1:-1]))


def _reflect(places: Array, low: float, high: float) -> Array:
    """The positions reflected at both borders until they are inside."""
    span = high - low
    if span <= 0:
        return np.full_like(places, low)
    beyond = np.mod(places - low, 2 * span)
    return low + np.where(beyond > span, 2 * span - beyond, beyond)


def _bring_inside(places: Array, size: int, padding_mode: str, align_corners: bool) -> Array:
    """Positions outside the image, mapped into it by the padding mode."""
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    outside = (places < low) | (places > high)
    if padding_mode == "border":
        return np.where(outside, np.clip(places, 0, size - 1), places)
    if padding_mode == "reflection":
        return np.where(outside, _reflect(places, low, high), places)
    return places


def _place_slope(places: Array, size: int, padding_mode: str, align_corners: bool) -> Array:
    """d(position in pixels) / d(grid value): 0 where padding moved the position to the border, and
    negative where it reflected it an odd number of times."""
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    outside = (places < low) | (places > high)
    slope = np.full(places.shape, (high - low) / 2)
    if padding_mode == "border":
        return np.where(outside, 0, slope)
    if padding_mode == "reflection" and high > low:
        turned = np.mod(places - low, 2 * (high - low)) > high - low
        return np.where(outside & turned, -slope, slope)
    return slope


def _linear_slope(distance: Array) -> Array:
    """The slope of `linear_kernel` on its two sides; both end at the pixel itself."""
    return np.where(distance <= 0, 1.0, -1.0)


def _cubic_slope(distance: Array, a: float) -> Array:
    d = np.abs(distance)
    near = (3 * (a + 2) * d - 2 * (a + 3)) * d
    far = (3 * a * d - 10 * a) * d + 8 * a
    return np.sign(distance) * np.where(d <= 1, near, np.where(d < 2, far, 0))


def _axis_taps(
    normalized: Array,
    size: int,
    mode: str,
    padding_mode: str,
    align_corners: bool,
    slopes: bool = False,
) -> list[tuple[Array, Array]]:
    """Pixel index and weight of each tap on one axis, both of the grid's shape.

    With `slopes`, the derivative of the weight by the grid value is in place of the weight.
    """
    inside = partial(
        _bring_inside, size=size, padding_mode=padding_mode, align_corners=align_corners
    )
    place = (normalized + 1) / 2 * (size - 1 if align_corners else size)
    place = place if align_corners else place - 0.5
    turn = _place_slope(place, size, padding_mode, align_corners)
    place = inside(np.rint(place) if mode == "nearest" else place)
    base = np.floor(place)
    taps = []
    for offset in _OFFSETS[mode]:
        pixel = base + offset
        distance = pixel - place
        weight = np.ones_like(place)
        if slopes:
            linear = mode == "linear"
            slope = _linear_slope(distance) if linear else _cubic_slope(distance, -0.75)
            weight = -slope * turn
        elif mode != "nearest":
            weight = linear_kernel(distance) if mode == "linear" else cubic_kernel(distance, -0.75)
        pixel = inside(pixel)
        valid = (pixel >= 0) & (pixel <= size - 1)
        index = np.clip(np.nan_to_num(pixel), 0, size - 1).astype(np.int64)
        if padding_mode == "zeros":
            weight = np.where(valid, weight, 0)
        taps.append((index, weight))
    return taps


def grid_taps(
    grid: Array,
    sizes: tuple[int, ...],
    mode: str,
    padding_mode: str,
    align_corners: bool,
    slope_axis: int | None = None,
) -> list[list[tuple[Array, Array]]]:
    """The taps of each spatial axis; those of `slope_axis` have slopes in place of weights."""
    where, attrs = wide(grid)[..., ::-1], (mode, padding_mode, bool(align_corners))
    return [
        _axis_taps(where[..., axis], size, *attrs, slopes=axis == slope_axis)
        for axis, size in enumerate(sizes)
    ]


def interpolated(x: Array, per_axis: list[list[tuple[Array, Array]]]) -> Array:
    """The sum over all taps of x[N, C, ...] times their weights, as [N, C, ...]."""
    image = np.moveaxis(wide(x).astype(np.float64), 1, -1)
    spread = per_axis[0][0][0].ndim - 1
    batch = np.arange(x.shape[0]).reshape(-1, *(1,) * spread)
    total: Array = np.zeros(())
    for taps in product(*per_axis):
        weight = np.prod([w for _, w in taps], axis=0)[..., None]
        pixels = image[(batch, *(index for index, _ in taps))]
        total = total + np.where(weight == 0, 0, pixels * weight)
    return np.moveaxis(total, -1, 1)


def _grid_sample(x: Array, grid: Array, mode: str, padding_mode: str, align_corners: bool) -> Array:
    check_shape("the batch of the grid", grid.shape[:1], x.shape[:1])
    shape = (*x.shape[:2], *grid.shape[1:-1])
    if 0 in shape:
        return np.zeros(shape)
    return interpolated(x, grid_taps(grid, x.shape[2:], mode, padding_mode, align_corners))


def _samples() -> list[Sample]:
    def case(mode: str, padding_mode: str, align: bool, dtype: str = "f32") -> Sample:
        grid = draw(2, 3, 4, 2, seed=1, low=-1.4, high=1.4)
        attrs: dict[str, Any] = {"padding_mode": padding_mode, "align_corners": align}
        tolerance = 1e-5 if dtype == "f32" else 2e-2
        image = draw(2, 3, 5, 6, dtype=dtype)
        return sample(image, grid, mode=mode, tolerance=tolerance, **attrs)

    cases = [
        case(mode, padding, align)
        for mode in _OFFSETS
        for padding in ("zeros", "border", "reflection")
        for align in (False, True)
    ]
    return [
        *cases,
        case("linear", "zeros", False, dtype="bf16"),
        sample(draw(1, 2, 3, 4, 2), draw(1, 2, 2, 2, 3, seed=1, low=-1, high=1)),
        sample(draw(1, 2, 4), draw(1, 3, 1, seed=1, low=-1, high=1), mode="cubic"),
        sample(draw(1, 2, 3, 3), draw(1, 0, 2, 2)),
    ]


ATTRS = {
    "mode": Attr("str", "linear", tuple(_OFFSETS)),
    "padding_mode": Attr("str", "zeros", ("zeros", "border", "reflection")),
    "align_corners": Attr("bool", False),
}


def _grad(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    x, grid = node.operands
    dx = b.grid_sample_backward(dys[0], grid, shape=x.shape, **node.attrs)
    return [dx, grid_gradient(b, dys[0], x, grid, node.attrs)]


def grid_gradient(b: Builder, dy: Value, x: Value, grid: Value, attrs: Any) -> Any:
    """The sum over channels of dy times the slope of x at the positions of the grid."""
    if attrs["mode"] == "nearest":
        return zeros_like(b, grid)
    slopes = b.grid_sample_slopes(x, grid, **attrs)
    column = b.reshape(dy, shape=(*dy.shape, 1))
    found = b.reduce_sum(b.mul(column, slopes), axes=(1,), keepdims=False)
    return found if found.dtype == grid.dtype else b.cast(found, to=grid.dtype)


OPDEFS = [
    OpDef(
        "grid_sample",
        Kind.REDUCTION,
        "x, grid",
        infer_grid_sample,
        _grid_sample,
        _samples,
        grad=_grad,
        attrs=ATTRS,
        doc="x[N, C, ...] interpolated at the positions in grid[N, ..., spatial axes].",
        keeps=("grid",),
    )
]
