"""What OpenVINO does on CPU with each quantized product (rules of version 2026.4, x86-64).

Its low-precision transformations make an 8-bit product where the activations are dequantized per
tensor and the weight is a constant i8 with zero points of 0. A weight with zero points, and
products that quantize at run time, are computed in float; weights of weight-only products stay
compressed.
Other ops (additions, pooling) follow the products around them and are not predicted.
"""

from __future__ import annotations

from onnx import NodeProto

from bitwright.deploy.onnxruntime_rules import (
    SATURATION,
    UNSIGNED_FIX,
    OnnxRuntimeRules,
    product_weight,
)
from bitwright.deploy.target_rules import TargetRules
from bitwright.deploy.view import I8, U8, Verdict, why_type_is_refused
from bitwright.proof.saturation import as_matrix, pair_bound

REJECTED = ("QGemm", "QAttention", "QLinearGlobalAveragePool")
"""Ops of com.microsoft that OpenVINO has no conversion for."""
PRODUCTS = ("Conv", "MatMul", "Gemm")
RUNTIME = ("MatMulInteger", "ConvInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")
STANDARD = ("", "ai.onnx")


class OpenVinoRules(TargetRules):
    """Predictions for one graph."""

    def verdict(self, node: NodeProto) -> Verdict | None:
        view, title, op = self.view, self.view.title(node), node.op_type
        if node.domain not in (*STANDARD, "com.microsoft"):
            return Verdict(
                *(title, op, "rejected", "", f"OpenVINO has no op {node.domain}.{op}"),
                'export with functions="inline"' if node.domain == "bitwright" else "",
            )
        if why := why_type_is_refused(view, node):
            return Verdict(title, op, "rejected", "", why, "use another weight format")
        if op in REJECTED:
            return Verdict(title, op, "rejected", "", f"OpenVINO has no op com.microsoft.{op}")
        if op == "QLinearSoftmax" and view.shape(node.input[0]) is None:
            why = "OpenVINO needs the element type of its input"
            return Verdict(title, op, "rejected", "", why, "use the QDQ format")
        if op in RUNTIME:
            why = "activations that are quantized at run time are multiplied in float"
            return Verdict(title, op, "fallback", "", why, "use static quantization")
        if op == "MatMulNBits":
            why = "float activations; the weight stays compressed"
            return Verdict(title, op, "fallback", "", why)
        if op in ("Add", "Mul") and self._fails_to_compile(node):
            why = "OpenVINO fails to compile an op of a quantized product and a quantized constant"
            return Verdict(title, op, "rejected", "", why, "store the constant quantized")
        if op not in PRODUCTS or not any(map(view.dequantized, node.input)):
            return None
        why, fix = self._why_float(node)
        if why:
            return Verdict(title, op, "fallback", "", why, fix)
        return self._safe(node, Verdict(title, op, "fused", "int8"))

    def _fails_to_compile(self, node: NodeProto) -> bool:
        """Whether one operand is a product, and the other a constant that a node quantizes."""
        sources = []
        for dequantize in map(self.view.dequantized, node.input):
            quantize = None if dequantize is None else self.view.producer(dequantize.input[0])
            if quantize is None or quantize.op_type != "QuantizeLinear":
                return False
            maker = self.view.producer(quantize.input[0])
            is_constant = self.view.is_constant(quantize.input[0])
            sources.append("constant" if is_constant else maker.op_type if maker else "")
        return "constant" in sources and any(source in PRODUCTS for source in sources)

    def _why_float(self, node: NodeProto) -> tuple[str, str]:
        """Why a product is not computed in 8 bits, and what helps."""
        view = self.view
        activation = OnnxRuntimeRules(view)._dequantizes(node.input[0])
        weight = view.dequantized(node.input[1])
        if activation is None:
            return "its activations are float; the weight stays compressed", ""
        if weight is None:
            return "its weight is not dequantized", ""
        if view.element(activation.input[0]) not in (U8, I8):
            return "its activations are not 8-bit", ""
        if not view.is_scalar(activation.input[1]):
            return "the scale of its activations is not one constant", ""
        name = weight.input[0]
        if not self._is_constant(name):
            return "both operands are activations", ""
        if view.element(name) != I8:
            return "its weight is not signed", 'export with consumer="openvino" (weight_type="i8")'
        if len(weight.input) > 2 and weight.input[2]:
            zero = view.array(weight.input[2])
            if zero is None or zero.any():
                return "its weight has zero points", "quantize weights symmetrically"
        return "", ""

    def _is_constant(self, name: str) -> bool:
        view, node = self.view, self.view.producer(name)
        folded = node is not None and node.op_type == "QuantizeLinear"
        return view.is_constant(name) or (folded and view.is_constant(node.input[0]))  # type: ignore[union-attr]

    def _safe(self, node: NodeProto, verdict: Verdict) -> Verdict:
        found = product_weight(self.view, node)
        array = None if found is None else self.view.array(found[0])
        if found is None or array is None or array.ndim < 2:
            return verdict
        bound = pair_bound(as_matrix(array, node.op_type, found[1]))
        if not bound.saturating:
            return verdict
        text = SATURATION.format(bound=bound)
        return Verdict(verdict.node, verdict.op, "unsafe", "int8", text, UNSIGNED_FIX)
