"""`bw.merge_lora`, `bw.unmerge_lora`, `bw.remove_lora`: adapters into weights and back.

    merged = bw.merge_lora(trainer)       w' = w + scale * a @ b, summed in f64 and rounded once
    merged.save("model.onnx")
    adapted = bw.unmerge_lora(merged)     the graph before, weights and adapters equal to the bit

Subtracting the update from rounded sums would not give the old weights back, so the merged model
keeps the graph that it was made from. `merged.graph` alone does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import dtype
from bitwright.ir.edit import Replacement, replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.naming import take_name
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import infer_types
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run_node
from bitwright.ops.core.registry import get
from bitwright.ops.quant.dequant_matmul import dequantize_blocks
from bitwright.train.lora.adapters import (
    META,
    Adapter,
    changes_of,
    graph_of,
    require_adapters,
    value_of,
)
from bitwright.train.lora.layers import CARRIES, operand, weight_source


@dataclass(frozen=True, repr=False)
class MergedLora:
    """A model whose adapters are part of its weights, and the graph that it was made from."""

    graph: Graph
    source: Graph
    """With adapters and the weights before."""

    def save(self, path: str | Path, **options: Any) -> None:
        """Write the merged model: .onnx, .bw or .txt."""
        self.graph.save(path, **options)

    def __repr__(self) -> str:
        count = len(require_adapters(self.source, "count"))
        return f"<merged {self.graph.name!r}: {count} adapters>"


def merge_lora(model: Any, *, dequantize: bool = False, which: str = "last") -> MergedLora:
    """The model without adapters, their updates added to its weights.

    `model` is a graph with adapters or a trainer (`which` are its weights to take: "last", "best"
    or "ema"). A quantized weight cannot hold the update: `dequantize` stores such layers in float.
    A weight that other nodes read too stays, and the layer gets a weight of its own.
    """
    source = graph_of(model, which)
    adapters = require_adapters(source, "merge")
    return MergedLora(verify(_Removal(source, adapters).merged(dequantize)), source)


def unmerge_lora(merged: MergedLora) -> Graph:
    """The graph before `bw.merge_lora`: the original weights, bit for bit, and the adapters."""
    if not isinstance(merged, MergedLora):
        raise TrainingError(
            "this cannot be unmerged: the weights before are not in it",
            expected="what bw.merge_lora returned",
            found=type(merged).__name__,
            hint="bw.load_lora puts saved adapters on the original model.",
        )
    return merged.source


def remove_lora(model: Any) -> Graph:
    """The graph without adapters, as it was before `bw.add_lora`; weights do not change."""
    source = graph_of(model)
    return verify(_Removal(source, require_adapters(source, "remove")).graph())


class _Removal:
    """Takes adapters out of a graph, and undoes what `bw.add_lora` froze."""

    def __init__(self, source: Graph, adapters: list[Adapter]) -> None:
        self.source, self.adapters = source, adapters
        self.taken = set(source.values)
        self.values: dict[str, Array] = {}
        """New values of parameters and constants, by name."""
        self.weights: dict[str, _Weight] = {}
        """New weights of products, by the name of the product."""

    def merged(self, dequantize: bool) -> Graph:
        for adapter in self.adapters:
            weight = operand(adapter.products[0], 1)
            source = weight_source(weight)
            is_quantized = not source.dtype.is_float or source.dtype.bits < 16
            if is_quantized and not dequantize:
                raise _quantized_weight(adapter, source)
            if is_quantized or not self._is_alone(adapter):
                self._replace_weight(adapter, source)
            else:
                update = _pulled_back(weight, adapter.update)
                self.values[source.name] = _sum(value_of(source), update)
        return self.graph()

    def _is_alone(self, adapter: Adapter) -> bool:
        """Whether the products of an adapter are all that reads their weight."""
        uses, values = self.source.uses, {operand(node, 1) for node in adapter.products}
        readers = len(adapter.products)
        while values:
            if sum(uses[value] for value in values) != readers:
                return False
            readers = len(values)
            values = {operand(v.node, 0) for v in values if v.node.op in CARRIES}
        return True

    def _replace_weight(self, adapter: Adapter, source: Value) -> None:
        product = adapter.products[0]
        before = _dense(product)
        array = _sum(before, adapter.update)
        name = take_name(f"{adapter.layer}.weight", self.taken)
        weight = _Weight(name, array, source.node.op == "parameter")
        self.weights.update({node.name: weight for node in adapter.products})

    def graph(self) -> Graph:
        """The graph without adapters, with new values and weights."""
        undone = changes_of(self.source)
        sums = {node.name for a in self.adapters for node in a.sums}
        gone = {value.name for a in self.adapters for value in (a.a, a.b)}

        def change(node: Node) -> Any:
            if node.name in sums:
                return (operand(node, 0),)  # y of y + update
            if node.name in self.weights:
                return self.weights[node.name].used_by(node, self.taken)
            if node.op not in ("parameter", "constant"):
                return node
            op = node.op
            changes: dict[str, Any] = {}
            if node.name in self.values:
                changes["value"] = self.values[node.name]
            if op == "constant" and node.name in undone["statistics"]:
                op, changes["trainable"] = "parameter", False
            if op == "parameter" and node.name in undone["frozen"]:
                changes["trainable"] = True
            return node.with_(op=op, attrs={**node.attrs, **changes}) if changes else node

        found = replace_nodes(self.source, change, bodies=False)
        return found.with_(
            nodes=tuple(node for node in found.nodes if node.name not in gone),
            meta={key: text for key, text in found.meta.items() if key != META},
        )


@dataclass(eq=False)
class _Weight:
    """A float weight in place of a quantized or shared one."""

    name: str
    array: Array
    is_parameter: bool
    _made: list[Node] = field(default_factory=list)

    def used_by(self, product: Node, taken: set[str]) -> Replacement:
        """The product with this weight."""
        nodes: list[Node] = []
        if not self._made:
            attrs: dict[str, Any] = {"value": self.array}
            if self.is_parameter:
                attrs["trainable"] = True
            type_ = TensorType(dtype(self.array.dtype), self.array.shape)
            op = "parameter" if self.is_parameter else "constant"
            nodes = [Node(op, (), attrs, (type_,), (self.name,), product.loc)]
            self._made += nodes
        weight = self._made[0].outputs[0]
        if product.op != "dequant_matmul":
            inputs = (product.inputs[0], weight, *product.inputs[2:])
            nodes.append(product.with_(inputs=inputs))
            return Replacement(nodes, nodes[-1].outputs)
        bias = (*product.inputs, None, None)[4]
        names = product.names if bias is None else (take_name(f"{product.name}.product", taken),)
        inputs = (product.inputs[0], weight)
        nodes.append(product.with_(op="matmul", inputs=inputs, attrs={}, names=names))
        if bias is not None:
            sum_inputs = (nodes[-1].outputs[0], bias)
            attrs, types = infer_types(get("add"), sum_inputs, {})
            nodes.append(Node("add", sum_inputs, attrs, types, product.names, product.loc))
        return Replacement(nodes, nodes[-1].outputs)


def _quantized_weight(adapter: Adapter, source: Value) -> TrainingError:
    """The error of a weight that cannot hold an update."""
    hint = "dequantize=True stores such layers in float."
    if operand(adapter.products[0], 0).node.op != "dequantize":  # its channels are the model's own
        hint += " Or put the adapters on the float model (bw.save_lora, bw.load_lora) and merge."
    return TrainingError(
        f"layer {adapter.layer!r} has a quantized weight ({source.dtype}), which cannot hold the "
        "update",
        hint=hint,
    )


def _sum(weight: Array, update: Array) -> Array:
    """weight + update in f64, rounded once to the type of the weight."""
    return np.asarray((weight.astype(np.float64) + update).astype(weight.dtype))


def _pulled_back(weight: Value, update: Array) -> Array:
    """An update of a weight operand in the layout of the value that it is made from."""
    while weight.node.op in CARRIES:
        node = weight.node
        weight = operand(node, 0)
        if node.op == "transpose":
            update = update.transpose(np.argsort(node.attrs["perm"]))
        elif node.op == "reshape":
            update = update.reshape(tuple(int(size) for size in weight.shape))
    return update


def _dense(product: Node) -> Array:
    """The weight that a product computes with, as an array: [K, N], or [M, C, ...] of a conv."""
    if product.op != "dequant_matmul":
        return _computed(operand(product, 1))
    q, scale, zero = (None if v is None else _computed(v) for v in (*product.inputs, None)[1:4])
    assert q is not None and scale is not None
    found = dequantize_blocks(q, scale, zero, product.attrs["block"]).T
    return np.ascontiguousarray(found, operand(product, 0).dtype.numpy)


def _computed(value: Value) -> Array:
    """A value that depends on parameters and constants only."""
    node = value.node
    if node.op in ("parameter", "constant"):
        return value_of(value)
    arrays = [None if v is None else _computed(v) for v in node.inputs]
    return np.asarray(run_node(node, arrays)[value.index])
