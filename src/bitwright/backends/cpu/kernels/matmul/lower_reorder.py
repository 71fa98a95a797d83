"""Calls of the reorder kernel: 8-bit rows and images in the channel order of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.backends.cpu.codegen.instr import shuffle_bytes
from bitwright.backends.cpu.kernels.matmul.dot.dot_product import type_names
from bitwright.backends.cpu.kernels.matmul.dot.int8_pairs import (
    GROUP,
    LARGEST,
    MOST_REST,
    SplitWeights,
    int8_pair_dot,
)
from bitwright.backends.cpu.kernels.matmul.lower_widen import (
    CHANNELS_LAST,
    Pads,
    line_sizes,
    row_sizes,
)
from bitwright.backends.cpu.kernels.matmul.reorder import BLOCK, best_order, emit_reorder, masks_of
from bitwright.backends.cpu.lowering.context import Lowering
from bitwright.ir.dim import Size, product
from bitwright.ir.graph import Node
from bitwright.lir.buffer import View, contiguous, dense
from bitwright.target import Target

Array = np.ndarray[Any, Any]
_WHY = "channels permuted to the order of their weights"
_PASS = 5.0
"""The cost of permuting an element, relative to its products with one column."""


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Weights split in two parts, and the order of channels that keeps the second part small.

    `order` is None where channels are not permuted.
    """

    weights: SplitWeights
    order: Array | None


def plan_split(
    target: Target, taps: Array, run: int, counts: tuple[int, ...] = (), is_padded: bool = False
) -> SplitPlan | None:
    """The split of weights taps[taps, channels, n] that are read in runs of this length; None where
    16-bit products are faster. Padded images are permuted line by line, which requires pixels of
    whole blocks."""
    if int8_pair_dot(target, False) is None or run % GROUP or not taps.size:
        return None
    channels, columns = taps.shape[1:]
    lanes = target.lanes(32)
    plain = SplitWeights(taps.reshape(-1, run, columns), lanes, counts)
    found = SplitPlan(plain, None)
    is_whole = channels % (BLOCK if is_padded else GROUP) == 0
    if shuffle_bytes(target) is not None and is_whole and channels >= BLOCK:
        order = best_order(taps, LARGEST)
        moved = taps[:, permutation(order, channels)].reshape(-1, run, columns)
        ordered = SplitWeights(moved, lanes, counts)
        if ordered.rest_fraction + _PASS / columns < plain.rest_fraction:
            found = SplitPlan(ordered, order)
    return found if found.weights.rest_fraction <= MOST_REST else None


def permutation(order: Array, channels: int) -> Array:
    """The source channel of each place."""
    whole = (order + BLOCK * np.arange(len(order))[:, None]).reshape(-1)
    return np.concatenate([whole, np.arange(whole.size, channels)])


def reorder_rows(ctx: Lowering, node: Node, a: View, order: Array | None) -> View:
    """Contiguous rows with permuted channels."""
    if order is None and not a.dtype.is_signed:
        return a
    y = contiguous(ctx.buffer(f"{node.name}.ordered", a.dtype, product(a.shape)), a.shape)
    fill = ctx.constant(np.zeros(1, a.dtype.numpy), f"{node.name}.fill")
    _call(ctx, node, (a, y, fill), order, row_sizes(a))
    return y


def reorder_image(
    ctx: Lowering, node: Node, image: View, pads: tuple[Pads, Pads], fill: View, order: Array | None
) -> View:
    """A channels-last image with permuted channels, padded with `fill`.

    Without padding each pixel is a row; otherwise each line is one, with the order of a pixel
    repeated.
    """
    n, c, h, w = image.shape
    if not image.transpose(CHANNELS_LAST).is_contiguous:
        packed = ctx.packed(image.transpose(CHANNELS_LAST), node.name)
        image = packed.transpose((0, 3, 1, 2))
    begins, ends = pads
    if (*begins, *ends) == (0, 0, 0, 0):
        pixels = View(image.buffer, image.offset, (n * h * w, c), (c, 1))
        found = reorder_rows(ctx, node, pixels, order)
        return image if found is pixels else dense(found.buffer, image.shape, CHANNELS_LAST)
    shape, sizes = line_sizes(image, begins, ends)
    y = dense(ctx.buffer(f"{node.name}.ordered", image.dtype, product(shape)), shape, CHANNELS_LAST)
    _call(ctx, node, (image, y, fill), order, sizes)
    return y


def _call(
    ctx: Lowering,
    node: Node,
    views: tuple[View, View, View],
    order: Array | None,
    sizes: dict[str, Size],
) -> None:
    x, y, fill = views
    signed = x.dtype.is_signed
    kernel = ctx.kernel(
        f"reorder_{type_names(x.dtype)}", signed, lambda m, name: emit_reorder(m, name, signed)
    )
    masks = np.zeros((1, 2, BLOCK), np.uint8) if order is None else masks_of(order)
    table = ctx.constant(masks, f"{node.name}.order")
    period = 0 if order is None else len(order)
    pointers = {"x": x, "y": y, "fill": fill, "masks": table}
    ctx.call(kernel, node, pointers, {**sizes, "period": period}, why=_WHY)
