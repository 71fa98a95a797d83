"""Statically quantized convolutions that ONNX Runtime does not fuse to an integer node.

ONNX Runtime fuses a QDQ convolution to QLinearConv only if its result is quantized directly. Any
other runs in f32 with separate quantize and dequantize nodes, which is slower than the float model.
Such a convolution is written in float, with dequantized weights, as a region; bitwright quantizes
the image again when it imports the file.

    conv(dequantize(quantize(x)), dequantize(w), dequantize(b))  ->  Conv(x, w', b')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.export.onnx.arithmetic import is_plain_dequantize
from bitwright.export.onnx.forms import as_scalar
from bitwright.export.onnx.functions import region
from bitwright.export.onnx.mappings.windows import conv as conv_form
from bitwright.export.onnx.operands import Operands, dequantizes_constant
from bitwright.export.onnx.scope import Ref, Scope
from bitwright.ir.dtype import f32, i32
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.core.registry import get

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StaticConv:
    node: Node
    quantizer: Node
    """The node that quantizes the image."""
    weight: Node
    """The node that dequantizes the filters."""
    bias: Node | None
    """The node that dequantizes the bias, or a constant."""

    @property
    def scale(self) -> float:
        return float(_known(self.quantizer.inputs[1]).reshape(-1)[0])

    @property
    def zero_point(self) -> int:
        zero = (*self.quantizer.inputs, None)[2]
        return 0 if zero is None else int(_known(zero).reshape(-1)[0])

    @property
    def taken(self) -> list[Value]:
        """Values that become dead if only such convolutions read them."""
        image = self.node.inputs[0]
        assert image is not None
        nodes = [image.node, self.quantizer, self.weight]
        if self.bias is not None and self.bias.op == "dequantize":
            nodes.append(self.bias)
        parameters = [v for n in (image.node, self.quantizer) for v in n.inputs[1:]]
        return [*(n.outputs[0] for n in nodes), *(v for v in parameters if v is not None)]


def static_conv(node: Node) -> StaticConv | None:
    """The parts of a convolution of a statically quantized image with constant filters."""
    if node.op != "conv" or node.outputs[0].dtype != f32 or node.inputs[0] is None:
        return None
    image, weight, bias = (*node.inputs, None)[:3]
    assert image is not None and weight is not None
    quantizer = _quantizer(image.node)
    if quantizer is None or not (dequantizes_constant(weight.node) and _is_filter(weight.node)):
        return None
    if bias is not None and not (bias.is_constant or _is_bias(bias.node)):
        return None
    if any(not isinstance(n, int) for n in node.attrs.get("pads") or ()):
        return None
    return StaticConv(node, quantizer, weight.node, None if bias is None else bias.node)


def _quantizer(node: Node) -> Node | None:
    """The node that quantizes the operand of this dequantize, with the same constant scale."""
    if node.op != "dequantize" or node.attrs.get("axis") is not None:
        return None
    made = next(node.operands).node
    if made.op != "quantize" or made.attrs.get("axis") is not None or made.attrs.get("precision"):
        return None
    parameters = [constant_value(v) for n in (node, made) for v in (*n.inputs, None)[1:3]]
    scale, zero, other_scale, other_zero = parameters
    if scale is None or other_scale is None or scale.size != 1:
        return None
    same = np.array_equal(scale.reshape(-1), other_scale.reshape(-1))
    zeros = [0 if z is None else int(z.reshape(-1)[0]) for z in (zero, other_zero)]
    return made if same and zeros[0] == zeros[1] and next(made.operands).dtype == f32 else None


def _is_filter(node: Node) -> bool:
    return (
        is_plain_dequantize(node)
        and not node.attrs.get("block")
        and node.attrs["axis"] in (None, 0)
    )


def _is_bias(node: Node) -> bool:
    is_known = dequantizes_constant(node) and len(node.inputs) == 2
    return is_known and next(node.operands).dtype == i32 and node.attrs.get("axis") in (None, 0)


def is_fused(conv: StaticConv, operands: Operands) -> bool:
    """Whether a runtime fuses the convolution to an integer node: its result is quantized directly,
    after at most a relu or clip that the quantized range implies."""
    value, low, high = conv.node.outputs[0], -np.inf, np.inf
    while value not in operands.graph.results:
        readers = operands.direct[value]
        if len(readers) != 1:
            return False
        (reader,) = readers
        if reader.op == "quantize":
            return _implies(reader, low, high)
        if reader.op == "relu":
            low = max(low, 0.0)
        elif reader.op == "clip":
            below, above = (constant_value(v) for v in (*reader.inputs, None, None)[1:3])
            low = max(low, -np.inf if below is None else float(below.max()))
            high = min(high, np.inf if above is None else float(above.min()))
        else:
            return False
        value = reader.outputs[0]
    return False


def _implies(quantizer: Node, low: float, high: float) -> bool:
    """Whether the quantized range is within these bounds."""
    scale, zero = (constant_value(v) for v in (*quantizer.inputs, None)[1:3])
    if scale is None or scale.size != 1 or quantizer.attrs.get("axis") is not None:
        return False
    point = 0 if zero is None else int(zero.reshape(-1)[0])
    to = get("quantize").call_attrs(quantizer.attrs)["to"]
    step = float(scale.reshape(-1)[0])
    return bool((to.min - point) * step >= low and (to.max - point) * step <= high)


def _known(value: Value | None) -> Array:
    found = constant_value(value)
    assert found is not None
    return found


def write_static_conv(e: Scope, conv: StaticConv) -> Ref:
    attrs = get("conv").call_attrs(conv.node.attrs)
    image = next(conv.quantizer.operands)
    weight = [*conv.weight.inputs, None][:3]
    bias: list[Value | None] = [None, None]
    if conv.bias is not None:
        dequantized = conv.bias.op == "dequantize"
        bias = list(conv.bias.inputs) if dequantized else [conv.bias.outputs[0], None]
    given = [None if v is None else e.values[v] for v in (image, *weight, *bias)]
    while given[-1] is None:
        given.pop()
    per_filter = conv.weight.attrs.get("axis") is not None
    rank = image.rank

    def body(e: Scope, *operands: Ref | None) -> tuple[Ref, ...]:
        given: list[Ref | None] = [*operands, *[None] * (6 - len(operands))]
        x, w, scale, zero, b, b_scale = given
        assert x is not None and w is not None and scale is not None
        y = e.cast(w, i32)
        if zero is not None:
            y = e.Sub(y, _spread(e, e.cast(zero, i32), per_filter, rank))
        y = e.Mul(e.cast(y, f32), _spread(e, scale, per_filter, rank))
        if b is not None and b_scale is not None:
            b = e.Mul(e.cast(b, f32), b_scale)
        return (conv_form(e, x, y, b, **attrs),)

    noted = {
        **attrs,
        "scale": conv.scale,
        "zero_point": conv.zero_point,
        "to": get("quantize").call_attrs(conv.quantizer.attrs)["to"],
        "per_filter": per_filter,
    }
    return region(e, "static_conv", given, noted, body)[0]


def _spread(e: Scope, parameter: Ref, per_filter: bool, rank: int) -> Ref:
    """A scale or zero point, reshaped to broadcast over filters."""
    if not per_filter:
        return as_scalar(e, parameter)
    return e.Reshape(parameter, e.ints([-1, *[1] * (rank - 1)]))
