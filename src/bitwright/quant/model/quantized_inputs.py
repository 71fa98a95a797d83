"""Nodes that quantize and dequantize the input of a product.

    static    one range, fixed at calibration
    dynamic   ranges computed at run time, one per row or one for the tensor

Smoothing divides channels by factors first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bitwright.ir.arrays import Array
from bitwright.ir.dtype import f32
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ops.core.builder import Builder
from bitwright.quant.model.weights.choose import ActivationQuant


def builder_for(graph: Graph) -> Builder:
    """A builder whose new names and symbols differ from those of the graph."""
    b = Builder(graph.name)
    for node in graph.nodes:
        for name in node.names:
            b.fresh_name(name)
    b.reserve_symbols(s.name for s in graph.input_symbols)
    return b


def static_qvalues(
    b: Builder, x: Value, activation: ActivationQuant, axis: int, alone: bool = False
) -> Value:
    """x / f, quantized with the static range and dequantized; f has one factor per channel."""
    range_ = activation.range
    assert range_ is not None
    scale, zero = np.float32(range_.scale), np.uint8(range_.zero_point)
    name = f"{x.name}.quantized"
    x = _smoothed(b, x, activation, axis, alone)
    if activation.format:
        qvalues = b.quantize(x, scale, to="f8e4m3fn", name=name)
        return b.dequantize(qvalues, scale)  # type: ignore[no-any-return]
    qvalues = b.quantize(x, scale, zero, to="u8", name=name)
    return b.dequantize(qvalues, scale, zero)  # type: ignore[no-any-return]


def dynamic_qvalues(
    b: Builder,
    x: Value,
    activation: ActivationQuant,
    axis: int,
    alone: bool,
    im2col: Callable[[Value], Value] | None = None,
) -> Value:
    """x / f, quantized with ranges computed at run time and dequantized.

    `im2col` copies convolution windows into rows first.
    """
    per_token = activation.scheme == "dynamic_per_token"
    x = _smoothed(b, x, activation, axis, alone)
    if im2col is not None:
        x = im2col(x)
    to = "f8e4m3fn" if activation.format else "u8"
    qvalues, scale, zero = b.dynamic_quantize(x, to=to, per_token=per_token)
    rows = {"axis": -1, "block": int(x.shape[-1])} if per_token else {}
    if activation.format:  # without zero points
        return b.dequantize(qvalues, scale, **rows)  # type: ignore[no-any-return]
    return b.dequantize(qvalues, scale, zero, **rows)  # type: ignore[no-any-return]


def _smoothed(b: Builder, x: Value, activation: ActivationQuant, axis: int, alone: bool) -> Value:
    """x / f, with one factor per channel on `axis`.

    If x has no other reader (`alone`), the division folds into its producer. It precedes a relu,
    relu(v / f), where it joins the scales of the preceding product (OpenVINO 2026.4 computes the
    other order wrongly). For v a + c, and for a norm with a scale, it folds into the constants.
    """
    if activation.factors is None:
        return x
    shape = [-1 if i == axis else 1 for i in range(x.rank)]
    inverse = activation.inverse.astype(np.float32)
    is_uniform = inverse.size > 0 and (inverse == inverse[0]).all()
    inverse = inverse[0] if is_uniform else inverse.reshape(shape)
    if alone and x.node.op == "relu":
        return b.relu(b.mul(*x.node.operands, inverse))  # type: ignore[no-any-return]
    if alone and axis == x.rank - 1 and (known := _constants_of_norm(x.node)):
        scaled = [(a * activation.inverse).astype(np.float32) for a in known]
        return getattr(b, x.node.op)(x.node.inputs[0], *scaled, **x.node.attrs)  # type: ignore[no-any-return]
    if alone and (parts := _multiple_and_constant(x)):
        v, a, c = parts
        scaled = [(known * inverse.astype(np.float64)).astype(np.float32) for known in (a, c)]
        return b.add(b.mul(v, scaled[0]), scaled[1])  # type: ignore[no-any-return]
    return b.mul(x, inverse)  # type: ignore[no-any-return]


def _constants_of_norm(node: Node) -> list[Array]:
    """Scale, and bias if there is one, of an f32 norm with one number per column."""
    if node.op not in ("layer_norm", "rms_norm") or node.outputs[0].dtype != f32:
        return []
    scale, *more = (*node.inputs[1:], None)
    given = [scale, *(value for value in more if value is not None)]
    known = [a for value in given if (a := constant_value(value)) is not None]
    fits = len(known) == len(given) and all(a.shape == node.outputs[0].shape[-1:] for a in known)
    return known if fits else []


def _multiple_and_constant(x: Value) -> tuple[Value, Array, Array] | None:
    """v, a and c of x = v a + c with constants that broadcast over v."""
    outer = with_constant(x, "add")
    inner = None if outer is None else with_constant(outer[0], "mul")
    return None if outer is None or inner is None else (*inner, outer[1])


def with_constant(x: Value, op: str) -> tuple[Value, Array] | None:
    """The operands of an f32 node if one has its shape and the other is constant."""
    if x.node.op != op or x.dtype != f32:
        return None
    for value, other in (x.node.inputs, x.node.inputs[::-1]):
        known = constant_value(other)
        if known is not None and value is not None and value.shape == x.shape:
            return value, known
    return None
