"""Adapters in a graph: how they are written, and how they are found again.

    h = x @ a;  y' = y + (h @ b) * scale         a[K, rank], b[rank, N]
    h = conv(x, a);  y' = y + conv(h, b) * scale   a[rank, C, ...], b[M, rank, 1, ...]

y is the result of the layer, its bias included. The parameters `<layer>.lora_a` and
`<layer>.lora_b` are f32 (f64 in a model in f64) and are cast to the type of x.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.frontend.load import load
from bitwright.ir.arrays import Array
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.builder import Builder
from bitwright.train.lora.layers import PRODUCTS, operand, weight_source
from bitwright.train.qat.model import QatModel
from bitwright.train.trainer import Trainer

A, B = ".lora_a", ".lora_b"
META = "lora"
"""The key in `Graph.meta` of what `bw.add_lora` changed: a JSON object of names."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in a graph, with all places where it is added."""

    layer: str
    a: Value
    b: Value
    scale: float
    sums: tuple[Node, ...]
    """The additions y + update."""
    products: tuple[Node, ...]
    """The frozen products, in the same order."""

    @property
    def arrays(self) -> tuple[Array, Array]:
        return value_of(self.a), value_of(self.b)

    @property
    def update(self) -> Array:
        """What the adapter adds to the weight, in f64: [K, N], or [M, C, ...] of a conv."""
        a, b = (array.astype(np.float64) for array in self.arrays)
        if self.products[0].op == "conv":
            return np.tensordot(b.reshape(b.shape[:2]), a, axes=1) * self.scale
        return (a @ b) * self.scale


def value_of(weight: Value) -> Array:
    """The array of a parameter or constant."""
    array = weight.node.attrs.get("value")
    if array is None:
        raise TrainingError(
            f"parameter {weight.name!r} has no value", hint="Load or initialize its weights."
        )
    return np.asarray(array)


def graph_of(model: Any, which: str = "last") -> Graph:
    """The graph of a model or trainer; `which` are the weights of a trainer to take."""
    if isinstance(model, QatModel):
        raise TrainingError(
            "this model trains its weights through quantization",
            hint="Add adapters to the quantized model, or to what bw.convert_qat returns.",
        )
    return model.graph(which) if isinstance(model, Trainer) else load(model)


def apply_adapter(
    b: Builder, product: Node, x: Value, y: Value, pair: tuple[Value, Value], scale: float
) -> Value:
    """y plus the update of an adapter, for one product on x."""
    first, second = (w if w.dtype == x.dtype else b.cast(w, to=x.dtype) for w in pair)
    if product.op == "conv":
        h = b.conv(x, first, **product.attrs)
        update = b.conv(h, second)
    else:
        update = b.matmul(b.matmul(x, first), second)
    name = pair[0].name.removesuffix(A) + ".lora"
    factor = b.constant(np.asarray(scale), x.dtype, name=f"{name}_scale")
    return b.add(y, b.mul(update, factor), name=name)  # type: ignore[no-any-return]


def is_adapted(graph: Graph) -> bool:
    return any(value.name.endswith((A, B)) for value in graph.parameters)


def find_adapters(graph: Graph) -> list[Adapter]:
    """The adapters of a graph, in order."""
    places: dict[Value, list[Node]] = {}
    parts: dict[Value, tuple[Value, float, list[Node]]] = {}
    for node in graph.nodes:
        found = _match(node) if node.op == "add" else None
        if found is not None:
            a, second, scale, product = found
            places.setdefault(a, []).append(node)
            parts.setdefault(a, (second, scale, []))[2].append(product)
    adapters = [
        Adapter(a.name.removesuffix(A), a, second, scale, tuple(places[a]), tuple(products))
        for a, (second, scale, products) in parts.items()
    ]
    _require_whole(graph, adapters)
    return adapters


def require_adapters(graph: Graph, what: str) -> list[Adapter]:
    """The adapters of a graph; a `TrainingError` if there are none."""
    found = find_adapters(graph)
    if not found:
        raise TrainingError(
            f"graph {graph.name!r} has no adapters to {what}", hint="bw.add_lora adds them."
        )
    return found


def _match(node: Node) -> tuple[Value, Value, float, Node] | None:
    """The parameters, the scale and the product of an addition y + update."""
    y, update = node.operands
    if update.node.op != "mul":
        return None
    up, factor = update.node.operands
    scale = constant_value(factor)
    if scale is None or scale.size != 1 or up.node.op not in PRODUCTS:
        return None
    second, h = weight_source(operand(up.node, 1)), operand(up.node, 0)
    if not second.name.endswith(B) or h.node.op != up.node.op:
        return None
    a, x = weight_source(operand(h.node, 1)), operand(h.node, 0)
    if a.name != second.name.removesuffix(B) + A:
        return None
    for product in (y.node, *(v.node for v in y.node.operands)):
        if product.op in PRODUCTS and product.inputs[0] is x:
            return a, second, float(scale.reshape(())), product
    return None


def _require_whole(graph: Graph, adapters: list[Adapter]) -> None:
    """Raise for parameters of adapters that are not where `bw.add_lora` puts them."""
    known = {value for adapter in adapters for value in (adapter.a, adapter.b)}
    for value in graph.parameters:
        if value.name.endswith((A, B)) and value not in known:
            raise TrainingError(
                f"the adapter of {value.name!r} does not have the form that bw.add_lora gives it",
                hint="Use the graph of bw.add_lora or Trainer.graph(), before other passes.",
            )


def changes_of(graph: Graph) -> Mapping[str, list[str]]:
    """What `bw.add_lora` changed: names of frozen parameters, and of fixed statistics."""
    found = json.loads(graph.meta.get(META, "{}"))
    return {key: list(found.get(key, ())) for key in ("frozen", "statistics")}
