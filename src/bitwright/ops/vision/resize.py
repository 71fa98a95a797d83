"""Resampling on a regular grid (ONNX Resize), axis by axis.

    y[i] = sum over taps t of weight[i, t] * x[index[i, t]]

Each output position has a coordinate c on the input axis (`coordinates_on_axis`). Its taps are the
pixels around c, weighted by a kernel of their distance: nearest uses one pixel, linear the hat
1 - |d|, cubic Keys' spline with parameter a. Antialiasing stretches the kernel by 1 / scale if the
axis shrinks. Pixels outside repeat the border, or have weight 0 with `exclude_outside`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from bitwright.errors import InferenceError, RunError
from bitwright.ir.allocation import require_room
from bitwright.ir.dim import UNKNOWN, Dim, Size
from bitwright.ir.dtype import DType, dtype
from bitwright.ir.graph import Node
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import refuse
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients, takes_wanted
from bitwright.ops.shape.movement import as_ints

CROP = "tf_crop_and_resize"
COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    CROP,
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_CLOSE = 1e-6  # scales are f32: 0.7 times 10 must give 7


def scaled_size(size: Size, scale: float) -> Size:
    """floor(size * scale), the size of a scaled axis; UNKNOWN if it has no symbolic form."""
    if isinstance(size, Dim):
        ratio = Fraction(scale).limit_denominator(1000)
        close = np.float32(ratio) == np.float32(scale)
        return size * ratio.numerator // ratio.denominator if close else UNKNOWN
    exact = size * scale
    whole = round(exact)
    return whole if math.isclose(exact, whole, rel_tol=_CLOSE) else math.floor(exact)


def linear_kernel(distance: Array) -> Array:
    return np.asarray(np.maximum(1 - np.abs(distance), 0))


def cubic_kernel(distance: Array, a: float) -> Array:
    """Keys' cubic convolution kernel, with a support of two pixels."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def coordinates_on_axis(
    mode: str, size: int, count: int, scale: float | None, start: float, end: float
) -> Array:
    """The coordinates of `count` output positions on an input axis of this size."""
    place = np.arange(count, dtype=np.float64)
    given = count if scale is None else scale * size
    width = count if math.isclose(given, count, rel_tol=_CLOSE) else given
    if mode == CROP:
        if count <= 1:
            return np.full(count, 0.5 * (start + end) * (size - 1))
        return start * (size - 1) + place * (end - start) * (size - 1) / (count - 1)
    if mode == "align_corners":
        return place * (size - 1) / (width - 1) if width > 1 else np.zeros(count)
    if mode == "asymmetric":
        return place * size / width
    if mode == "pytorch_half_pixel" and count <= 1:
        return np.zeros(count)
    centred = (place + 0.5) * size / width - 0.5
    shift = size / 2 * (1 - count / width) if mode == "half_pixel_symmetric" else 0
    return centred + shift


def _nearest(coordinates: Array, rule: str) -> Array:
    if rule == "floor":
        return np.floor(coordinates)
    if rule == "ceil":
        return np.ceil(coordinates)
    if rule == "round_prefer_ceil":
        return np.floor(coordinates + 0.5)
    return np.ceil(coordinates - 0.5)


def _taps(
    coordinates: Array, size: int, segment: float, attrs: dict[str, Any]
) -> tuple[Array, Array]:
    """Indices and weights, both [positions, taps]; `stretch` below 1 widens the kernel."""
    cubic = attrs["mode"] == "cubic"
    kernel = partial(cubic_kernel, a=attrs["cubic_coeff_a"]) if cubic else linear_kernel
    first = math.floor(-(2 if cubic else 1) / segment) + 1
    left = np.ceil(coordinates) - 1  # the pixel before the coordinate, never on it
    places = left[:, None] + np.arange(first, 2 - first)
    weights = kernel((places - coordinates[:, None]) * segment)
    if attrs["exclude_outside"]:
        weights = np.where((places < 0) | (places >= size), 0, weights)
    if attrs["exclude_outside"] or attrs["antialias"]:
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1, total)
    return np.clip(places, 0, size - 1).astype(np.int64), weights


def _interpolate(x: Array, axis: int, index: Array, weights: Array) -> Array:
    aligned = [1] * x.ndim
    aligned[axis] = -1
    total = np.zeros([*x.shape[:axis], len(index), *x.shape[axis + 1 :]], x.dtype)
    for tap in range(index.shape[1]):
        weight = weights[:, tap].reshape(aligned)
        # weight 0 times an infinite pixel would be NaN
        total += np.where(weight == 0, 0, np.take(x, index[:, tap], axis) * weight)
    return total


def _resize(
    x: Array,
    sizes_data: Array | None,
    scales_data: Array | None,
    roi_data: Array | None,
    **attrs: Any,
) -> Array:
    starts, ends = region_of(x.ndim, roi_data, attrs)
    sizes, scales = attrs["sizes"], attrs["scales"] or (None,) * x.ndim
    if sizes_data is not None:
        sizes = as_ints(sizes_data)
    elif scales_data is not None:
        scales = scales_data.astype(np.float64).tolist()
        extents = np.subtract(ends, starts) * scales
        sizes = [scaled_size(size, scale) for size, scale in zip(x.shape, extents, strict=True)]
    require_room(sizes, x.itemsize, "its result")
    nearest = attrs["mode"] == "nearest"
    result = x if nearest else wide(x).astype(np.float64)
    outside = np.zeros((1,) * x.ndim, bool)
    for axis, row in enumerate(zip(x.shape, sizes, scales, starts, ends, strict=True)):
        if row[1] and not row[0]:
            raise RunError(f"axis {axis} is empty and cannot be resized to {row[1]}")
        coordinates = coordinates_on_axis(attrs["coordinate_mode"], *row)
        if attrs["coordinate_mode"] == CROP:
            beyond = (coordinates < 0) | (coordinates > row[0] - 1)
            outside = outside | beyond.reshape([-1 if at == axis else 1 for at in range(x.ndim)])
        result = _resample(result, axis, coordinates, row[2], attrs)
    if outside.any():
        value = np.asarray(attrs["extrapolation_value"]).astype(result.dtype)
        result = np.where(outside, value, result)
    return result if nearest else _saturate(result, dtype(x.dtype))


def region_of(rank: int, given: Array | None, attrs: dict[str, Any]) -> tuple[Array, Array]:
    """Start and end of the cropped region on each axis, between 0 and 1."""
    if attrs["coordinate_mode"] != CROP:
        return np.zeros(rank), np.ones(rank)
    whole = np.asarray(attrs["roi"] if given is None else given, np.float64)
    return whole[:rank], whole[rank:]


def _resample(
    x: Array, axis: int, coordinates: Array, scale: float | None, attrs: dict[str, Any]
) -> Array:
    found = axis_taps(x.shape[axis], coordinates, scale, attrs)
    if found is None:
        return x
    index, weights = found
    return (
        np.take(x, index[:, 0], axis) if weights is None else _interpolate(x, axis, index, weights)
    )


def axis_taps(
    size: int, coordinates: Array, scale: float | None, attrs: dict[str, Any]
) -> tuple[Array, Array | None] | None:
    """Pixels and weights [positions, taps] of one axis; no weights for one tap of weight 1.

    None if the axis stays as it is.
    """
    count = len(coordinates)
    if count == size and np.array_equal(coordinates, np.arange(size)):
        return None
    if attrs["mode"] == "nearest" or not count:
        index = np.clip(_nearest(coordinates, attrs["nearest_mode"]), 0, max(size - 1, 0))
        return index.astype(np.int64)[:, None], None
    segment = min(count / size if scale is None else scale, 1.0) if attrs["antialias"] else 1.0
    return _taps(coordinates, size, segment, attrs)


def _saturate(x: Array, element: DType) -> Array:
    """The result rounded and clipped to the range of integers, which cubic weights can exceed."""
    if element.is_integer:
        return np.clip(np.rint(x), element.min, element.max)
    return x


def _infer(
    x: TensorType,
    sizes_data: TensorType | None,
    scales_data: TensorType | None,
    roi_data: TensorType | None,
    **attrs: Any,
) -> TensorType:
    sizes, scales, roi = attrs["sizes"], attrs["scales"], attrs["roi"]
    if sum(given is not None for given in (sizes, sizes_data, scales_data)) != 1:
        raise InferenceError(
            "the result has no size, or two",
            expected="the attribute sizes, or one of the operands sizes and scales",
        )
    if scales is not None and sizes is None:
        raise InferenceError("scales stand without sizes", expected="the attribute sizes too")
    if attrs["mode"] != "nearest":
        expect.number("x", x)
    elif attrs["antialias"]:
        raise InferenceError("nearest has no antialiasing", expected="mode linear or cubic")
    _require_region(x, roi, roi_data, attrs["coordinate_mode"])
    for name, values in (("sizes", sizes), ("scales", scales)):
        if values is not None:
            expect.size(name, len(values), x.rank)
    if sizes is not None:
        return x.with_shape(sizes)
    if sizes_data is not None:
        expect.size("sizes", expect.static_length("sizes", sizes_data), x.rank)
    if scales_data is not None:
        require_floats("scales", scales_data, x.rank)
    return x.with_shape((UNKNOWN,) * x.rank)


def require_floats(what: str, type_: TensorType, length: int) -> None:
    expect.floating(what, type_)
    expect.rank(what, type_, 1)
    expect.size(what, type_.shape[0], length)


def _require_region(x: TensorType, roi: Any, roi_data: TensorType | None, mode: str) -> None:
    if roi_data is not None:
        require_floats("roi", roi_data, 2 * x.rank)
    elif roi is not None:
        expect.size("roi", len(roi), 2 * x.rank)
    elif mode == CROP:
        raise InferenceError(f"{CROP} has no region", expected="roi: starts, then ends")


def _samples() -> list[Sample]:
    image = draw(1, 2, 4, 5)
    region = (0, 0, 0.4, -0.2, 1, 1, 0.6, 1.3)
    found = [
        sample(image, sizes=(1, 2, 8, 3)),
        sample(image, sizes=(1, 2, 7, 10), mode="linear"),
        sample(image, sizes=(1, 2, 3, 3), mode="cubic", exclude_outside=True),
        sample(image, sizes=(1, 2, 2, 4), scales=(1, 1, 0.6, 0.8), mode="linear", antialias=True),
        sample(image, sizes=(1, 2, 2, 2), mode="cubic", antialias=True, cubic_coeff_a=-0.5),
        sample(image, sizes=(1, 2, 3, 4), mode="linear", coordinate_mode=CROP, roi=region),
        sample(draw(3, 4, dtype="u8", low=0, high=255), sizes=(5, 9), mode="cubic"),
        sample(draw(4, dtype="bf16"), sizes=(6,), mode="linear", tolerance=1e-2),
        sample(draw(0, 3), sizes=(0, 6), mode="linear"),
        sample(draw(2, 3), np.array([4, 3])),
        sample(draw(2, 3), None, np.array([1.5, 0.5], np.float32), mode="linear"),
    ]
    for mode in COORDINATES[:-1]:
        found.append(sample(image, sizes=(1, 2, 5, 1), mode="linear", coordinate_mode=mode))
    for rule in NEAREST:
        found.append(
            sample(image, sizes=(1, 2, 8, 3), coordinate_mode="asymmetric", nearest_mode=rule)
        )
    return found


PLACEMENT = {
    "scales": Attr("floats", None),
    "roi": Attr("floats", None),
    "mode": Attr("str", "nearest", ("nearest", "linear", "cubic")),
    "coordinate_mode": Attr("str", "half_pixel", COORDINATES),
    "nearest_mode": Attr("str", "round_prefer_floor", NEAREST),
    "cubic_coeff_a": Attr("float", -0.75),
    "exclude_outside": Attr("bool", False),
    "antialias": Attr("bool", False),
}


@takes_wanted
def _grad(b: Builder, node: Node, dys: list[Any], wanted: list[bool]) -> Gradients:
    x, _, scales, roi = (*node.inputs, None, None, None)[:4]
    assert x is not None
    for position in (2, 3):
        refuse(node, wanted, position, "the number of pixels depends on it")
    attrs = {name: value for name, value in node.attrs.items() if name in PLACEMENT}
    return [b.resize_backward(dys[0], scales, roi, shape=x.shape, **attrs)]


OPDEFS = [
    OpDef(
        "resize",
        Kind.MOVEMENT,
        "x, sizes?, scales?, roi?",
        _infer,
        _resize,
        _samples,
        grad=_grad,
        attrs={
            "sizes": Attr("sizes", None),
            "extrapolation_value": Attr("float", 0.0),
            **PLACEMENT,
        },
        doc="x resampled to `sizes` (one for each axis); `scales`, where given, place the "
        "coordinates, else the ratio of the sizes does.",
        keeps=("scales", "roi"),
    )
]
