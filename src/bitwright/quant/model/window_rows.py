"""Windows of an image or a line as rows, as nodes of the graph: what a row may have a range of.

    conv(x, w)  =  rows(x) @ w'            rows[n, o, c k] = x[n, c, o s + k]

An axis of stride s is cut into pieces of s, and a window is ceil(k / s) neighbouring pieces:
a short-time Fourier transform with windows of 256 every 128 numbers takes two of them.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from bitwright.ir.dim import Size
from bitwright.ir.graph import Value
from bitwright.ops.core.builder import Builder
from bitwright.quant.model.products import Product

MOST_PIECES = 16
"""Pieces of a window; each of them is a copy of the image."""


def has_window_rows(product: Product) -> bool:
    """Whether the windows of a product can be laid out as rows, with few copies."""
    if not product.is_conv or product.groups != 1:
        return False
    if any(step != 1 for step in product.each("dilations", 1)):
        return False
    steps = product.each("strides", 1)
    pieces = math.prod(-(-k // s) for k, s in zip(product.window, steps, strict=True))
    return pieces <= MOST_PIECES and min(product.each("pads", 0), default=0) >= 0


def window_rows(b: Builder, x: Value, product: Product) -> Value:
    """x[N, C, ...] as [N, places ..., C · window]."""
    rank, window = len(product.window), product.window
    steps, pads = product.each("strides", 1), product.each("pads", 0)
    pieces = [-(-k // s) for k, s in zip(window, steps, strict=True)]
    places = product.node.outputs[0].shape[2:]
    ends = [pads[rank + i] + pieces[i] * steps[i] - window[i] for i in range(rank)]
    if any(pads[:rank]) or any(ends):
        x = b.pad(x, np.float32(0), pads=(0, 0, *pads[:rank], 0, 0, *ends))
    lengths = [(places[i] + (pieces[i] - 1)) * steps[i] for i in range(rank)]
    if tuple(lengths) != tuple(x.shape[2:]):
        x = _cut(b, x, range(2, rank + 2), [0] * rank, lengths)
    # [N, C, T1, s1, T2, s2, ...], then one slice of the T's for each piece of a window
    split: list[Size] = []
    for i in range(rank):
        split += [places[i] + (pieces[i] - 1), steps[i]]
    x = b.reshape(x, shape=(*x.shape[:2], *split))
    order = (0, *range(2, 2 * rank + 2, 2), 1, *range(3, 2 * rank + 3, 2))
    x = b.transpose(x, perm=order)
    axes = range(1, rank + 1)
    parts: dict[tuple[int, ...], Value] = {
        at: _cut(b, x, axes, at, [p + size for p, size in zip(at, places, strict=True)])
        for at in itertools.product(*(range(count) for count in pieces))
    }
    for i in reversed(range(rank)):
        joined: dict[tuple[int, ...], Value] = {}
        for at in itertools.product(*(range(count) for count in pieces[:i])):
            row = [parts[*at, p] for p in range(pieces[i])]
            joined[at] = row[0] if len(row) == 1 else b.concat(*row, axis=rank + 2 + i)
        parts = joined
    y = parts[()]
    if any(pieces[i] * steps[i] != window[i] for i in range(rank)):
        y = _cut(b, y, range(rank + 2, 2 * rank + 2), [0] * rank, list(window))
    return b.reshape(y, shape=(*y.shape[: rank + 1], int(product.matrix.shape[2])))  # type: ignore[no-any-return]


def _cut(b: Builder, x: Value, axes: Any, starts: Any, stops: Any) -> Value:
    """A slice, unless it is all of x."""
    kept = [
        (axis, start, stop)
        for axis, start, stop in zip(axes, starts, stops, strict=True)
        if start != 0 or x.shape[axis] != stop
    ]
    if not kept:
        return x
    at, begin, end = zip(*kept, strict=True)
    return b.slice(x, starts=begin, stops=end, steps=(1,) * len(at), axes=at)  # type: ignore[no-any-return]
