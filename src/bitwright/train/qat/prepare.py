"""`bw.prepare_qat`: a float or quantized model becomes one that can be trained.

    q = bw.quantize("model.onnx", data)
    prepared = bw.prepare_qat(q, bw.QatConfig(weight_bits=4))

A quantized weight becomes a parameter behind fake quantization, a pair around an activation becomes
fake quantization, an i32 bias becomes an f32 parameter. At the width of the quantized model,
training starts with exactly its quantized values; another width gets scales of least squared error.
Batch norm is folded before (`bw.quantize` does that), so that training sees the deployed weights.
Embedding tables in i8 stay as they are, and so do weights whose distance to their zero point needs
more than 8 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.frontend.load import load
from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32, i8, i32, u8
from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.freeze_parameters import freeze_parameters
from bitwright.quant.model.config import QuantConfig
from bitwright.quant.model.quantize import Quantized, quantize
from bitwright.quant.model.quantized_inputs import builder_for
from bitwright.train.qat import weights
from bitwright.train.qat.batch_norm import reestimate_batch_norm
from bitwright.train.qat.config import QatConfig
from bitwright.train.qat.layers import is_trainable_constant, layer_bits
from bitwright.train.qat.model import QatModel
from bitwright.train.qat.observers import Observers
from bitwright.train.qat.pairs import is_same_pair
from bitwright.train.qat.stored import around_zero, expand_products

_WEIGHT_TYPES = ("i8", "i4", "i2", "u8", "u4", "u2")


def prepare_qat(
    model: Any, config: QatConfig | None = None, data: Any = None, **options: Any
) -> QatModel:
    """A model to train through quantization, from a quantized or float model (graph or path).

    A float model is quantized first, by `bw.quantize(model, data, **options)`.
    """
    chosen = QatConfig() if config is None else config
    if not isinstance(chosen, QatConfig):
        raise TrainingError("this is no QatConfig", found=type(chosen).__name__)
    graph = expand_products(load(model))
    source = model if isinstance(model, Quantized) else None
    if not is_quantized(graph):
        if data is None:
            raise TrainingError(
                f"graph {graph.name!r} is not quantized, and ranges of activations need data",
                expected="a model of bw.quantize, or data",
            )
        recipe = options.pop("recipe", QuantConfig(activations=chosen.activations))
        if chosen.reestimate_batch_norm:
            model = reestimate_batch_norm(graph, data, options.get("threads"))
        source = quantize(model, data, recipe, **options)
        graph = source.graph
    elif options:
        raise TrainingError("a quantized model takes no options", found=", ".join(options))
    graph = run_passes(graph, (freeze_parameters,))
    report = None if source is None else source.report
    prepared = _Preparation(graph, chosen, layer_bits(graph, chosen, report)).run()
    return QatModel(prepared, chosen, report, "any" if source is None else source.consumer)


def is_quantized(graph: Graph) -> bool:
    """Whether a graph has quantized weights or activations."""
    return any(node.op in ("dequantize", "dequant_matmul") for node in graph.nodes)


class _Preparation:
    """The rewrite of one graph, node by node."""

    def __init__(self, graph: Graph, config: QatConfig, bits: dict[Value, Any]) -> None:
        self.graph, self.config, self.bits = graph, config, bits
        self.b: Builder = builder_for(graph)
        self.observers = Observers(config.observer_steps, config.momentum)
        self.new: dict[Value, Value] = {}
        self.made: dict[Any, Value] = {}

    def run(self) -> Graph:
        trained = is_trainable_constant(self.graph)
        for node in self.graph.nodes:
            self.b.loc = node.loc
            found = self._dequantize(node) if node.op == "dequantize" else None
            if found is None and node in trained:
                found = weights.parameter(self.b, node.name, node.attrs["value"])
            if found is not None:
                self.new[node.outputs[0]] = found
                continue
            inputs = tuple(None if v is None else self.new[v] for v in node.inputs)
            same = inputs == node.inputs
            kept = self.b.append(node if same else node.with_(inputs=inputs))
            self.new.update(zip(node.outputs, kept.outputs, strict=True))
        updates = [(self.new[s], self.new[v]) for s, v in self.graph.updates]
        made = self.graph.with_(
            nodes=tuple(self.b.nodes),
            outputs=tuple((name, self.new[v]) for name, v in self.graph.outputs),
            updates=(*updates, *self.b.updates),
        )
        return verify(_without_unused(prune(made)))

    def _dequantize(self, node: Node) -> Value | None:
        """What replaces a dequantize; None if it stays."""
        q, scale, zero = (*node.inputs, None)[:3]
        assert q is not None and scale is not None
        known = constant_value(scale)
        if node.outputs[0].dtype != f32:
            return None
        if q.is_constant:
            return None if known is None else self._constant(node, q, known, zero)
        if q.node.op == "dynamic_quantize" and q.index == 0:
            return self._dynamic(q.node)
        if q.node.op != "quantize" or known is None or known.dtype != np.float32:
            return None
        return self._activation(node, q.node, known)

    # weights and biases

    def _constant(self, node: Node, q: Value, scale: Array, zero: Value | None) -> Value | None:
        offsets = None if zero is None else constant_value(zero)
        array = constant_value(q)
        if array is None or scale.dtype != np.float32 or (zero is not None and offsets is None):
            return None
        axis, block = node.attrs.get("axis"), node.attrs.get("block", 0)
        if q.dtype == i32 and q.rank <= 1 and not block:
            if offsets is not None and offsets.any():
                return None
            key = "bias", q
            if key not in self.made:
                real = (array.astype(np.float64) * scale).astype(np.float32)
                self.made[key] = weights.parameter(self.b, q.name, real)
            return self.made[key]
        if q.dtype.name not in _WEIGHT_TYPES or q.rank < 2:
            return None
        signed = around_zero(array, offsets, axis, block)
        if signed is None:
            return None
        if q not in self.made:
            start = weights.keep(q.name, signed, scale, axis, block)
            asked, granularity = self.bits.get(q), self.config.weight_granularity
            if asked is not None or granularity is not None:
                asked = weights.bits_of(start) if asked is None else asked
                start = weights.requantized(start, asked, granularity)
            self.made[q] = weights.fake_quantized(self.b, start, self.config, self.observers)
        return self.made[q]

    # activations

    def _activation(self, node: Node, pair: Node, scale: Array) -> Value | None:
        """Fake quantization in place of quantize -> dequantize with the same parameters."""
        if not is_same_pair(node, pair) or pair.attrs["to"] not in (i8, u8):
            return None
        key = pair.outputs[0]
        if key not in self.made:
            self.made[key] = self._fake(pair, scale)
        return self.made[key]

    def _fake(self, pair: Node, scale: Array) -> Value:
        b, element = self.b, pair.attrs["to"]
        x, _, zero = (*pair.inputs, None)[:3]
        assert x is not None
        source, mode = self.new[x], self.config.activation_mode
        axis = pair.attrs.get("axis")
        if mode == "per_batch" and axis is None:
            self._require_8_bits()
            return b.fake_dynamic_quantize(source, to=element)  # type: ignore[no-any-return]
        known = constant_value(zero) if zero is not None else None
        zeros = np.zeros(scale.shape, element.numpy) if known is None else known
        low, high = int(element.min), int(element.max)
        if self.config.activation_bits == 4:
            low, high, scale, zeros = _in_4_bits(element, scale, zeros)
        if mode == "moving_average" and axis is None:
            given = source, scale, zeros, low, high
            factor, point = self.observers.ranges(b, x.name, *given)
        else:
            factor = b.constant(scale, name=f"{x.name}.scale")
            if mode == "learned":
                factor = weights.learned_scale(b, scale, x.name)
            point = b.constant(zeros, name=f"{x.name}.zero_point")
        attrs = {"axis": axis, "block": pair.attrs.get("block", 0), "ste": self.config.ste}
        return b.fake_quantize(source, factor, point, low=low, high=high, **attrs)  # type: ignore[no-any-return]

    def _dynamic(self, pair: Node) -> Value:
        self._require_8_bits()
        key = pair.outputs[0]
        if key not in self.made:
            x = self.new[next(iter(pair.operands))]
            self.made[key] = self.b.fake_dynamic_quantize(x, **pair.attrs)
        return self.made[key]

    def _require_8_bits(self) -> None:
        if self.config.activation_bits == 4:
            raise TrainingError(
                "dynamic ranges have 8 bits",
                hint="4-bit activations need static ranges and another activation_scale_mode.",
            )


def _in_4_bits(element: Any, scale: Array, zeros: Array) -> tuple[int, int, Array, Array]:
    """The range of an activation in 16 levels of the 8-bit type: 0..15 or -8..7."""
    low = -8 if element == i8 else 0
    distance = zeros.astype(np.float64) - float(element.min)
    point = np.rint(distance * (15 / 255)) + low
    return low, low + 15, (scale * np.float32(17)).astype(np.float32), point.astype(element.numpy)


def _without_unused(graph: Graph) -> Graph:
    """The graph without parameters that nothing reads."""
    used = graph.uses
    nodes = tuple(n for n in graph.nodes if n.op != "parameter" or used[n.outputs[0]])
    return graph if len(nodes) == len(graph.nodes) else graph.with_(nodes=nodes)
