"""Memory layouts of images: [N, C, H, W] row-major (NCHW) or channels last (NHWC)."""

from __future__ import annotations

from bitwright.lir.buffer import View

PIXELS = (0, 2, 3)
"""The axes of [N, C, H, W] that index pixels: image, row, column."""


def channels_last(rank: int) -> tuple[int, ...]:
    """The axes in memory order, outermost first: (0, 2, 3, 1) for images."""
    return (0, *range(2, rank), 1)


def image_order(view: View) -> tuple[int, ...]:
    """Channels last if the view is dense in that order only, else row-major."""
    rank = len(view.shape)
    if rank > 2 and not view.is_contiguous:
        last = channels_last(rank)
        if view.transpose(last).is_contiguous:
            return last
    return tuple(range(rank))
