"""Gradients through the quantized activations of a model whose other parts are trained.

    dequantize(quantize(x, s, z), s, z)   ->  fake_quantize(x, s, z)
    dequantize(dynamic_quantize(x))       ->  fake_dynamic_quantize(x)

Rounding has no gradient, fake quantization has a straight-through one. Only pairs behind a
trainable parameter change. The training step turns them back once its gradients are there
(`passes.expand_fake_quantize`), so its forward pass runs the integer ops of the model.
"""

from __future__ import annotations

from typing import Any

from bitwright.ir.dtype import f32
from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.check import verify
from bitwright.train.groups import is_trainable
from bitwright.train.modes import Rebuild
from bitwright.train.qat.pairs import is_same_pair


def straight_through(graph: Graph) -> Graph:
    """The graph with fake quantization in place of pairs that gradients must pass.

    It is the same object if there is no such pair.
    """
    pairs = _pairs(graph)
    if not pairs:
        return graph
    edit = Rebuild(graph)
    made: dict[Value, Value] = {}
    for node in graph.nodes:
        if node not in pairs:
            edit.keep(node)
            continue
        source = pairs[node]
        if source not in made:
            with edit.b.at(node.loc):
                made[source] = _fake(edit, source.node)
        edit.put(node, (made[source],))
    return verify(prune(edit.finish({})))


def _pairs(graph: Graph) -> dict[Node, Value]:
    """The dequantize nodes to replace, with the quantized values that they read."""
    reached = {value for value in graph.parameters if is_trainable(value)}
    found: dict[Node, Value] = {}
    for node in graph.nodes:
        if any(value in reached for value in node.operands):
            reached.update(node.outputs)
            if node.op == "dequantize" and _is_pair(node):
                source = node.inputs[0]
                assert source is not None
                found[node] = source
    return found


def _is_pair(node: Node) -> bool:
    """Whether a dequantize and its source are one fake quantization in f32."""
    source = node.inputs[0]
    assert source is not None
    x = next(source.node.operands, None)
    if x is None or x.type != node.types[0] or x.dtype != f32:
        return False
    if source.node.op == "dynamic_quantize":
        return node.inputs == source.node.outputs
    if source.node.op != "quantize" or not source.node.attrs["to"].is_integer:
        return False
    scale = constant_value(node.inputs[1])
    is_plain = source.node.attrs.get("precision") is None
    return (
        is_plain
        and scale is not None
        and scale.dtype == f32.numpy
        and is_same_pair(node, source.node)
    )


def _fake(edit: Rebuild, pair: Node) -> Value:
    x, *rest = (None if v is None else edit.value(v) for v in pair.inputs)
    attrs: dict[str, Any] = dict(pair.attrs)
    if pair.op == "dynamic_quantize":
        return edit.b.fake_dynamic_quantize(x, **attrs)  # type: ignore[no-any-return]
    low, high = int(attrs["to"].min), int(attrs["to"].max)
    granularity = {"axis": attrs.get("axis"), "block": attrs.get("block", 0)}
    return edit.b.fake_quantize(x, *rest, low=low, high=high, **granularity)  # type: ignore[no-any-return]
