"""`bw.add_lora`: a graph whose frozen layers get trainable low-rank updates.

    adapted = bw.add_lora(model, rank=8, layers="*.q_proj")
    trainer = bw.Trainer(adapted, loss="token_cross_entropy", optimizer=bw.AdamW(lr=1e-4))

The second matrix of an adapter starts at zero, so the outputs do not change at first. Weights stay
as they are: float, or quantized by `bw.quantize`. Running statistics of batch norm become
constants, because a frozen model must not change with the batches.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.train.groups import is_trainable, matches, require_matches
from bitwright.train.lora.adapters import META, A, B, apply_adapter, graph_of, is_adapted
from bitwright.train.lora.layers import Layer, chosen_layers, find_layers, operand, weight_source
from bitwright.train.modes import Rebuild


def add_lora(
    model: Any,
    rank: int | Mapping[str, int] = 8,
    alpha: float | None = None,
    layers: str | Sequence[str] | None = None,
    *,
    train: str | Sequence[str] = (),
    seed: int = 0,
) -> Graph:
    """The graph with y + (alpha / rank) * (x @ a) @ b for every layer that matches; all other
    parameters are frozen.

    `model` is a graph, a quantized model or what `bw.load` reads. `layers` are patterns of names of
    layers or weights; None means all products and convolutions. `rank` may differ by pattern,
    {"*": 8, "head": 4}. `alpha` None means the rank, a factor of 1. `train` are patterns of
    parameters that are trained too, such as norms or a new head.
    """
    graph = graph_of(model)
    if is_adapted(graph):
        raise TrainingError(
            f"graph {graph.name!r} has adapters already",
            hint="bw.merge_lora folds them into the weights, bw.remove_lora drops them.",
        )
    patterns = _listed(layers) if layers is not None else None
    if patterns is None and isinstance(rank, Mapping):
        patterns = tuple(rank)
    chosen = chosen_layers(layers_of(model, graph), patterns)
    ranks = {layer: _rank(layer, rank) for layer in chosen}
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise TrainingError("alpha is out of range", expected="a number above 0", found=alpha)
    wanted = {
        layer: (*_initial(layer, r, seed), 1.0 if alpha is None else alpha / r)
        for layer, r in ranks.items()
    }
    return with_adapters(frozen(graph, _listed(train)), wanted)


def layers_of(model: Any, graph: Graph) -> list[Layer]:
    """The layers of a graph, with the names that the report of a quantized model has for them."""
    report = getattr(model, "report", None)
    rows = {} if report is None else {row.value: row for row in report.layers}
    return find_layers(graph, rows)


def _listed(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _rank(layer: Layer, rank: int | Mapping[str, int]) -> int:
    """The rank of a layer; the last pattern that matches one of its names counts."""
    found: Any = rank
    if isinstance(rank, Mapping):
        fits = [rank[p] for p in rank if any(matches(name, [p]) for name in layer.names)]
        if not fits:
            raise TrainingError(f"no pattern of rank matches layer {layer.name!r}")
        found = fits[-1]
    if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 1:
        raise TrainingError("the rank is out of range", expected="an integer above 0", found=found)
    if found > layer.max_rank:
        terms, columns = layer.terms, layer.sizes[1]
        raise TrainingError(
            f"rank {found} is too large for layer {layer.name!r}, which has {terms} terms and "
            f"{columns} outputs",
            expected=f"at most {layer.max_rank}",
            hint=f"Give it a rank of its own, rank={{'*': {found}, {layer.name!r}: "
            f"{layer.max_rank}}}, or choose layers=.",
        )
    return int(found)


def _initial(layer: Layer, rank: int, seed: int) -> tuple[Array, Array]:
    """Uniform random numbers up to 1 / sqrt(terms), and zeros.

    They depend on the seed and the name of the layer only, not on the other layers.
    """
    draw = np.random.default_rng([seed, zlib.crc32(layer.name.encode())])
    first, second = layer.shapes(rank)
    bound = 1 / math.sqrt(layer.terms)
    return draw.uniform(-bound, bound, first), np.zeros(second)


def frozen(graph: Graph, train: Sequence[str] = ()) -> Graph:
    """The graph with all parameters frozen that do not match, and fixed statistics of batch norm.

    The names go to `Graph.meta`, so that `bw.merge_lora` can undo it.
    """
    require_matches("train", train, [value.name for value in graph.parameters])
    kept = {value for value in graph.parameters if matches(value.name, train)}
    fixed = _statistics(graph) - kept
    names = [v.name for v in graph.parameters if is_trainable(v) and v not in kept]
    edit = Rebuild(graph)
    for node in graph.nodes:
        if node.op != "parameter" or node.outputs[0] in kept:
            edit.keep(node)
            continue
        changed = node.with_(attrs={**node.attrs, "trainable": False})
        if node.outputs[0] in fixed:
            changed = node.with_(op="constant", attrs={"value": node.attrs["value"]})
        edit.put(node, edit.b.append(changed).outputs)
    done = {"frozen": names, "statistics": [v.name for v in graph.parameters if v in fixed]}
    edit.b.meta[META] = json.dumps(done)
    return edit.finish({})


def _statistics(graph: Graph) -> set[Value]:
    """The running means and variances that are parameters with a value."""
    norms = [node for node in graph.nodes if node.op == "batch_norm"]
    found = {operand(node, place) for node in norms for place in (3, 4)}
    return {v for v in found if v.node.op == "parameter" and v.node.attrs.get("value") is not None}


def with_adapters(graph: Graph, wanted: Mapping[Layer, tuple[Array, Array, float]]) -> Graph:
    """The graph with adapters: both matrices and the scale by layer of an equal graph."""
    products = {node.name: layer for layer in wanted for node in layer.products}
    biased = _bias_additions(graph, products)
    edit, pairs = Rebuild(graph), {}
    for node in graph.nodes:
        edit.keep(node)
        product = biased.get(node, node)
        layer = products.get(product.name)
        if layer is None or (product is node and product in biased.values()):
            continue
        with edit.b.at(product.loc):
            x, y = edit.value(operand(product, 0)), edit.value(node.outputs[0])
            if layer not in pairs:
                pairs[layer] = _parameters(edit.b, layer, wanted[layer], x)
            scale = wanted[layer][2]
            adapted = apply_adapter(edit.b, product, x, y, pairs[layer], scale)
            edit.put(node, (adapted,))
    return verify(edit.finish({}))


def _bias_additions(graph: Graph, products: Mapping[str, Layer]) -> dict[Node, Node]:
    """Additions of a bias, with their products: the update comes after the bias, so that a product
    and its bias stay one integer op."""
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "add":
            continue
        for y, bias in (tuple(node.operands), tuple(node.operands)[::-1]):
            is_bias = weight_source(bias).node.op in ("parameter", "constant") and bias.rank <= 1
            is_product = y.node.op == "matmul" and y.node.name in products
            if is_product and is_bias and graph.uses[y] == 1 and y.type == node.types[0]:
                found[node] = y.node
    return found


def _parameters(
    b: Builder, layer: Layer, given: tuple[Array, Array, float], x: Value
) -> tuple[Value, Value]:
    element = np.float64 if x.dtype.name == "f64" else np.float32
    first, second = (np.asarray(array, element) for array in given[:2])
    return b.parameter(layer.name + A, first), b.parameter(layer.name + B, second)
