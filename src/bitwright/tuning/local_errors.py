"""Local errors of a quantized graph's layers, as values of a graph, split by cause.

    total       y_q(x) - y_f(x)              on the operands x of the quantized model
    weights     y(x, w_q) - y_f(x)           activations not quantized
    shift       y(c(x), w_q) - y(x, w_q)     c clips what neither the type's range nor the range
                                             that calibration saw contains
    clipping    y(k(x), w_q) - y(c(x), w_q)  k clips at the range of the quantized type
    rounding    y_q(x) - y(k(x), w_q)        what is left of the activations' error

The causes add up to the total. They need no knowledge of a layer's form: its nodes are copied with
each pair quantize -> dequantize replaced by x, or by x clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from bitwright.errors import GraphError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.builder import Builder
from bitwright.tuning.matching import LayerPair, Matching

WEIGHTS, ROUNDING, CLIPPING, SHIFT = (
    "weight rounding",
    "activation rounding",
    "clipping",
    "range shift",
)
TOTAL = "total"
Range = tuple[float, float]
ChangedOperands = Callable[[Node, tuple[Value | None, ...]], tuple[Value | None, ...]]


@dataclass(frozen=True)
class Pair:
    """A dequantize of a quantized activation x."""

    x: Value
    low: Array | None
    """The range of the type, broadcast over x; None if it is computed at run time."""
    high: Array | None


def activation_pair(node: Node) -> Pair | None:
    """The pair that ends in this node, if it quantizes and dequantizes a float activation."""
    if node.op in ("fake_quantize", "fake_dynamic_quantize"):
        x = node.inputs[0]
        assert x is not None
        low, high = _bounds(node, node, node.attrs.get("low"), node.attrs.get("high"))
        return Pair(x, low, high)
    source = node.inputs[0] if node.op == "dequantize" else None
    if source is None or source.node.op not in ("quantize", "dynamic_quantize"):
        return None
    x = source.node.inputs[0]
    if x is None or x.is_constant or x.shape != node.outputs[0].shape or not x.dtype.is_float:
        return None
    if source.node.op == "dynamic_quantize":
        return Pair(x, None, None)
    to = source.node.attrs["to"]
    if not to.is_integer and not hasattr(to, "max"):
        return Pair(x, None, None)
    low, high = _bounds(node, source.node, float(to.min), float(to.max))
    return Pair(x, low, high)


def _bounds(
    node: Node, source: Node, low: float | None, high: float | None
) -> tuple[Array | None, Array | None]:
    """The range of a static quantization with constant scale and zero point."""
    scale = constant_value(source.inputs[1]) if len(source.inputs) > 1 else None
    if low is None or high is None or scale is None or source.attrs.get("block"):
        return None, None
    zero = constant_value(source.inputs[2]) if len(source.inputs) > 2 else None
    offset = 0.0 if zero is None else zero.astype(np.float64)
    shape: tuple[int, ...] = ()
    if scale.size > 1:
        axis = source.attrs.get("axis")
        rank = node.outputs[0].rank
        if axis is None:
            return None, None
        shape = tuple(-1 if i == axis % rank else 1 for i in range(rank))
    ends = [(end - offset) * scale.astype(np.float64) for end in (low, high)]
    return tuple(np.asarray(end, np.float32).reshape(shape) for end in ends)  # type: ignore[return-value]


class Copier:
    """Copies nodes of a graph behind some results into a builder.

    `take(value)` returns the value of the builder that stands for a value, or None if its node is
    to be copied. `pair(pair, x)` returns what stands for a quantized activation, and
    `operands(node, inputs)` what a copied node reads.
    """

    def __init__(
        self,
        b: Builder,
        graph: Graph,
        take: Callable[[Value], Value | None],
        prefix: str,
        pair: Callable[[Pair, Value], Value] | None = None,
        operands: ChangedOperands | None = None,
    ) -> None:
        self.b, self.take, self.prefix, self.pair = b, take, prefix, pair
        self.operands = operands
        self.place = {node: number for number, node in enumerate(graph.nodes)}
        self.changed = 0
        """Pairs replaced so far."""

    def copy(self, results: Iterable[Value]) -> dict[Value, Value]:
        """The copies of results, which are copied even if `take` has a value for them."""
        wanted = list(results)
        pairs: dict[Node, Pair] = {}
        new: dict[Value, Value] = {}
        nodes: set[Node] = set()
        waiting = [value.node for value in wanted]
        while waiting:
            node = waiting.pop()
            if node in nodes:
                continue
            nodes.add(node)
            pair = activation_pair(node) if self.pair is not None else None
            if pair is not None:
                pairs[node] = pair
            for value in [pair.x] if pair is not None else node.operands:
                if value not in new and value.node not in nodes:
                    taken = self.take(value)
                    if taken is not None:
                        new[value] = taken
                    else:
                        waiting.append(value.node)
        for node in sorted(nodes, key=self.place.__getitem__):
            self._append(node, pairs.get(node), new)
        return {value: new[value] for value in wanted}

    def _append(self, node: Node, pair: Pair | None, new: dict[Value, Value]) -> None:
        with self.b.at(node.loc):
            if pair is not None and self.pair is not None:
                self.changed += 1
                new[node.outputs[0]] = self.pair(pair, new[pair.x])
                return
            inputs = tuple(None if v is None else new[v] for v in node.inputs)
            if self.operands is not None:
                inputs = self.operands(node, inputs)
            names = tuple(self.b.fresh_name(self.prefix + name) for name in node.names)
            made = self.b.append(node.with_(inputs=inputs, names=names))
            for old, value in zip(node.outputs, made.outputs, strict=True):
                new.setdefault(old, value)


class LocalErrors:
    """Adds the local errors of all sites to a builder that contains the quantized graph."""

    def __init__(
        self,
        b: Builder,
        matching: Matching,
        here: Mapping[Value, Value],
        shares: Mapping[str, Array],
        observed: Mapping[str, Range],
    ) -> None:
        self.b, self.matching, self.here = b, matching, here
        """`here`: values of the quantized graph to values of the builder."""
        self._known, self._observed = shares, observed
        self._shares: dict[Value, Value] = {}
        self._owners = {q: f for f, q in matching.partners.items()}

    def causes(self, site: LayerPair, split: bool = True) -> dict[str, Value]:
        """The local error of a site by cause, in f32 and in the scale of the float graph."""
        b = self.b
        y_f = self.float_result(site)
        if split:  # first, because it gives the factors of equalization
            off, count = self._clipped(site, y_f, "")
        y_q = self._unscaled(site.value, self.here[site.partner], site.channel_axis, y_f)
        if not split:
            return {TOTAL: b.sub(y_q, y_f)}
        if not count:
            is_activation = site.op == "attention"
            return {ROUNDING if is_activation else WEIGHTS: b.sub(y_q, y_f)}
        found = {WEIGHTS: b.sub(off, y_f)}
        before = off
        if site.layer in self._observed:
            shifted, _ = self._clipped(site, y_f, "seen")
            found[SHIFT] = b.sub(shifted, before)
            before = shifted
        if self._has_static(site):
            clipped, _ = self._clipped(site, y_f, "type")
            found[CLIPPING] = b.sub(clipped, before)
            before = clipped
        found[ROUNDING] = b.sub(y_q, before)
        return found

    def float_result(self, site: LayerPair, operands: ChangedOperands | None = None) -> Value:
        """The float layer on the operands of the quantized model."""
        axis = _input_axis(site)

        def take(value: Value) -> Value | None:
            partner = self.matching.partners.get(value)
            if partner is None or value in site.absorbed or value is site.value:
                return None
            return self._unscaled(value, self.here[partner], axis)

        copier = Copier(self.b, self.matching.float_graph, take, "exact/", operands=operands)
        return copier.copy([site.value])[site.value]

    def variant(self, site: LayerPair, pair: Callable[[Pair, Value], Value]) -> tuple[Value, int]:
        """The quantized layer with other activations, and how many pairs were replaced."""
        inside = {self.matching.partners[v] for v in site.absorbed} | {site.partner}

        def take(value: Value) -> Value | None:
            is_end = value in self._owners and value not in inside
            if is_end or value.node.op in ("input", "state"):
                return self.here[value]
            return None

        copier = Copier(self.b, self.matching.quantized, take, "variant/", pair)
        return copier.copy([site.partner])[site.partner], copier.changed

    def _clipped(self, site: LayerPair, y_f: Value, kind: str) -> tuple[Value, int]:
        """The variant with activations that are not quantized: as they are (""), clipped where
        neither calibration nor the type reaches ("seen"), or at the range of the type ("type")."""
        b, seen = self.b, self._observed.get(site.layer)

        def pair(found: Pair, x: Value) -> Value:
            if not kind or found.low is None or found.high is None:
                return x
            low, high = found.low, found.high
            if kind == "seen" and seen is not None:
                low, high = np.minimum(low, seen[0]), np.maximum(high, seen[1])
            ends = (b.constant(end, f32) for end in (low, high))
            return b.minimum(b.maximum(x, next(ends)), next(ends))  # type: ignore[no-any-return]

        made, count = self.variant(site, pair)
        return self._unscaled(site.value, made, site.channel_axis, y_f), count

    def _has_static(self, site: LayerPair) -> bool:
        """Whether an activation of the layer has a range fixed before the run."""
        inside = {self.matching.partners[v] for v in site.absorbed} | {site.partner}
        waiting, seen = [site.partner.node], set()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            pair = activation_pair(node)
            if pair is not None and pair.low is not None:
                return True
            waiting += [v.node for v in node.operands if v not in self._owners or v in inside]
        return False

    # equalized values

    def _unscaled(self, value: Value, found: Value, axis: int, y_f: Value | None = None) -> Value:
        """The quantized model's value in the scale of the float graph, in f32."""
        b = self.b
        if value.dtype.is_float and found.dtype != f32:
            found = b.cast(found, to=f32)
        found = with_sizes(b, found, value)
        product = self.matching.equalized(value, axis % max(1, value.rank))
        if product is None:
            return found
        if product not in self._shares and y_f is None and product.name not in self._known:
            self._visit(product)
        if product not in self._shares:
            self._shares[product] = self._share(product, found, axis, y_f)
        return b.div(found, self._factors(product, value.rank, axis))  # type: ignore[no-any-return]

    def scaled(self, site: LayerPair, y_f: Value) -> Value:
        """A result of the float layer in the scale and type of the quantized model's value."""
        b, axis = self.b, site.channel_axis
        product = self.matching.equalized(site.value, axis % max(1, site.value.rank))
        if product is not None:
            if product not in self._shares:
                self._clipped(site, self.float_result(site), "")
            y_f = b.mul(y_f, self._factors(product, site.value.rank, axis))
        kind = site.partner.dtype
        return y_f if y_f.dtype == kind else b.cast(y_f, to=kind)

    def _factors(self, product: Value, rank: int, axis: int) -> Value:
        """The factors of a product, broadcast over a value with channels on `axis`."""
        share = self._shares[product]
        shape = tuple(share.shape[0] if i == axis % rank else 1 for i in range(rank))
        return self.b.reshape(share, shape=shape)  # type: ignore[no-any-return]

    def _visit(self, product: Value) -> None:
        """Estimate the factors of a product at its own layer."""
        for site in self.matching.sites:
            axis = site.channel_axis % max(1, site.value.rank)
            if self.matching.equalized(site.value, axis) is product:
                self._clipped(site, self.float_result(site), "")
                return
        raise GraphError(f"the factors of {product.name!r}, which is equalized, are unknown")

    def _share(self, product: Value, found: Value, axis: int, y_f: Value | None) -> Value:
        """Factors per channel: the given ones, or those that fit the batch best."""
        b = self.b
        if (known := self._known.get(product.name)) is not None:
            return b.constant(np.asarray(known, np.float32).reshape(-1))
        assert y_f is not None  # `_unscaled` visits the product's own layer first
        axes = tuple(i for i in range(found.rank) if i != axis % found.rank)
        tiny = b.constant(np.float32(1e-30))
        both = b.reduce_sum(b.mul(found, y_f), axes=axes, keepdims=False)
        own = b.reduce_sum(b.mul(y_f, y_f), axes=axes, keepdims=False)
        ratio = b.div(both, b.maximum(own, tiny))
        return b.where(b.gt(ratio, tiny), ratio, b.constant(np.float32(1)))  # type: ignore[no-any-return]


def with_sizes(b: Builder, found: Value, like: Value) -> Value:
    """The value with its sizes written as those of `like`, which are equal at run time."""
    if found.type == like.type or found.shape == like.shape:
        return found
    return b.reshape(found, shape=like.shape)  # type: ignore[no-any-return]


def _input_axis(site: LayerPair) -> int:
    """The channel axis of a layer's input."""
    node = next((v.node for v in site.absorbed if v.node.op == site.op), site.value.node)
    x = node.inputs[0] if node.inputs else None
    return 1 if node.op == "conv" or x is None else max(0, x.rank - 1)
