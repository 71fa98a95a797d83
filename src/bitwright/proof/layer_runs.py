"""Runs each layer of a model alone, in bitwright and in other runtimes, and compares the results.

Every layer reads what bitwright's interpreter computed before it, so a difference is the layer's
own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from bitwright.errors import BitwrightError
from bitwright.frontend.load import load
from bitwright.frontend.onnx.read import ModelFile
from bitwright.frontend.onnx.tensor import ELEMENTS
from bitwright.ir.arrays import Array
from bitwright.ops.core.interpret import run as interpret
from bitwright.proof.layers import CutLayer, LayeredModel
from bitwright.proof.runtimes import RuntimeRefusalError, load_model
from bitwright.proof.saturation import PairBound, as_matrix, pair_bound
from bitwright.quant.core.measure import quality
from bitwright.target import machine

FLOAT_DB, FLOAT_ERROR = 40.0, 0.02
"""The least SQNR of a layer, and its largest error as a fraction of the largest value."""
DYNAMIC_DB, DYNAMIC_ERROR = 25.0, 0.1
"""The same for layers whose activations a runtime may quantize by itself."""
STEPS = 1
"""Quantized results may differ by this number of steps: runtimes round sums differently."""
TRIVIAL = 64
"""Integer results of at most this size (shapes, indices) are not compared."""
VNNI = {"avx512vnni", "avxvnni"}
PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "MatMulNBits", "LSTM", "GRU", "Attention")


@dataclass(frozen=True)
class LayerDifference:
    """A layer that a runtime computes differently."""

    layer: str
    op: str
    runtime: str
    output: str
    sqnr_db: float | None
    max_error: float
    largest: float
    reason: str = ""
    weight: str = ""
    """The name of its largest constant."""

    def __str__(self) -> str:
        weight = f" (weight {self.weight!r})" if self.weight else ""
        text = f"{self.op} {self.layer!r}{weight}: "
        text += "values differ" if self.sqnr_db is None else f"{self.sqnr_db:.1f} dB from bitwright"
        text += f", largest error {self.max_error:.4g} of {self.largest:.4g}"
        return text + (f"; {self.reason}" if self.reason else "")


@dataclass
class LayerRuns:
    """The runs of all layers of a model on golden inputs."""

    file: ModelFile
    feeds: Mapping[str, Array]
    runtimes: Sequence[str]
    differences: list[LayerDifference] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)

    def run(self) -> dict[str, Array]:
        """Run every layer; the model's outputs, computed node by node."""
        model = LayeredModel(self.file)
        self.compared = dict.fromkeys(self.runtimes, 0)
        values: dict[str, Any] = dict(self.feeds)
        left = model.readers()
        left.update(info.name for info in self.file.proto.graph.output)
        for layer in model.layers:
            feeds = {name: values[name] for name in layer.inputs}
            values.update(interpret(load(model.model(layer, feeds)), feeds))
            if _is_compared(layer, values):
                self._compare(model, layer, feeds, values)
            for name in layer.inputs:
                left[name] -= 1
                if not left[name]:
                    del values[name]
        outputs = {info.name for info in self.file.proto.graph.output}
        return {name: array for name, array in values.items() if name in outputs}

    def _compare(
        self,
        model: LayeredModel,
        layer: CutLayer,
        feeds: Mapping[str, Array],
        values: Mapping[str, Array],
    ) -> None:
        data = model.model(layer, feeds, values).SerializeToString() if self.runtimes else b""
        for runtime in self.runtimes:
            try:
                found = load_model(runtime, data)(feeds)
            except RuntimeRefusalError as error:
                text = f"{layer.op} {layer.name!r}: {error}"
                self.refused.setdefault(runtime, []).append(text)
                continue
            self.compared[runtime] += 1
            for name in layer.outputs:
                self._compare_output(model, layer, runtime, name, values[name], found.get(name))

    def _compare_output(
        self,
        model: LayeredModel,
        layer: CutLayer,
        runtime: str,
        name: str,
        exact: Array,
        other: Array | None,
    ) -> None:
        if other is None or other.shape != exact.shape:
            raise BitwrightError(
                f"{runtime} returns another shape for {name!r}",
                expected=list(exact.shape),
                found=None if other is None else list(other.shape),
            )
        with np.errstate(invalid="ignore", over="ignore"):
            near = quality(exact, other)
        largest = float(np.abs(exact[np.isfinite(exact)].astype(np.float64)).max(initial=0.0))
        nonfinite = not np.array_equal(np.isfinite(exact), np.isfinite(other))
        is_quantized = exact.dtype.itemsize == 1 and exact.dtype.kind in "iu"
        dynamic = _may_quantize_inputs(model, layer)
        least, share = (DYNAMIC_DB, DYNAMIC_ERROR) if dynamic else (FLOAT_DB, FLOAT_ERROR)
        if is_quantized:
            differs = near.max_error > (STEPS if not dynamic else share * 255)
        else:
            differs = near.sqnr < least or near.max_error > share * largest
        if near.sqnr < self.worst.get(runtime, (math.inf, ""))[0]:
            self.worst[runtime] = near.sqnr, f"{layer.op} {layer.name!r}"
        if differs or nonfinite:
            sqnr = near.sqnr if math.isfinite(near.sqnr) else None
            reason = "one side is not finite" if nonfinite else self._reason(model, layer)
            self.differences.append(
                LayerDifference(
                    *(layer.name, layer.op, runtime, name, sqnr, near.max_error, largest, reason),
                    weight=model.largest_constant(layer),
                )
            )

    def _reason(self, model: LayeredModel, layer: CutLayer) -> str:
        if machine().features & VNNI:
            return ""
        bound = saturating_weights(model, layer)
        if bound is None or not bound.saturating:
            return ""
        return f"likely saturation of u8 * s8 without VNNI: {bound}"

    def worst_text(self, runtime: str) -> str:
        if runtime not in self.worst:
            return "without any distance"
        decibels, layer = self.worst[runtime]
        return f"{decibels:.1f} dB from bitwright ({layer})"


def _is_compared(layer: CutLayer, values: Mapping[str, Any]) -> bool:
    """Whether a result is more than a few sizes, flags or indices, and every one is a tensor."""
    arrays = [values[name] for name in layer.outputs]
    tensors = all(isinstance(a, np.ndarray) and a.dtype.kind in "iufb" for a in arrays)
    return tensors and any(
        array.dtype.kind == "f" or array.itemsize == 1 or array.size > TRIVIAL for array in arrays
    )


def _may_quantize_inputs(model: LayeredModel, layer: CutLayer) -> bool:
    """Whether a product reads float activations and a quantized weight."""
    nodes = [model.graph.node[i] for i in layer.nodes]
    if not any(node.op_type in PRODUCTS for node in nodes):
        return False
    made = {name for node in nodes for name in node.output}
    element = [model.tensor_type(name) for name in layer.constants]
    narrow = any(kind in _NARROW for kind in element)
    return narrow and any(
        node.op_type in PRODUCTS and node.input[0] not in made and node.input[0] in layer.inputs
        for node in nodes
    )


_NARROW = tuple(number for number, element in ELEMENTS.items() if element.bits <= 8)


def saturating_weights(model: LayeredModel, layer: CutLayer) -> PairBound | None:
    """The pairs of the layer's int8 weights, if it multiplies them by unsigned activations."""
    nodes = [model.graph.node[i] for i in layer.nodes]
    products = [
        n for n in nodes if "MatMul" in n.op_type or "Conv" in n.op_type or "Gemm" in n.op_type
    ]
    op = products[0].op_type if products else layer.op
    arrays = [
        numpy_helper.to_array(tensor)
        for tensor in map(model.tensor, layer.constants)
        if tensor is not None and tensor.data_type == TensorProto.INT8 and len(tensor.dims) > 1
    ]
    if not arrays:
        return None
    return pair_bound(as_matrix(max(arrays, key=lambda array: array.size), op))
