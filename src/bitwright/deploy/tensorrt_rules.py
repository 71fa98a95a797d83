"""What TensorRT accepts, from its documentation; not tested against TensorRT.

Explicit quantization: QuantizeLinear and DequantizeLinear to i8 with zero points of 0, a scale per
tensor for activations, per tensor or per output channel for weights. Products between them use
8-bit kernels. Operators with quantized values as operands (QLinearConv, MatMulInteger) and dynamic
quantization of 8 bits are not supported.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from bitwright.deploy.onnxruntime_rules import INTEGER
from bitwright.deploy.target_rules import TargetRules
from bitwright.deploy.view import DEQUANTIZE, I8, QUANTIZE, U8, Verdict, attribute

SYMMETRIC_FIX = 'quantize and export with zero_points="zero"'
LABEL = "from documentation, not tested against TensorRT"


class TensorRtRules(TargetRules):
    """Predictions for one graph."""

    def verdict(self, node: NodeProto) -> Verdict | None:
        view, title, op = self.view, self.view.title(node), node.op_type
        if op in INTEGER or op == "DynamicQuantizeLinear" or node.domain not in ("", "ai.onnx"):
            why = f"TensorRT has no op {node.domain or 'ai.onnx'}.{op}"
            return Verdict(title, op, "rejected", "", why, "use the QDQ format (static)")
        if op in (QUANTIZE, DEQUANTIZE):
            why, fix = self._why_rejected(node)
            return Verdict(title, op, "rejected", "", why, fix) if why else None
        if op not in ("Conv", "MatMul", "Gemm") or not any(map(view.dequantized, node.input)):
            return None
        pair = [view.dequantized(name) for name in node.input[:2]]
        if any(one is None for one in pair):
            return Verdict(title, op, "fallback", "", "only one operand is dequantized")
        return Verdict(title, op, "fused", "int8")

    def _why_rejected(self, node: NodeProto) -> tuple[str, str]:
        view = self.view
        name = node.output[0] if node.op_type == QUANTIZE else node.input[0]
        element = view.element(name)
        if element == U8:
            return "u8 is not supported", SYMMETRIC_FIX
        if element == TensorProto.INT32:
            return "an int32 bias cannot be dequantized", "store the bias in float"
        if len(node.input) > 2 and node.input[2]:
            zero = view.array(node.input[2])
            if zero is None or zero.any():
                return "the zero point is not 0", SYMMETRIC_FIX
        if view.tensor(node.input[1]) is None:
            return "its scale is not a constant", "use static quantization"
        readers = view.consumers(node.output[0])
        if element == I8 and not view.is_scalar(node.input[1]):
            if not view.is_constant(name):
                return "activations need one scale per tensor", "quantize activations per tensor"
            axis = attribute(node, "axis", 1)
            if any(reader.op_type == "Conv" for reader in readers) and axis != 0:
                return "weights of convolutions need one scale per output channel (axis 0)", ""
        return "", ""
