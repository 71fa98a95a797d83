"""Sliding windows over spatial axes, shared by convolution, pooling and folding.

A window has `kernel` taps at a distance of `dilation` and thus covers `extent = (kernel - 1) *
dilation + 1` pixels. The number of windows along an axis is

    floor:  room // stride + 1                       where room = size + begin + end - extent
    ceil:   min((room + stride - 1) // stride, (size + begin - 1) // stride) + 1

The second term of `ceil` excludes windows that start in the padding after the input. `counts`
accepts symbolic sizes; the methods on arrays need integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from bitwright.errors import InferenceError
from bitwright.ir.allocation import require_room
from bitwright.ir.dim import Size, min_size
from bitwright.ir.types import Shape
from bitwright.ops.core.opdef import Array, Attr

WINDOW_ATTRS = {
    "strides": Attr("ints", None),
    "pads": Attr("sizes", None),
    "dilations": Attr("ints", None),
}


@dataclass(frozen=True)
class Windows:
    """The geometry of windows; kernel and padding may be symbolic until arrays are given."""

    kernel: tuple[Any, ...]
    strides: tuple[int, ...]
    begins: tuple[Any, ...]
    ends: tuple[Any, ...]
    dilations: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def extents(self) -> tuple[Any, ...]:
        """The number of pixels that a window spans along each axis."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def counts(self, sizes: Sequence[Size], ceil: bool = False) -> Shape:
        """The number of windows along each axis; an error if the input is too small."""
        found: list[Size] = []
        for axis, (size, extent) in enumerate(zip(sizes, self.extents, strict=True)):
            begin, stride = self.begins[axis], self.strides[axis]
            room = size + begin + self.ends[axis] - extent
            count = (
                min_size((room + stride - 1) // stride, (size + begin - 1) // stride) + 1
                if ceil
                else room // stride + 1
            )
            if isinstance(count, int) and (count < 0 or (count == 0 and size != 0)):
                raise InferenceError(
                    f"the window does not fit spatial axis {axis}",
                    expected=f"a padded size of at least {extent}",
                    found=room + extent,
                )
            found.append(count)
        return tuple(found)

    # on arrays, where every size is an integer

    def pad(self, x: Array, counts: Sequence[Any], fill: float | int) -> Array:
        """The array with padding, extended to the end of the last window."""
        widths: list[tuple[Any, Any]] = [(0, 0)] * (x.ndim - self.rank)
        for axis, size in enumerate(x.shape[x.ndim - self.rank :]):
            needed = (counts[axis] - 1) * self.strides[axis] + self.extents[axis]
            begin = self.begins[axis]
            widths.append((begin, max(self.ends[axis], needed - size - begin)))
        if not any(after or before for before, after in widths):
            return x
        sizes = [int(size + sum(width)) for size, width in zip(x.shape, widths, strict=True)]
        require_room(sizes, x.itemsize, "its padding")
        return np.pad(x, widths, constant_values=fill)

    def tap(self, padded: Array, offsets: Sequence[int], counts: Sequence[Any]) -> Array:
        """The pixel under the tap at `offsets` in every window: a view with last axes `counts`."""
        index: list[Any] = [...]
        for offset, count, stride, dilation in zip(
            offsets, counts, self.strides, self.dilations, strict=True
        ):
            start = offset * dilation
            index.append(slice(start, start + count * stride, stride))
        view: Array = padded[tuple(index)]
        return view

    def reduce(self, padded: Array, counts: Sequence[Any], ufunc: np.ufunc) -> Array:
        """Each window reduced, axis by axis (the reduction must be separable)."""
        for axis in range(self.rank):
            one = self._along(axis)
            moved = np.moveaxis(padded, padded.ndim - self.rank + axis, -1)
            result = np.array(one.tap(moved, (0,), (counts[axis],)))
            for offset in range(1, self.kernel[axis]):
                ufunc(result, one.tap(moved, (offset,), (counts[axis],)), out=result)
            padded = np.moveaxis(result, -1, padded.ndim - self.rank + axis)
        return padded

    def _along(self, axis: int) -> Windows:
        one = slice(axis, axis + 1)
        return Windows(
            self.kernel[one],
            self.strides[one],
            self.begins[one],
            self.ends[one],
            self.dilations[one],
        )

    def columns(self, padded: Array, counts: Sequence[Any]) -> Array:
        """The pixels of every window: a view [..., *kernel, *counts] of [..., *spatial]."""
        if 0 in counts:
            return np.zeros((*padded.shape[: -self.rank], *self.kernel, *counts), padded.dtype)
        axes = tuple(range(padded.ndim - self.rank, padded.ndim))
        views = sliding_window_view(padded, self.extents, axis=axes)
        index: list[Any] = [...]
        index += [slice(0, n * s, s) for n, s in zip(counts, self.strides, strict=True)]
        index += [slice(None, None, d) for d in self.dilations]
        views = views[tuple(index)]
        ends = tuple(range(views.ndim - self.rank, views.ndim))
        return np.moveaxis(views, ends, axes)

    def fold(self, columns: Array, sizes: Sequence[Any]) -> Array:
        """An image [..., *sizes], the sum of windows [..., *kernel, *counts] at their positions."""
        lead = columns.shape[: columns.ndim - 2 * self.rank]
        counts = columns.shape[columns.ndim - self.rank :]
        lengths = [
            max((n - 1) * s + extent, begin + size)
            for n, s, extent, begin, size in zip(
                counts, self.strides, self.extents, self.begins, sizes, strict=True
            )
        ]
        image = np.zeros((*lead, *lengths), columns.dtype)
        for offsets in np.ndindex(*self.kernel):
            cells = columns[(slice(None),) * len(lead) + offsets]
            self.tap(image, offsets, counts)[...] += cells
        index: list[Any] = [...]
        index += [slice(b, b + n) for b, n in zip(self.begins, sizes, strict=True)]
        inner: Array = image[tuple(index)]
        return inner


def make_windows(
    rank: int,
    kernel: Sequence[Size],
    strides: Sequence[int] | None,
    pads: Sequence[Size] | None,
    dilations: Sequence[int] | None,
) -> Windows:
    """Checked windows over `rank` axes; None stands for ones, or no padding."""
    strides = (1,) * rank if strides is None else strides
    pads = (0,) * (2 * rank) if pads is None else pads
    dilations = (1,) * rank if dilations is None else dilations
    _check("kernel", kernel, rank, 1)
    _check("strides", strides, rank, 1)
    _check("pads", pads, 2 * rank, 0)
    _check("dilations", dilations, rank, 1)
    return Windows(
        tuple(kernel), tuple(strides), tuple(pads[:rank]), tuple(pads[rank:]), tuple(dilations)
    )


def _check(what: str, values: Sequence[Size], count: int, least: int) -> None:
    if len(values) != count:
        raise InferenceError(
            f"{what} has the wrong number of entries", expected=count, found=list(values)
        )
    if any(isinstance(value, int) and value < least for value in values):
        raise InferenceError(
            f"{what} has an entry that is too small",
            expected=f"at least {least}",
            found=list(values),
        )
