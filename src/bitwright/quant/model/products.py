"""A product with a constant weight, in one form for all ops: rows times a matrix.

    matmul            x[..., K] @ w[K, N]               one group of N columns over K terms
                      x[..., E, M, K] @ w[E, K, N]      E groups, each with its own rows
                      x[M, K] @ w[E, K, N]              one group of E * N columns: rows are shared
    grouped_matmul    rows of x, each with w[e]         one group of E * N columns
    rnn, gru, lstm    x[S, B, K] @ W'                   a column per unit of gates, directions
    conv              windows of x[N, C, ...]           `groups` of them; K = C / groups * window

Algorithms use only this form: weights as [groups, columns, terms], rows as [rows, groups, terms],
and per-channel factors of x repeated over the terms.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.graph import Node, Value
from bitwright.ops.sequence.recurrent import GATES

COLUMNS_SCORED = 96


def weight_key(weight: Array) -> Hashable:
    """A key that is equal for arrays with the same memory, shape, strides and dtype."""
    return weight.ctypes.data, weight.shape, weight.strides, weight.dtype


@dataclass(frozen=True)
class Places:
    """Positions of a product's rows in x: an index [rows, window size] for each axis except the
    channels'. Indices outside of x are padding.
    """

    at: tuple[Array, ...]
    sizes: tuple[int, ...]

    @cached_property
    def outside(self) -> Array:
        """A mask of the padding."""
        pairs = zip(self.at, self.sizes, strict=True)
        return np.asarray(np.logical_or.reduce([(at < 0) | (at >= n) for at, n in pairs]))

    @cached_property
    def inside(self) -> tuple[Array, ...]:
        """The indices, clipped into x."""
        pairs = zip(self.at, self.sizes, strict=True)
        return tuple(np.clip(at, 0, size - 1) for at, size in pairs)

    @cached_property
    def flat(self) -> Array:
        """The indices as one flat index over all axes except the channels'."""
        return np.asarray(np.ravel_multi_index(self.inside, self.sizes)).reshape(-1)


@dataclass(frozen=True, eq=False)
class Product:
    """A matmul or conv with a constant weight and bias, or the input projection of a recurrent
    layer with weight W[terms, directions · gates · H]."""

    node: Node
    weight: Array
    bias: Array | None
    add: Node | None
    """The addition of a matmul's bias; the bias of a conv is an operand."""
    path: str = ""
    """The path of the body that contains it (`ir.paths`)."""
    constant: Value | None = None
    """The value of the weight in the graph."""
    is_plain: ClassVar[bool] = True
    """Whether its result has one channel axis with one scale per channel."""

    @property
    def name(self) -> str:
        return self.path + self.node.name

    @cached_property
    def key(self) -> Hashable:
        """A key that is equal for products of the same weight."""
        return self.path, weight_key(self.weight)

    @property
    def x(self) -> Value:
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def is_conv(self) -> bool:
        return self.node.op == "conv"

    @property
    def is_recurrent(self) -> bool:
        return self.node.op in GATES

    @property
    def kind(self) -> str:
        """Its name in the targets of a recipe."""
        return "recurrent" if self.is_recurrent else "conv" if self.is_conv else "matmul"

    @property
    def groups(self) -> int:
        return int(self.node.attrs.get("groups", 1)) if self.is_conv else 1

    @property
    def channel_axis(self) -> int:
        return 1 if self.is_conv else self.x.rank - 1

    @property
    def output_axis(self) -> int:
        """The output channel axis of the weight."""
        return 0 if self.is_conv else 1

    @property
    def term_axis(self) -> int:
        """The contraction axis of a matrix, along which scales have blocks."""
        return self.weight.ndim - 2

    @property
    def takes_bias(self) -> bool:
        """Whether a bias per column can be added to its result."""
        return self.node.op != "grouped_matmul"

    @property
    def window(self) -> tuple[int, ...]:
        return self.weight.shape[2:] if self.is_conv else ()

    @property
    def window_size(self) -> int:
        return math.prod(self.window)

    @property
    def window_key(self) -> Any:
        """Products of a point with the same key read the same rows."""
        return self.groups, self.window, *map(str, self.node.attrs.values())

    @property
    def is_rowwise(self) -> bool:
        """Whether each result depends only on the channels of one position of x."""
        if not self.is_conv:
            return True
        plain = (
            set(self.each("strides", 1)) <= {1}
            and set(self.each("dilations", 1)) <= {1}
            and set(self.each("pads", 0)) <= {0}
        )
        return plain and self.groups == 1 and set(self.window) <= {1}

    @property
    def matrix(self) -> Array:
        """A view of the weight as [groups, columns, terms]."""
        if not self.is_conv:
            return self.weight.T[None]
        return self.weight.reshape(self.groups, self.weight.shape[0] // self.groups, -1)

    def as_weight(self, matrix: Array) -> Array:
        """The inverse of `matrix`: [groups, columns, terms] in the layout of the weight."""
        if not self.is_conv:
            return np.ascontiguousarray(matrix[0].T)
        return matrix.reshape(self.weight.shape)

    def spread(self, factors: Array) -> Array:
        """Factors per channel of x, repeated per term, [groups, terms]."""
        if not self.is_conv:
            return factors[None]
        return np.repeat(factors.reshape(self.groups, -1), self.window_size, axis=1)

    @cached_property
    def some_columns(self) -> Array:
        """Evenly spaced columns of the matrix, enough to estimate the error of the product."""
        matrix = self.matrix
        return np.ascontiguousarray(matrix[:, :: max(1, matrix.shape[1] // COLUMNS_SCORED)])

    @cached_property
    def channel_peaks(self) -> Array:
        """The largest weight magnitude for each channel of x."""
        matrix = self.matrix
        peaks = np.maximum(matrix.max(axis=1), -matrix.min(axis=1))
        if not self.is_conv:
            return np.asarray(peaks[0])
        return np.asarray(peaks.reshape(self.groups, -1, self.window_size).max(axis=2).reshape(-1))

    def places(self, shape: tuple[int, ...], count: int, draw: np.random.Generator) -> Places:
        """Positions of at most `count` rows, drawn at random from x of this shape."""
        if not self.is_conv:
            positions = shape[:-1]
            chosen = _drawn(math.prod(positions), count, draw)
            return Places(tuple(np.unravel_index(chosen[:, None], positions)), positions)
        sizes, dilations = (shape[0], *shape[2:]), self.each("dilations", 1)
        strides, pads = self.each("strides", 1), self.each("pads", 0)
        rank = len(self.window)
        results = [
            max(0, (size + before + after - (k - 1) * dilation - 1) // stride + 1)
            for size, before, after, k, dilation, stride in zip(
                sizes[1:], pads[:rank], pads[rank:], self.window, dilations, strides, strict=True
            )
        ]
        total = shape[0] * math.prod(results)
        chosen = draw.choice(total, min(count, total), replace=False) if total else np.arange(0)
        image, *place = np.unravel_index(chosen[:, None], (shape[0], *results))
        within = np.unravel_index(np.arange(self.window_size)[None], self.window)
        at = [np.broadcast_to(image, (len(chosen), self.window_size))]
        for axis in range(rank):
            at.append(place[axis] * strides[axis] + within[axis] * dilations[axis] - pads[axis])
        return Places(tuple(at), sizes)

    def rows(self, x: Array, count: int, draw: np.random.Generator) -> Array:
        """At most `count` rows drawn from a value of x, [rows, groups, terms]."""
        places = self.places(x.shape, count, draw)
        transposed = np.moveaxis(x, self.channel_axis, -1)
        return self.as_rows(transposed[places.inside].reshape(-1, transposed.shape[-1]), places)

    def as_rows(self, found: Array, places: Places) -> Array:
        """Values of x at these places, [places, channels], as [rows, groups, terms]."""
        if places.outside.any():
            found = np.where(places.outside.reshape(-1, 1), np.float32(0), found)
        wide = found.reshape(-1, self.window_size, found.shape[-1]).transpose(0, 2, 1)
        return wide.reshape(len(wide), self.groups, -1).astype(np.float32)

    def each(self, name: str, default: int) -> tuple[int, ...]:
        """An attribute of a conv with one number per spatial axis (two for pads)."""
        rank = len(self.window) * (2 if name == "pads" else 1)
        return tuple(self.node.attrs.get(name) or (default,) * rank)


def _drawn(total: int, count: int, draw: np.random.Generator) -> Array:
    """At most `count` of `total` places, drawn at random only if there are more."""
    return draw.choice(total, count, replace=False) if total > count else np.arange(total)


@dataclass(frozen=True, eq=False)
class BatchedProduct(Product):
    """A product with a constant w[..., K, N] of several matrices.

    The batch axes of w that x also has (`own`) make groups, each with its own rows. Matrices along
    the other axes read the same rows; they are concatenated along the columns.
    """

    own: tuple[int, ...] = ()
    is_plain: ClassVar[bool] = False

    @property
    def groups(self) -> int:
        return math.prod(self.weight.shape[axis] for axis in self.own)

    @property
    def window_size(self) -> int:
        """A row has one position in x per group."""
        return self.groups

    @property
    def window_key(self) -> Any:
        return "batched", self._axes_of_x, self.groups

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The axes of w in the order groups, columns, terms."""
        last = self.weight.ndim - 1
        shared = [axis for axis in range(last - 1) if axis not in self.own]
        return (*self.own, *shared, last, last - 1)

    @property
    def _axes_of_x(self) -> tuple[int, ...]:
        """Axes of x that correspond to `own`, negative."""
        return tuple(axis - self.weight.ndim for axis in self.own)

    @property
    def matrix(self) -> Array:
        terms = self.weight.shape[-2]
        return self.weight.transpose(self._order).reshape(self.groups, -1, terms)

    def as_weight(self, matrix: Array) -> Array:
        """As in `Product`; the number of terms may differ (scales)."""
        sizes = [self.weight.shape[axis] for axis in self._order[:-1]]
        transposed = matrix.reshape(*sizes, matrix.shape[-1])
        return np.ascontiguousarray(transposed.transpose(np.argsort(self._order)))

    def spread(self, factors: Array) -> Array:
        return np.broadcast_to(factors, (self.groups, factors.size))

    @cached_property
    def channel_peaks(self) -> Array:
        return np.asarray(np.abs(self.matrix).max(axis=(0, 1), initial=0))

    def places(self, shape: tuple[int, ...], count: int, draw: np.random.Generator) -> Places:
        positions = shape[:-1]
        own = [len(shape) + axis for axis in self._axes_of_x]
        free = [axis for axis in range(len(positions)) if axis not in own]
        chosen = _drawn(math.prod(positions[axis] for axis in free), count, draw)
        at: list[Array] = [np.zeros(())] * len(positions)
        for axes, numbers in ((free, chosen[:, None]), (own, np.arange(self.groups)[None])):
            found = np.unravel_index(numbers, [positions[axis] for axis in axes] or (1,))
            for axis, place in zip(axes, found, strict=False):
                at[axis] = np.broadcast_to(place, (len(chosen), self.groups))
        return Places(tuple(at), positions)

    def as_rows(self, found: Array, places: Places) -> Array:
        return found.reshape(-1, self.groups, found.shape[-1]).astype(np.float32)
