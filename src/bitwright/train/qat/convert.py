"""`bw.convert_qat`: a trained model becomes the quantized model that it was trained as.

    deployed = bw.convert_qat(trainer)
    deployed.save("model-int4.onnx")

Parameters become constants, fake quantization becomes quantize -> dequantize
(`passes.expand_fake_quantize`, as in the training step), and what depends on constants only is
computed by the reference interpreter: weights become i8 constants with their scales. Biases of
products with static inputs are stored in i32 at scale s_x · s_w, as training rounds them. The
result is the object that `bw.quantize` returns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.ir.edit import prune, replace_nodes
from bitwright.ir.graph import Graph, Node, constant_value
from bitwright.ir.types import TensorType
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run_node
from bitwright.passes.expand_fake_quantize import expand_fake_quantize
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.eliminate_dead import eliminate_dead
from bitwright.quant.model.quantize import Quantized
from bitwright.quant.model.report import QuantizationReport, weight_bytes
from bitwright.train.qat.bias import store_biases
from bitwright.train.qat.model import QatModel
from bitwright.train.qat.observers import PREFIX
from bitwright.train.trainer import Trainer

FAKE = ("fake_quantize", "fake_binarize", "fake_dynamic_quantize")


def convert_qat(model: Any, which: str = "last") -> Quantized:
    """The quantized model of a trainer, a prepared model or a training graph.

    `which` are the weights of a trainer to take: "last", "best" or "ema".
    """
    graph, prepared = _source(model, which)
    if not any(node.op in FAKE for _, node in graph.walk()):
        raise TrainingError(
            f"graph {graph.name!r} has no fake quantization to convert",
            hint="Train what bw.prepare_qat returns.",
        )
    expanded = run_passes(freeze(graph), (expand_fake_quantize,))
    folded = fold_weights(expanded)
    deployed = verify(store_biases(run_passes(folded, (eliminate_dead,))))
    consumer = "any" if prepared is None else prepared.consumer
    return Quantized(deployed, _report(deployed, graph, prepared), consumer)


def _source(model: Any, which: str) -> tuple[Graph, QatModel | None]:
    """The training graph with its current values, and the prepared model if it is known."""
    if isinstance(model, Graph):
        return model, None
    if isinstance(model, QatModel):
        return model.graph, model
    if isinstance(model, Trainer):
        return model.graph(which), model.prepared
    raise TrainingError(
        "this cannot be converted",
        expected="a Trainer, or what bw.prepare_qat returned",
        found=type(model).__name__,
    )


def freeze(graph: Graph) -> Graph:
    """The graph with parameters and states of observers as constants."""
    updates = tuple((s, v) for s, v in graph.updates if not s.name.startswith(PREFIX))
    graph = prune(graph.with_(updates=updates))

    def change(node: Node) -> Node:
        is_observer = node.op == "state" and node.name.startswith(PREFIX)
        if node.op != "parameter" and not is_observer:
            return node
        array = node.attrs.get("value")
        if array is None:
            raise TrainingError(f"{node.op} {node.name!r} has no value")
        return node.with_(op="constant", attrs={"value": np.asarray(array)})

    return replace_nodes(graph, change)


def fold_weights(graph: Graph) -> Graph:
    """The graph with everything that depends on constants only computed, except dequantize."""

    def change(node: Node) -> Node | list[Node]:
        operands = list(node.operands)
        is_known = bool(operands) and all(v.is_constant for v in operands)
        if not is_known or node.op == "dequantize" or node.bodies or node.attr_symbols:
            return node
        if not all(isinstance(t, TensorType) and isinstance(t.count, int) for t in node.types):
            return node
        arrays = run_node(node, [constant_value(v) for v in node.inputs])
        made = zip(node.names, node.types, arrays, strict=True)
        return [
            node.with_(
                op="constant",
                inputs=(),
                attrs={"value": np.asarray(a)},
                names=(name,),
                types=(type_,),
            )
            for name, type_, a in made
        ]

    return replace_nodes(graph, change)


def _report(graph: Graph, trained: Graph, prepared: QatModel | None) -> QuantizationReport:
    """The report of the model that training started from, with the sizes of this one."""
    note = "trained through quantization; the errors of layers are those before training"
    size = weight_bytes(graph)
    before = None if prepared is None else prepared.report
    if before is not None:
        return replace(
            before, recipe=f"{before.recipe}, trained", quantized_bytes=size, notes=[note]
        )
    return QuantizationReport("trained", [], {}, weight_bytes(trained), size, is_measured=False)
