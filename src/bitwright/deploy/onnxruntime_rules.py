"""What ONNX Runtime does on CPU with each quantized node (rules of version 1.31, x86-64).

An op between DequantizeLinear and QuantizeLinear nodes becomes one integer kernel if all its inputs
are dequantized, its only reader quantizes (or is a Relu or Clip that the quantization makes
redundant), and the element types fit. MatMul and Gemm also have kernels with a float result. A
MatMul with a dequantized weight alone becomes MatMulNBits. Everything else dequantizes and computes
in float.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from bitwright.deploy.target_rules import TargetRules
from bitwright.deploy.view import (
    DEQUANTIZE,
    I8,
    QUANTIZE,
    U8,
    GraphView,
    Verdict,
    attribute,
    why_type_is_refused,
)
from bitwright.proof.saturation import PairBound, as_matrix, pair_bound

NARROW = {
    getattr(TensorProto, name)
    for name in ("INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2")
    if hasattr(TensorProto, name)
}
WIDE = (TensorProto.INT16, TensorProto.UINT16)
UNARY = ("AveragePool", "LeakyRelu", "GlobalAveragePool", "Sigmoid", "Softmax")
BINARY = ("Add", "Mul")
PREDICTED = ("Conv", "MatMul", "Gemm", "Concat", *UNARY, *BINARY)
MOVES = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
"""Ops that quantization is moved across."""
INTEGER = (
    *("QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger", "MatMulIntegerToFloat"),
    *("DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QGemm", "MatMulNBits", "QAttention"),
    *("QLinearAdd", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax", "QLinearLeakyRelu"),
    *("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearConcat", "QLinearReduceMean"),
)
"""Kernels that compute with quantized values."""
SIGNED = "signed activations with several readers have no integer kernel on x86"
SATURATION = "u8 * s8 saturates on x86 without VNNI: {bound}"
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
FUNCTION_FIX = 'export with weight_type="u8"'
UNSIGNED_FIX = "store the weight as u8 with zero point 128 (--fix)"


@dataclass
class Group:
    """A node with the dequantizations before it and the quantizations after it."""

    node: NodeProto
    dequantize: list[NodeProto] = field(default_factory=list)
    quantize: list[NodeProto] = field(default_factory=list)
    clip: NodeProto | None = None
    refusal: str = ""


class OnnxRuntimeRules(TargetRules):
    """Predictions for one graph."""

    def verdict(self, node: NodeProto) -> Verdict | None:
        """The prediction for a node; None if it has nothing to do with quantization."""
        view, title = self.view, self.view.title(node)
        if why := why_type_is_refused(view, node):
            return Verdict(title, node.op_type, "rejected", "", why, "use another weight format")
        functions = {(f.domain, f.name) for f in view.proto.functions}
        if node.domain not in DOMAINS and (node.domain, node.op_type) not in functions:
            why = f"ONNX Runtime has no op {node.domain}.{node.op_type}"
            return Verdict(title, node.op_type, "rejected", "", why)
        if node.op_type in INTEGER:
            return self._safe(node, Verdict(title, node.op_type, "fused", node.op_type))
        if inside := self._integer_ops(node):
            return self._safe(node, Verdict(title, node.op_type, "fused", inside))
        if node.op_type not in PREDICTED or not any(map(self._dequantizes, node.input)):
            return None
        if any(self._gemm_add(maker) is node for maker in map(view.producer, node.input)):
            return None  # the bias of a Gemm
        if (add := self._gemm_add(node)) is not None:
            found = self._gemm(node, add)
        else:
            found = getattr(self, f"_{node.op_type.lower()}", self._elementwise)(node)
        status = "fused" if found[0] else "fallback"
        made = Verdict(title, node.op_type, status, found[0], found[1], "")
        return self._safe(node, made) if found[0] else made

    def _integer_ops(self, node: NodeProto) -> str:
        """The integer product inside a model-local function, which ONNX Runtime inlines."""
        named = (node.domain, node.op_type)
        functions = (f for f in self.view.proto.functions if (f.domain, f.name) == named)
        body = [inner.op_type for f in functions for inner in f.node]
        return next((op for op in body if op in INTEGER), "")

    # groups

    def _dequantizes(self, name: str) -> NodeProto | None:
        """The dequantization that a value comes from; ops that only move values do not hide it."""
        view = self.view
        seen = name
        while True:
            node = view.producer(seen)
            if node is None:
                return None
            if node.op_type == DEQUANTIZE:
                moved = seen != name
                scalar = len(node.input) > 2 and all(map(view.is_scalar, node.input[1:3]))
                return node if not moved or scalar else None
            if node.op_type not in MOVES or not node.input:
                return None
            seen = node.input[0]

    def _group(self, node: NodeProto, inputs: int | None = None) -> Group:
        view, group = self.view, Group(node)
        names = [name for name in node.input if name]
        found = [self._dequantizes(name) for name in names]
        group.dequantize = [one for one in found if one is not None]
        readers = view.consumers(node.output[0])
        last = node
        if len(readers) == 1 and readers[0].op_type in ("Relu", "Clip"):
            clip = readers[0]
            after = view.consumers(clip.output[0])
            if len(after) == 1 and clip.output[0] not in view.outputs:
                group.clip, last = clip, clip
        group.quantize = self._quantizes(last)
        if group.clip is not None:
            if len(group.quantize) != 1:
                group.refusal = f"a {group.clip.op_type} follows that no QuantizeLinear absorbs"
            elif not self._is_redundant(group.clip, group.quantize[0]):
                group.refusal = (
                    f"the range of the following {group.clip.op_type} is narrower than that of "
                    "its QuantizeLinear"
                )
        return group

    def _quantizes(self, node: NodeProto) -> list[NodeProto]:
        readers = self.view.consumers(node.output[0])
        found = [reader for reader in readers if reader.op_type == QUANTIZE]
        if not found and len(readers) == 1 and readers[0].op_type in MOVES:
            mover = readers[0]
            if mover.input[0] == node.output[0] and mover.output[0] not in self.view.outputs:
                after = self._quantizes(mover)
                if len(after) == 1 and len(self.view.consumers(mover.output[0])) == 1:
                    return after
        return found

    def _is_redundant(self, clip: NodeProto, quantize: NodeProto) -> bool:
        """Whether the quantized range lies inside the range of the Relu or Clip."""
        view = self.view
        scale = view.array(quantize.input[1])
        if scale is None or scale.ndim:
            return False
        zero, element = 0, view.element(quantize.output[0])
        if len(quantize.input) > 2 and quantize.input[2]:
            given = view.array(quantize.input[2])
            if given is None or given.ndim:
                return False
            zero = int(given)
        limits: dict[int, tuple[int, int]] = {U8: (0, 255), I8: (-128, 127)}
        limits |= {WIDE[0]: (-32768, 32767), WIDE[1]: (0, 65535)}
        if element not in limits:
            return False
        low, high = limits[element]
        if clip.op_type == "Relu":
            return zero == low
        bounds = [attribute(clip, "min", -3.4e38), attribute(clip, "max", 3.4e38)]
        for index, name in enumerate(clip.input[1:3]):
            if name:
                given = view.array(name)
                if given is None:
                    return False
                bounds[index] = float(given.reshape(()))
        with np.errstate(over="ignore"):
            least, most = (float(np.rint(np.float32(b) / np.float32(scale))) for b in bounds)
        return least + zero <= low and most + zero >= high

    def _why_not_qdq(self, group: Group, empty_allowed: bool = False) -> str:
        """Why the nodes around an op do not form a group; empty if they do."""
        view, node = self.view, group.node
        names = [name for name in node.input if name]
        if group.refusal:
            return group.refusal
        if len(group.dequantize) != len(names) and not self._bias_is_constant(group, names):
            missing = next(n for n in names if self._dequantizes(n) is None)
            return f"its input {missing!r} is not dequantized"
        if not group.quantize:
            return "" if empty_allowed else "its result is not quantized"
        if len(view.consumers(node.output[0])) != 1:
            return "its result has other readers than one QuantizeLinear"
        if node.output[0] in view.outputs:
            return "its result is an output of the model"
        return ""

    def _bias_is_constant(self, group: Group, names: list[str]) -> bool:
        """Whether only a constant float bias is missing, which ONNX Runtime quantizes itself."""
        is_product = group.node.op_type in ("Conv", "Gemm")
        return (
            is_product
            and len(names) == 3
            and len(group.dequantize) == 2
            and self._dequantizes(names[2]) is None
            and self.view.is_constant(names[2])
        )

    def _types(self, group: Group) -> list[int]:
        return [self._element(one.input[0]) for one in group.dequantize]

    def _output_type(self, group: Group) -> int:
        return self._element(group.quantize[0].output[0])

    def _element(self, name: str) -> int:
        """The element type after ONNX Runtime made signed activations unsigned.

        It does so where one DequantizeLinear with one reader reads the quantized value.
        """
        view = self.view
        element, node = view.element(name), view.producer(name)
        if element != I8 or node is None or node.op_type != QUANTIZE:
            return element
        if view.is_constant(node.input[0]):
            return I8  # folded before
        readers = view.consumers(name)
        if len(readers) != 1 or readers[0].op_type != DEQUANTIZE or name in view.outputs:
            return I8
        result = readers[0].output[0]
        uses = len(view.consumers(result)) + (result in view.outputs)
        return U8 if uses == 1 else I8

    # rules, each a kernel and a reason

    def _conv(self, node: NodeProto) -> tuple[str, str]:
        group = self._group(node)
        if why := self._why_not_qdq(group):
            return "", why
        types = self._types(group)
        if types[0] != self._output_type(group):
            return "", "input and result have different element types"
        if types[0] not in (U8, I8) or types[1] not in (U8, I8):
            return "", "only 8-bit convolutions have an integer kernel"
        if types[0] == I8:
            return "", SIGNED
        if len(types) == 3 and types[2] != TensorProto.INT32:
            return "", "its bias is not int32"
        return "QLinearConv", ""

    def _matmul(self, node: NodeProto) -> tuple[str, str]:
        group = self._group(node)
        if group.refusal:
            return "", group.refusal
        if len(group.dequantize) == 1:
            return self._nbits(node, group)
        types = self._types(group)
        if any(kind not in (U8, I8) for kind in types):
            return "", "only 8-bit operands have an integer kernel"
        if types[0] == I8:
            return "", SIGNED
        if not group.quantize:
            return "MatMulIntegerToFloat", ""
        if why := self._why_not_qdq(group):
            return "", why
        if types[0] != self._output_type(group):
            return "", "input and result have different element types"
        return "QLinearMatMul", ""

    def _nbits(self, node: NodeProto, group: Group) -> tuple[str, str]:
        """MatMulNBits for a dequantized weight and float activations."""
        view = self.view
        weight = view.dequantized(node.input[1])
        if weight is None:
            return "", "only one operand is dequantized, and it is not the weight"
        if group.quantize:
            return "", "its activations are float and its result is quantized"
        if len(view.consumers(weight.output[0])) != 1:
            return "", "its dequantized weight has several readers"
        tensors = [view.tensor(name) for name in weight.input if name]
        if any(tensor is None for tensor in tensors):
            return "", "its weight, scale or zero point is not a constant"
        q, scale, *zero = [tensor for tensor in tensors if tensor is not None]
        if q.data_type not in NARROW or len(q.dims) != 2:
            return "", "its weight is not a matrix of 2, 4 or 8 bits"
        block, axis = attribute(weight, "block_size", 0), attribute(weight, "axis", 1)
        if block:
            if axis != 0 or block < 16 or block & (block - 1):
                return "", "blocks are not along axis 0 with a power of two of at least 16"
            return "MatMulNBits", ""
        if len(scale.dims) == 0 and all(len(z.dims) == 0 for z in zero):
            return "MatMulNBits", ""
        if list(scale.dims) == [q.dims[1]] and axis in (1, -1):
            return "MatMulNBits", ""
        return "", "its scales are not per tensor, per column or in blocks"

    def _gemm_add(self, node: NodeProto | None) -> NodeProto | None:
        """The Add that ONNX Runtime joins with a MatMul of two matrices to a Gemm."""
        view = self.view
        if node is None or node.op_type != "MatMul":
            return None
        readers = view.consumers(node.output[0])
        if len(readers) != 1 or readers[0].op_type != "Add" or node.output[0] in view.outputs:
            return None
        shapes = [view.shape(name) for name in node.input]
        if shapes[0] is None or shapes[1] is None or len(shapes[1]) != 2:
            return None
        is_static = all(isinstance(size, int) for size in shapes[0])
        if len(shapes[0]) != 2 and not (is_static and view.tensor(node.input[1]) is not None):
            return None
        add = readers[0]
        other = add.input[0] if add.input[1] == node.output[0] else add.input[1]
        bias = view.shape(other)
        if bias is None or len(shapes[0]) != 2:
            return None
        columns = shapes[1][1]
        fits = tuple(bias) in ((columns,), (1, columns), (shapes[0][0], columns))
        return add if fits else None

    def _gemm(self, node: NodeProto, add: NodeProto | None = None) -> tuple[str, str]:
        merged = NodeProto()
        merged.CopyFrom(node)
        if add is not None:
            other = add.input[0] if add.input[1] == node.output[0] else add.input[1]
            merged.op_type = "Gemm"
            merged.input.append(other)
            merged.output[0] = add.output[0]
        group = self._group(merged)
        if group.refusal:
            return "", group.refusal
        transposed = attribute(merged, "transB", 0) or attribute(merged, "transA", 0)
        if len(group.dequantize) < 3 and self._dequantizes(merged.input[0]) is None:
            if transposed:
                return "", "its activations are float, and an operand is transposed"
            return self._nbits(merged, group)
        if why := self._why_not_qdq(group, empty_allowed=True):
            return "", why
        types = self._types(group)
        if any(kind not in (U8, I8) for kind in types[:2]):
            return "", "only 8-bit operands have an integer kernel"
        if types[0] == I8 and types[1] != I8:
            return "", "signed activations need a signed weight"
        if any(len(one.input) < 3 or not one.input[2] for one in group.dequantize[:2]):
            return "", "a DequantizeLinear before the Gemm has no zero point"
        if group.quantize and types[0] != self._output_type(group):
            return "", "input and result have different element types"
        if attribute(merged, "beta", 1.0) != 1.0:
            return "", "beta is not 1"
        return "QGemm", ""

    def _elementwise(self, node: NodeProto) -> tuple[str, str]:
        group = self._group(node)
        if why := self._why_not_qdq(group):
            return "", why
        types = {*self._types(group), self._output_type(group)}
        if len(types) != 1:
            return "", "inputs and result have different element types"
        if not types <= {U8, I8}:
            return "", "only 8 bits have an integer kernel"
        return f"QLinear{node.op_type}", ""

    # safety

    def _safe(self, node: NodeProto, verdict: Verdict) -> Verdict:
        bound = self.saturation(node)
        if bound is None or not bound.saturating:
            return verdict
        return Verdict(
            verdict.node,
            verdict.op,
            "unsafe",
            verdict.kernel,
            SATURATION.format(bound=bound),
            UNSIGNED_FIX if node.domain in DOMAINS else FUNCTION_FIX,
        )

    def saturation(self, node: NodeProto) -> PairBound | None:
        """The pairs of an s8 weight of a product whose activations are u8, or None."""
        operand = product_weight(self.view, node)
        if operand is None or node.op_type == "MatMulNBits":
            return None
        weight, is_transposed = operand
        tensor = self.view.tensor(weight)
        if tensor is None or tensor.data_type != I8 or len(tensor.dims) < 2:
            return None
        array = self.view.array(weight)
        if array is None:
            return None
        return pair_bound(as_matrix(array, node.op_type, is_transposed))


def product_weight(view: GraphView, node: NodeProto) -> tuple[str, bool] | None:
    """The name of the constant quantized weight of a product, and whether it is transposed."""
    places = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3}
    index = places.get(node.op_type, 1)
    if len(node.input) <= index:
        return None
    name = node.input[index]
    if node.op_type in ("Conv", "MatMul", "Gemm"):
        dequantize = view.dequantized(name)
        if dequantize is None:
            return None
        name = dequantize.input[0]
    elif not re.search("matmul|conv|gemm", node.op_type.lower()):
        return None
    return (name, bool(attribute(node, "transB", 0))) if view.is_constant(name) else None
