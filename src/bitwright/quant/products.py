"""Products with constant weights, seen as what they all are: rows times a matrix.

    matmul            x[..., K] @ w[K, N]               one group of N columns over K terms
    rnn, gru, lstm    x[S, B, K] @ W'                   a column for every unit of gates, directions
    conv              windows of x[N, C, ...]           `groups` of them; K = C / groups * window

Algorithms work on that form only: weights as [groups, columns, terms], rows as [rows, groups,
terms], and per-channel factors of x spread over the terms. Products that read the same value make
one `Site`, since they share the codes of that value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.recurrent import GATES

Array = np.ndarray[Any, Any]
FEWEST_IN_LOOP = 1 << 16
"""Weights that a value meets in one step of a loop: with fewer, steps are all overhead anyway."""
COLUMNS_SCORED = 96


@dataclass(frozen=True)
class Places:
    """Where rows of a product lie in its x: an index for every axis but the channels', each of
    them [rows, numbers of the window]; in front of the first and behind the last there are zeros.
    """

    at: tuple[Array, ...]
    sizes: tuple[int, ...]

    @cached_property
    def outside(self) -> Array:
        """Those that lie in the margin."""
        pairs = zip(self.at, self.sizes, strict=True)
        return np.asarray(np.logical_or.reduce([(at < 0) | (at >= n) for at, n in pairs]))

    @cached_property
    def inside(self) -> tuple[Array, ...]:
        """The indices, with the nearest one inside for each in the margin."""
        pairs = zip(self.at, self.sizes, strict=True)
        return tuple(np.clip(at, 0, size - 1) for at, size in pairs)

    @cached_property
    def flat(self) -> Array:
        """The indices as one, where the axes but the channels' are one."""
        return np.asarray(np.ravel_multi_index(self.inside, self.sizes)).reshape(-1)


@dataclass(frozen=True, eq=False)
class Product:
    """A matmul or conv with a constant weight, and the constant that is added to its result; or the
    input's share of a recurrent layer, whose weight is seen as W[terms, directions · gates · H]."""

    node: Node
    weight: Array
    bias: Array | None
    add: Node | None
    """The addition that holds the bias of a matmul; a conv has its own operand for it."""
    path: str = ""
    """The way to the branch that it lies in (`ir.paths`)."""

    @property
    def name(self) -> str:
        return self.path + self.node.name

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
        """What recipes call it."""
        return "recurrent" if self.is_recurrent else self.node.op

    @property
    def groups(self) -> int:
        return int(self.node.attrs.get("groups", 1)) if self.is_conv else 1

    @property
    def channel_axis(self) -> int:
        """The axis of x that holds channels."""
        return 1 if self.is_conv else self.x.rank - 1

    @property
    def output_axis(self) -> int:
        """The axis of the weight that counts output channels."""
        return 0 if self.is_conv else 1

    @property
    def window(self) -> tuple[int, ...]:
        return self.weight.shape[2:] if self.is_conv else ()

    @property
    def window_size(self) -> int:
        return math.prod(self.window)

    @property
    def window_key(self) -> Any:
        """Products of a site with the same key see the same rows."""
        return self.groups, self.window, *map(str, self.node.attrs.values())

    @property
    def is_rowwise(self) -> bool:
        """Whether each result depends on the channels of one position of x alone."""
        if not self.is_conv:
            return True
        plain = (
            set(self._each("strides", 1)) <= {1}
            and set(self._each("dilations", 1)) <= {1}
            and set(self._each("pads", 0)) <= {0}
        )
        return plain and self.groups == 1 and set(self.window) <= {1}

    @property
    def matrix(self) -> Array:
        """A view of the weight as [groups, columns, terms]."""
        if not self.is_conv:
            return self.weight.T[None]
        return self.weight.reshape(self.groups, self.weight.shape[0] // self.groups, -1)

    def as_weight(self, matrix: Array) -> Array:
        """A matrix of the form of `matrix` in the weight's own layout."""
        if not self.is_conv:
            return np.ascontiguousarray(matrix[0].T)
        return matrix.reshape(self.weight.shape)

    def spread(self, factors: Array) -> Array:
        """One number for each channel of x as one for each term, [groups, terms]."""
        if not self.is_conv:
            return factors[None]
        return np.repeat(factors.reshape(self.groups, -1), self.window_size, axis=1)

    @cached_property
    def some_columns(self) -> Array:
        """Columns of the matrix spread over all of them, enough to tell how the product fares."""
        matrix = self.matrix
        return np.ascontiguousarray(matrix[:, :: max(1, matrix.shape[1] // COLUMNS_SCORED)])

    @cached_property
    def channel_peaks(self) -> Array:
        """The largest magnitude of the weights that meet each channel of x."""
        matrix = self.matrix
        peaks = np.maximum(matrix.max(axis=1), -matrix.min(axis=1))
        if not self.is_conv:
            return np.asarray(peaks[0])
        return np.asarray(peaks.reshape(self.groups, -1, self.window_size).max(axis=2).reshape(-1))

    def places(self, shape: tuple[int, ...], count: int, draw: np.random.Generator) -> Places:
        """Where at most `count` rows lie, drawn from all that a value of x of this shape has."""
        if not self.is_conv:
            positions = shape[:-1]
            total = math.prod(positions)
            chosen = np.arange(total)
            if total > count:
                chosen = draw.choice(total, count, replace=False)
            return Places(tuple(np.unravel_index(chosen[:, None], positions)), positions)
        sizes, dilations = (shape[0], *shape[2:]), self._each("dilations", 1)
        strides, pads = self._each("strides", 1), self._each("pads", 0)
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
        places, turned = self.places(x.shape, count, draw), np.moveaxis(x, self.channel_axis, -1)
        return self.as_rows(turned[places.inside].reshape(-1, turned.shape[-1]), places)

    def as_rows(self, found: Array, places: Places) -> Array:
        """Numbers of x that lie at these places, [places, channels], as [rows, groups, terms]."""
        if places.outside.any():
            found = np.where(places.outside.reshape(-1, 1), np.float32(0), found)
        wide = found.reshape(-1, self.window_size, found.shape[-1]).transpose(0, 2, 1)
        return wide.reshape(len(wide), self.groups, -1).astype(np.float32)

    def _each(self, name: str, default: int) -> tuple[int, ...]:
        """An attribute of a conv with one number for each spatial axis (two for pads)."""
        rank = len(self.window) * (2 if name == "pads" else 1)
        return tuple(self.node.attrs.get(name) or (default,) * rank)


@dataclass(eq=False)
class Site:
    """A value and the products that read it: they share its codes."""

    value: Value
    products: list[Product] = field(default_factory=list)
    sizes: Array | None = None
    """How large each channel is by the weights that make it, where a product makes it."""
    is_shared: bool = False
    """Whether products of another site read the same value along another axis."""

    @property
    def tap(self) -> str:
        """The value's path in the graph."""
        return self.products[0].path + self.value.name

    @property
    def name(self) -> str:
        """The same, unless two sites have one value: no two have one name."""
        return f"{self.tap} along axis {self.channel_axis}" if self.is_shared else self.tap

    @property
    def windows(self) -> dict[Any, Product]:
        """One product for each kind of rows that its products see, by `window_key`."""
        return {product.window_key: product for product in self.products}

    @property
    def weights(self) -> int:
        return sum(product.weight.size for product in self.products)

    @property
    def is_inside(self) -> bool:
        """Whether it lies in a body, which runs once, many times or not at all."""
        return bool(self.products[0].path)

    @property
    def channel_axis(self) -> int:
        return self.products[0].channel_axis

    @cached_property
    def channels(self) -> int:
        """The number of channels, which the weights tell."""
        product = self.products[0]
        return product.groups * int(product.matrix.shape[2]) // product.window_size

    @property
    def is_rowwise(self) -> bool:
        return all(product.is_rowwise for product in self.products)


def find_sites(graph: Graph, path: str = "") -> list[Site]:
    """Values that products with constant weights read, in the graph's order; then those in branches
    and in bodies of loops, where a step is often too short for a small product to gain anything."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.operands:
            readers.setdefault(value, []).append(node)
    results = set(graph.results)
    sites: dict[tuple[Value, int], Site] = {}
    for product in _products(graph, readers, results, path):
        site = sites.setdefault((product.x, product.channel_axis), Site(product.x))
        site.products.append(product)
    found = list(sites.values())
    axes = Counter(site.value for site in found)
    for site in found:
        site.is_shared = axes[site.value] > 1
    for node in graph.nodes:
        for name, body in node.bodies.items():
            inside = find_sites(body, f"{path}{node.name}/{name}/")
            found += [s for s in inside if node.op == "if" or s.weights >= FEWEST_IN_LOOP]
    return found


def _products(
    graph: Graph, readers: dict[Value, list[Node]], results: set[Value], path: str
) -> Iterator[Product]:
    for node in graph.nodes:
        if node.op not in ("matmul", "conv", *GATES) or node.outputs[0].dtype != f32:
            continue
        weight = _constant_weight(node.inputs[1])
        x = node.inputs[0]
        if weight is None or x is None or x.is_constant or x.rank < 2 or not weight.size:
            continue
        if node.op == "conv":
            bias = constant_value(node.inputs[2]) if len(node.inputs) > 2 else None
            if len(node.inputs) > 2 and node.inputs[2] is not None and bias is None:
                continue  # a bias that the data decides
            if all(isinstance(size, int) for size in node.attrs.get("pads") or ()):
                yield Product(node, weight, bias, None, path)
        elif node.op in GATES:
            if constant_value(node.inputs[2]) is not None:
                yield Product(node, weight.reshape(-1, weight.shape[-1]).T, None, None, path)
        elif weight.ndim == 2:
            add = _bias_add(node, readers, results)
            bias = None if add is None else _constant_operand(add)
            yield Product(node, weight, bias, add, path)


def _constant_weight(value: Value | None) -> Array | None:
    """A constant, or one that is only turned around."""
    if value is not None and value.node.op == "transpose":
        array = constant_value(value.node.inputs[0])
        return None if array is None else array.transpose(value.node.attrs["perm"])
    return constant_value(value)


def _bias_add(node: Node, readers: dict[Value, list[Node]], results: set[Value]) -> Node | None:
    """The addition of a vector that alone reads a product."""
    result = node.outputs[0]
    found = readers.get(result, [])
    if len(found) != 1 or found[0].op != "add" or result in results:
        return None
    vector = _constant_operand(found[0])
    width = result.shape[-1]
    fits = vector is not None and vector.shape == (width,)
    return found[0] if fits and found[0].outputs[0].rank == result.rank else None


def _constant_operand(add: Node) -> Array | None:
    values = [constant_value(v) for v in add.operands]
    return next((v for v in values if v is not None), None)
