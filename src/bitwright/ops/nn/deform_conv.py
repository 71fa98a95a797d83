"""Deformable convolution: each tap of each window reads x at a position moved by an offset.

    y[n, m, o] = sum over c, tap of w[m, c, tap] * mask[n, tap, o] * x[n, c, place] + bias[m]
    place      = o * stride - begin + tap * dilation + offset[n, tap, :, o]

x is interpolated linearly between pixels, and is 0 outside. Channels of each of the `offset_groups`
share offsets and masks. The offsets of a tap are adjacent, one for each spatial axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from bitwright.ir.dim import product
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.math.matmul import require_bias
from bitwright.ops.nn.channels import add_channel_bias, as_channels, require_groups
from bitwright.ops.nn.conv import multiply_columns, require_images
from bitwright.ops.nn.windows import WINDOW_ATTRS, Windows, make_windows


def _infer(
    x: TensorType,
    w: TensorType,
    offset: TensorType,
    bias: TensorType | None,
    mask: TensorType | None,
    groups: int,
    offset_groups: int,
    **window: Any,
) -> TensorType:
    rank = require_images(x, w)
    expect.floating("x", x)
    element = expect.same_dtype(x, w, offset, bias, mask)
    require_groups("x", x.shape[1], groups)
    require_groups("x", x.shape[1], offset_groups)
    require_groups("w", w.shape[0], groups)
    expect.size("axis 1 of w, times groups,", w.shape[1] * groups, x.shape[1])
    require_bias(bias, element, w.shape[0])
    windows = make_windows(rank, w.shape[2:], **window)
    counts = windows.counts(x.shape[2:])
    taps = offset_groups * product(list(w.shape[2:]))
    for what, type_, channels in (("offset", offset, taps * rank), ("mask", mask, taps)):
        if type_ is not None:
            expect.shape(what, type_, (x.shape[0], channels, *counts))
    return TensorType(element, (x.shape[0], w.shape[0], *counts))


def _places(windows: Windows, counts: Sequence[Any]) -> Array:
    """The position that each tap of each window reads without offsets: [rank, *kernel, *counts]."""
    grids = np.indices((*windows.kernel, *counts))
    taps, starts = grids[: windows.rank], grids[windows.rank :]
    column = (slice(None), *(None,) * (2 * windows.rank))
    strides, dilations, begins = (
        np.array(values)[column] for values in (windows.strides, windows.dilations, windows.begins)
    )
    return np.asarray(starts * strides - begins + taps * dilations)


def interpolate(x: Array, places: Array) -> Array:
    """x[C, *sizes] at fractional places[rank, ...], linearly, with 0 outside: [C, ...]."""
    sizes = x.shape[1:]
    base = np.floor(places)
    fraction = places - base
    result = np.zeros((len(x), *places.shape[1:]))
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight = np.ones(places.shape[1:])
        inside = np.ones(places.shape[1:], bool)
        index = []
        for axis, (step, size) in enumerate(zip(corner, sizes, strict=True)):
            cell = base[axis] + step
            weight = weight * (fraction[axis] if step else 1 - fraction[axis])
            inside &= (cell >= 0) & (cell < size)
            index.append(np.clip(np.nan_to_num(cell), 0, max(size - 1, 0)).astype(np.int64))
        if 0 not in sizes:
            result += np.where(inside, weight * x[(slice(None), *index)], 0)
    return result


def _reference(
    x: Array,
    w: Array,
    offset: Array,
    bias: Array | None,
    mask: Array | None,
    groups: int,
    offset_groups: int,
    **window: Any,
) -> Array:
    windows = make_windows(x.ndim - 2, w.shape[2:], **window)
    counts: tuple[Any, ...] = windows.counts(x.shape[2:])
    places = _places(windows, counts)
    grid = (*windows.kernel, *counts)
    offsets = wide(offset).reshape(len(x), offset_groups, *windows.kernel, windows.rank, *counts)
    offsets = np.moveaxis(offsets, 2 + windows.rank, 2)
    masks = None if mask is None else wide(mask).reshape(len(x), offset_groups, *grid)
    images = wide(x).reshape(len(x), offset_groups, x.shape[1] // offset_groups, *x.shape[2:])
    kernels = wide(w)
    result = np.zeros((len(x), len(w), *counts))
    for n in range(len(x)):
        parts = []
        for group in range(offset_groups):
            cells = interpolate(images[n, group], places + offsets[n, group])
            parts.append(cells if masks is None else cells * masks[n, group])
        result[n] = multiply_columns(kernels, np.concatenate(parts), groups)
    return add_channel_bias(result, bias)


def _compose(
    b: Builder,
    x: Value,
    w: Value,
    offset: Value,
    bias: Value | None,
    mask: Value | None,
    groups: int,
    offset_groups: int,
    **window: Any,
) -> Value:
    """Gathered pixels of each corner, weighted, times w."""
    windows = make_windows(x.rank - 2, w.shape[2:], **window)
    counts: tuple[Any, ...] = windows.counts(x.shape[2:])
    taps, pixels = product(windows.kernel), product(list(counts))
    images, per_group = x.shape[0], x.shape[1] // offset_groups
    values = b.reshape(x, shape=(images, offset_groups, per_group, product(x.shape[2:])))
    shape = (images, offset_groups, 1, taps * pixels)
    moved = b.reshape(offset, shape=(images, offset_groups, taps, windows.rank, pixels))
    moved = b.transpose(moved, perm=(3, 0, 1, 2, 4))
    parts = b.split(moved, axis=0, sizes=(1,) * windows.rank) if windows.rank > 1 else (moved,)
    places = [
        b.add(b.reshape(part, shape=shape), _static_places(b, windows, counts, axis, x))
        for axis, part in enumerate(parts)
    ]
    cells = _gathered(b, values, places, x.shape[2:], per_group)
    if mask is not None:
        cells = b.mul(cells, b.reshape(mask, shape=shape))
    depth = (x.shape[1] // groups) * taps
    columns = b.reshape(cells, shape=(images, groups, depth, pixels))
    kernels = b.reshape(w, shape=(groups, w.shape[0] // groups, depth))
    y = b.reshape(b.matmul(kernels, columns), shape=(images, w.shape[0], *counts))
    if bias is not None:
        y = b.add(y, as_channels(b, bias, y))
    return cast(Value, y)


def _static_places(
    b: Builder, windows: Windows, counts: Sequence[Any], axis: int, x: Value
) -> Value:
    """The position along an axis that each tap of each window reads: [taps * windows]."""
    taps = np.indices(windows.kernel)[axis].reshape(-1, 1) * windows.dilations[axis]
    before, after = product(list(counts[:axis])), product(list(counts[axis + 1 :]))
    steps = b.mul(b.iota(length=counts[axis], dtype="i64"), windows.strides[axis])
    steps = b.expand(b.reshape(steps, shape=(counts[axis], 1)), shape=(before, counts[axis], after))
    places = b.add(b.reshape(steps, shape=(product(list(counts)),)), b.constant(taps, "i64"))
    begin = b.sizes(values=(windows.begins[axis],), shape=())
    flat = b.reshape(b.sub(places, begin), shape=(len(taps) * product(list(counts)),))
    return cast(Value, b.cast(flat, to=x.dtype))


def _gathered(
    b: Builder, values: Value, places: list[Value], sizes: Sequence[Any], per_group: int
) -> Value:
    """values[N, G, C, pixels] interpolated at places, one array [N, G, 1, cells] per axis."""
    base = [b.floor(place) for place in places]
    fraction = [b.sub(place, low) for place, low in zip(places, base, strict=True)]
    total: Value | None = None
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight: Any = None
        index: Any = None
        for axis, (step, size) in enumerate(zip(corner, sizes, strict=True)):
            cell = b.cast(b.add(base[axis], float(step)), to="i64")
            length = b.sizes(values=(size,), shape=())
            inside = b.and_(b.ge(cell, 0), b.lt(cell, length))
            part = fraction[axis] if step else b.sub(1.0, fraction[axis])
            part = b.where(inside, part, 0.0)
            cell = b.maximum(b.minimum(cell, b.sub(length, 1)), 0)
            weight = part if weight is None else b.mul(weight, part)
            index = cell if index is None else b.add(b.mul(index, length), cell)
        shape = (*index.shape[:2], per_group, index.shape[3])
        pixels = b.gather_elements(values, b.expand(index, shape=shape), axis=3)
        term = b.mul(pixels, weight)
        total = term if total is None else b.add(total, term)
    assert total is not None
    return total


def _samples() -> list[Sample]:
    x, w = draw(2, 4, 5, 6), draw(2, 2, 3, 2, seed=1)
    offset = draw(2, 2 * 2 * 6, 3, 5, seed=2)
    return [
        sample(draw(1, 2, 5, 6), draw(3, 2, 3, 2, seed=1), draw(1, 12, 3, 5, seed=2)),
        sample(x, w, offset, groups=2, offset_groups=2),
        sample(
            x,
            w,
            offset,
            draw(2, seed=3),
            draw(2, 12, 3, 5, seed=4, low=0, high=1),
            groups=2,
            offset_groups=2,
        ),
        sample(
            draw(1, 1, 5, 5),
            draw(1, 1, 2, 2, seed=1),
            draw(1, 8, 3, 3, seed=2),
            strides=(2, 2),
            pads=(1, 1, 1, 1),
            dilations=(2, 2),
        ),
        sample(draw(1, 2, 7), draw(3, 2, 3, seed=1), draw(1, 3, 5, seed=2)),
    ]


OPDEFS = [
    OpDef(
        "deform_conv",
        Kind.COMPUTE,
        "x, w, offset, bias?, mask?",
        infer=_infer,
        reference=_reference,
        grad=composed(_compose),
        flops=lambda xs, ys, attrs: 2 * ys[0].count * (xs[1].count // xs[1].shape[0]),
        samples=_samples,
        attrs={**WINDOW_ATTRS, "groups": Attr("int", 1), "offset_groups": Attr("int", 1)},
        doc="Convolution whose taps read x at positions moved by offset, weighted by mask.",
        keeps=("offset",),
    )
]
