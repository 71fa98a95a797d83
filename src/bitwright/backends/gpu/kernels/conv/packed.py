"""Convolutions of few channels: the image is packed so that a window's row is one range of memory.

A pixel of the packed image holds s0 × s1 pixels of the image (s: the strides) with padded channels,
16 bytes or more, and the padding of the convolution is part of it. A convolution of it has strides
of 1; the taps of its last axis are neighbours in memory. With these taps as channels it is the
convolution of `boxes`: for a first layer of 3 channels, 7×7 taps and strides of 2, 4 steps of 64
channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.gpu.codegen.loads import masked_load
from bitwright.backends.gpu.codegen.source import Config, Grid, cdiv
from bitwright.backends.gpu.kernels.conv.boxes import DEPTHS, MAX_RANK
from bitwright.backends.gpu.kernels.conv.geometry import Geometry
from bitwright.backends.gpu.kernels.movement.indices import flat_index
from bitwright.ir.dim import Size
from bitwright.ir.dtype import DType

Array = np.ndarray[Any, Any]
PIXEL_BYTES = 16
"""What the bytes of a packed pixel are a multiple of, for TMA."""
CONFIGS = (
    Config({"BLOCK": 2048}, 4, 1),
    Config({"BLOCK": 1024}, 4, 1),
    Config({"BLOCK": 4096}, 8, 1),
)


@dataclass(frozen=True)
class Packing:
    geometry: Geometry
    """Of the convolution that is asked for, with known sizes and one group."""
    item: int
    """Bytes of an element."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Of the convolution of the packed image."""
        pairs = zip(self.geometry.kernel, self.geometry.strides, strict=True)
        return tuple(cdiv(size, stride) for size, stride in pairs)

    @property
    def channels(self) -> int:
        """Of one pixel of the image, padded."""
        block = math.prod(self.geometry.strides)
        found = self.geometry.channels
        while block * found * self.item % PIXEL_BYTES:
            found += 1
        return found

    @property
    def pixel(self) -> int:
        """Elements of a packed pixel."""
        return math.prod(self.geometry.strides) * self.channels

    @property
    def depth(self) -> int:
        """Elements of a row of a window, a multiple of the shortest step."""
        step = DEPTHS[-1] // self.item
        return cdiv(self.taps[-1] * self.pixel, step) * step

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the packed image: all windows, with what a row has too much, lie inside."""
        widths = (*self.taps[:-1], cdiv(self.depth, self.pixel))
        counts = (int(count) for count in self.geometry.counts if isinstance(count, int))
        return tuple(count + width - 1 for count, width in zip(counts, widths, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements: of an image and of the axes of the packed image."""
        found = [self.pixel]
        for size in reversed(self.sizes):
            found.append(found[-1] * size)
        return tuple(reversed(found))

    @property
    def windows(self) -> Geometry:
        """The convolution of the packed image."""
        rank, counts = self.geometry.rank, self.geometry.counts
        return Geometry(
            (*self.sizes[:-1], counts[-1]),
            counts,
            (*self.taps[:-1], 1),
            (1,) * rank,
            (0,) * rank,
            (0,) * rank,
            (1,) * rank,
            self.depth,
            1,
            False,
        )

    def filters(self, filters: Array) -> Array:
        """[M, taps..., C] as [M, packed taps..., depth]."""
        geometry, rank = self.geometry, self.geometry.rank
        count, kernel = len(filters), filters.shape[1:-1]
        padded = np.zeros(
            (
                count,
                *(t * s for t, s in zip(self.taps, geometry.strides, strict=True)),
                self.channels,
            ),
            filters.dtype,
        )
        padded[(slice(None), *(slice(size) for size in kernel), slice(geometry.channels))] = filters
        pairs = [n for pair in zip(self.taps, geometry.strides, strict=True) for n in pair]
        split = padded.reshape(count, *pairs, self.channels)
        taps = [1 + 2 * a for a in range(rank)]
        whole = split.transpose(0, *taps, *(a + 1 for a in taps), 2 * rank + 1)
        rows = whole.reshape(count, *self.taps[:-1], self.taps[-1] * self.pixel)
        found = np.zeros((*rows.shape[:-1], self.depth), filters.dtype)
        found[..., : rows.shape[-1]] = rows
        return found

    def body(self, fill: int | str, x: DType, images: Size) -> str:
        """The kernel that packs: `y` from `x`, an image with any strides."""
        geometry = self.geometry
        lines = [
            flat_index(self.count(images)),
            "left = flat",
            f"channel = (left % {self.channels})",
            f"left = left // {self.channels}",
        ]
        axes = range(geometry.rank)
        for a in reversed(axes):
            if geometry.strides[a] > 1:
                lines += [
                    f"i{a} = left % {geometry.strides[a]}",
                    f"left = left // {geometry.strides[a]}",
                ]
            else:
                lines.append(f"i{a} = 0")
        for a in reversed(axes):
            begin = f" - {geometry.begins[a]}" if geometry.begins[a] else ""
            lines += [
                f"i{a} += (left % {self.sizes[a]}) * {geometry.strides[a]}{begin}",
                f"left = left // {self.sizes[a]}",
            ]
        inside = [f"(channel < {geometry.channels})", "(left < IMAGES)"]
        inside += [f"(i{a} >= 0) & (i{a} < {geometry.sizes[a]})" for a in axes]
        place = " + ".join(
            [
                "left.to(tl.int64) * x_image",
                "channel * x_channel",
                *(f"i{a} * x_s{a}" for a in axes),
            ]
        )
        return "\n".join(
            [
                *lines,
                f"value = {masked_load(f'x + {place}', ' & '.join(inside), fill, x)}",
                "tl.store(y + flat, value, mask=left < IMAGES)",
            ]
        )

    def grid(self) -> Grid:
        return lambda size: (cdiv(size["IMAGES"] * self.strides[0], size["BLOCK"]),)

    def count(self, images: Size) -> Size:
        """Elements of the packed images."""
        return images * self.strides[0]


def packing_of(geometry: Geometry, x: DType) -> Packing | None:
    """The packing for a convolution of few channels; None where it does not fit."""
    known = all(isinstance(n, int) and n > 0 for n in (*geometry.sizes, *geometry.counts))
    is_plain = geometry.groups == 1 and set(geometry.dilations) == {1}
    if not known or not is_plain or geometry.rank > MAX_RANK or x.bits > 16:
        return None
    return Packing(geometry, x.bits // 8)
