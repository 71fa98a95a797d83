"""Cross-layer equalization: folds smoothing factors into the preceding product.

    y = C(h(P(x)))  =  (C f)(h((P / f)(x)))      for f > 0 and h(f x) = f h(x)

P is a product, h a chain of channelwise, positively homogeneous functions (relu, leaky relu,
pooling, transpose), C the products of one quantization point. f are the smoothing factors of that
point (`quant.model.weights.choose`). Folded into the scales and bias of P, they cost nothing at run
time. `relate_channels` allows larger factors where the weights of P explain the ratio of channel
ranges.

A clip at constants is not homogeneous. It passes only one factor for all channels, which also
scales its bounds: clip(f x, f a, f b) = f clip(x, a, b).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Node, Value
from bitwright.quant.model.assign import Choice
from bitwright.quant.model.points import QuantizationPoint
from bitwright.quant.model.products import Product
from bitwright.quant.model.weights.weights import QuantizedWeights

CHANNELWISE = frozenset({"relu", "leaky_relu", "prelu", "max_pool", "avg_pool", "identity"})
MIN_RELATIVE_SIZE = 1e-6
REDUCTIONS = frozenset({"reduce_mean", "reduce_max"})
EQUALIZED = ".equalized"
"""The end of the names of scaled values."""


@dataclass(frozen=True)
class Chain:
    """The path from a product to a value; `nodes` follow the product, the last one first."""

    product: Node
    nodes: tuple[Node, ...]


def find_chain(value: Value, axis: int, with_clips: bool = False) -> Chain | None:
    """The chain that ends in a value with channels on `axis`; `with_clips` allows clips."""
    nodes: list[Node] = []
    while True:
        node = value.node
        if node.op == "conv":
            return Chain(node, tuple(nodes)) if axis == 1 else None
        if node.op == "matmul":
            return Chain(node, tuple(nodes)) if axis == value.rank - 1 else None
        step = _before(node, axis, with_clips)
        if step is None:
            return None
        nodes.append(node)
        value, axis = step


def _is_clip(node: Node) -> bool:
    """Whether the node is a clip at constants."""
    return node.op == "clip" and all(v is None or v.is_constant for v in node.inputs[1:])


def _before(node: Node, axis: int, with_clips: bool) -> tuple[Value, int] | None:
    """The operand of a homogeneous function and its channel axis, or None."""
    value = node.inputs[0] if node.inputs else None
    if value is None or len(node.outputs) != 1:
        return None
    if node.op in CHANNELWISE or (with_clips and _is_clip(node)):
        return value, axis
    if node.op == "transpose":
        return value, node.attrs["perm"][axis]
    if node.op in REDUCTIONS:
        reduced = {a % value.rank for a in node.attrs.get("axes") or range(value.rank)}
        if not node.attrs.get("keepdims", True):
            axis = [i for i in range(value.rank) if i not in reduced][axis]
        return None if axis in reduced else (value, axis)
    if node.op == "add" and axis == node.outputs[0].rank - 1:  # the bias of a matrix product
        found = next((v for v in node.operands if v.node.op == "matmul"), None)
        return None if found is None else (found, axis)
    return None


def relate_channels(points: list[QuantizationPoint]) -> None:
    """Set `sizes` of each point: its channels' magnitudes by the weights alone, in graph order."""
    home = {product.node: point for point in points for product in point.products}
    products = {product.node: product for point in points for product in point.products}
    for point in points:
        if (value := point.only_value) is None:
            continue
        chain = find_chain(value, point.products[0].channel_axis)
        product = None if chain is None else _complete(chain, products)
        if product is not None:
            weights, before = product.matrix, home[product.node].sizes
            if before is not None:
                weights = weights * product.spread(before)[:, None, :]
            sizes = np.sqrt(np.square(weights).mean(axis=2)).reshape(-1)
            largest = sizes.max(initial=0)
            point.sizes = np.maximum(sizes, largest * MIN_RELATIVE_SIZE) if largest > 0 else None


def _complete(chain: Chain, products: Mapping[Node, Product]) -> Product | None:
    """The product of a chain if every addition in it is the product's bias."""
    product = products.get(chain.product)
    if product is None or not product.is_plain:
        return None
    adds = [node for node in chain.nodes if node.op == "add"]
    return product if all(node is product.add for node in adds) else None


@dataclass(frozen=True)
class Folded:
    """Choices and weights after folding, and new names of the scaled values.

    A scaled value gets a new name because it no longer equals the float model's value.
    """

    choices: list[Choice]
    weights: dict[str, QuantizedWeights]
    names: dict[Node, str]
    bounds: dict[Node, float]
    """The factor of each clip's bounds."""


def fold_factors(
    graph: Graph,
    choices: list[Choice],
    weights: Mapping[str, QuantizedWeights],
    tied: Collection[str] = (),
) -> Folded:
    """Fold factors into the preceding products, where that is exact.

    The product must be quantized, no other product or lookup (`tied`) may read its weight, and the
    values in between must have no other readers.
    """
    shares: dict[Node, Array] = {}
    names: dict[Node, str] = {}
    bounds: dict[Node, float] = {}
    done: set[Value] = set()
    for choice, chain in _foldable(graph, choices, weights, tied):
        assert choice.activation is not None
        share = choice.activation.inverse
        shares[chain.product] = share
        bounds.update({node: float(share[0]) for node in chain.nodes if node.op == "clip"})
        names.update({node: node.name + EQUALIZED for node in (chain.product, *chain.nodes)})
        done.update(choice.point.values)
    scaled = {node.name: _scaled(weights[node.name], share) for node, share in shares.items()}
    return Folded(
        [_with_shares(choice, shares, choice.point.values[0] in done) for choice in choices],
        {**weights, **scaled},
        names,
        bounds,
    )


def folded_shares(
    graph: Graph,
    choices: list[Choice],
    weights: Mapping[str, QuantizedWeights],
    tied: Collection[str] = (),
) -> dict[str, Array]:
    """The factors that `fold_factors` multiplies results by, by name of the product."""
    found: dict[str, Array] = {}
    for choice, chain in _foldable(graph, choices, weights, tied):
        assert choice.activation is not None
        found[chain.product.name] = choice.activation.inverse
    return found


def _foldable(
    graph: Graph,
    choices: list[Choice],
    weights: Mapping[str, QuantizedWeights],
    tied: Collection[str],
) -> Iterator[tuple[Choice, Chain]]:
    counts = Counter(id(made) for made in weights.values())
    products = {
        product.node: product
        for choice in choices
        for product in choice.point.products
        if product.name in weights and counts[id(weights[product.name])] == 1
        if product.name not in tied
    }
    readers = Counter(value for node in graph.nodes for value in node.operands)
    readers.update(graph.results)
    for choice in choices:
        point, value = choice.point, choice.point.only_value
        factors = None if choice.activation is None else choice.activation.factors
        if factors is None or choice.scheme == "float" or value is None:
            continue
        is_uniform = bool(np.ptp(factors) == 0)
        chain = find_chain(value, point.products[0].channel_axis, with_clips=is_uniform)
        if chain is None or _complete(chain, products) is None:
            continue
        inner = [node.outputs[0] for node in (chain.product, *chain.nodes)]
        inner.remove(value)
        if readers[value] == len(point.products) and all(readers[v] == 1 for v in inner):
            yield choice, chain


def _scaled(made: QuantizedWeights, share: Array) -> QuantizedWeights:
    """The weights with results multiplied by `share`, one number per channel."""
    return replace(
        made,
        scales=(made.scales * share).astype(np.float32),
        correction=(made.correction * share).astype(np.float32),
    )


def _with_shares(choice: Choice, shares: Mapping[Node, Array], is_done: bool) -> Choice:
    """The choice with scaled biases, and without factors if they were folded."""
    products = [
        replace(p, bias=(p.bias.reshape(-1) * shares[p.node]).astype(np.float32))
        if p.node in shares and p.bias is not None
        else p
        for p in choice.point.products
    ]
    activation = choice.activation
    if is_done and activation is not None:
        activation = replace(activation, factors=None)
    return replace(choice, point=replace(choice.point, products=products), activation=activation)
