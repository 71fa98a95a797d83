"""Mixture of experts: the router selects k experts for each token.

    y[t] = sum over chosen experts e of weight[t, e] * fc2_e(activation(fc1_e(x[t])))

The k * T pairs of token and expert are sorted by expert, so that every expert multiplies one block
of rows; the results are then restored to the order of tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, refuse
from bitwright.frontend.onnx.microsoft.nbits import (
    around_middle,
    named_constant,
    unpacked_rows,
    weight_bits,
)
from bitwright.ir import Value
from bitwright.ir.dim import product

Layer = Callable[[Value, "Dispatch"], Value]
_ACTIVATIONS: dict[str, tuple[str, dict[str, str]]] = {
    "relu": ("relu", {}),
    "gelu": ("gelu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
    "identity": ("identity", {}),
}


class Dispatch:
    """Pairs of token and expert, sorted by expert."""

    def __init__(self, ctx: Context, chosen: Value, experts: int) -> None:
        tokens, k = chosen.shape
        flat = ctx.reshape(chosen, [tokens * k])
        order = ctx.b.top_k(flat, k=tokens * k, axis=0, largest=False)[1]
        self.experts = ctx.b.gather(flat, order, axis=0)
        self.tokens = ctx.b.div(order, ctx.const(k))
        self.back = ctx.b.top_k(order, k=tokens * k, axis=0, largest=False)[1]
        hot = ctx.b.one_hot(flat, ctx.const(np.array([0, 1])), depth=experts)
        self.counts = ctx.b.reduce_sum(hot, axes=[0], keepdims=False)


@microsoft("MoE", needs=3)
def mixture_of_experts(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, router, w1, b1, w2, b2, w3, b3 = (inputs[i] for i in range(8))
    if w2 is None:
        raise ImportModelError("the second weight is missing", where=node.where)
    layers = [_dense(ctx, w1, b1), _dense(ctx, w2, b2)]
    gate = None if w3 is None else _dense(ctx, w3, b3)
    return _mixture(ctx, node, x, router, router, layers[0], layers[1], gate, w1.shape[0])


@microsoft("QMoE", needs=3)
def quantized_mixture_of_experts(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, router = inputs[0], inputs[1]
    if node.text("quant_type", "int") != "int" or node.integer("weights_prepacked", -1) > 0:
        raise refuse(node, "its weights are floats or prepacked for one device")
    if any(inputs[i] is not None for i in range(15, 21)):
        raise refuse(node, "its activations are quantized")
    layers: list[Layer | None] = []
    for number, first in enumerate((2, 5, 8)):
        packed, scale, bias = (inputs[first + i] for i in range(3))
        own = f"fc{number + 1}_expert_weight_bits"
        bits = weight_bits(node, own if node.integer(own) else "expert_weight_bits")
        layers.append(
            None
            if packed is None or scale is None
            else _quantized(ctx, node, packed, scale, inputs[11 + number], bias, bits)
        )
    if layers[0] is None or layers[1] is None:
        raise ImportModelError("a weight or its scale is missing", where=node.where)
    weights = inputs[14] if inputs[14] is not None else router
    experts = inputs[2].shape[0]
    return _mixture(ctx, node, x, router, weights, layers[0], layers[1], layers[2], experts)


def _mixture(
    ctx: Context,
    node: OnnxNode,
    x: Value,
    router: Value,
    weights: Value,
    first: Layer,
    second: Layer,
    gate: Layer | None,
    experts: int,
) -> Value:
    if node.flag("use_sparse_mixer"):
        raise refuse(node, "use_sparse_mixer is set")
    if router.rank != 2 or x.rank not in (2, 3) or not isinstance(experts, int):
        raise ImportModelError(
            "its operands have the wrong rank",
            where=node.where,
            expected="tokens [.., T, features] and a router [T, experts]",
            found=f"{x.type} and {router.type}",
        )
    k = node.integer("k", 1)
    rows = ctx.reshape(x, [product(x.shape[:-1]), x.shape[-1]])
    shares, chosen = _route(ctx, node, router, weights, k)
    dispatch = Dispatch(ctx, chosen, experts)
    sorted_rows = ctx.b.gather(rows, dispatch.tokens, axis=0)
    hidden = first(sorted_rows, dispatch)
    gate_y = None if gate is None else gate(sorted_rows, dispatch)
    y = second(_activated(ctx, node, hidden, gate_y), dispatch)
    by_token = ctx.reshape(ctx.b.gather(y, dispatch.back, axis=0), [*chosen.shape, y.shape[1]])
    total = ctx.b.reduce_sum(
        ctx.b.mul(by_token, ctx.unsqueeze(shares, [-1])), axes=[1], keepdims=False
    )
    return ctx.reshape(total, x.shape)


def _route(
    ctx: Context, node: OnnxNode, router: Value, weights: Value, k: int
) -> tuple[Value, Value]:
    """The weights of the selected experts of each token, and their indices.

    ONNX Runtime's QMoE normalizes over the selected experts and ignores the attribute.
    """
    top, chosen = ctx.b.top_k(router, k=k, axis=1)
    if weights is not router:
        shares = ctx.b.gather_elements(weights, chosen, axis=1)
        if node.flag("normalize_routing_weights"):
            total = ctx.b.reduce_sum(shares, axes=[1], keepdims=True)
            shares = ctx.b.div(shares, total)
        return shares, chosen
    if node.flag("normalize_routing_weights") or node.op_type == "QMoE":
        return ctx.b.softmax(top, axis=1), chosen
    return ctx.b.gather_elements(ctx.b.softmax(router, axis=1), chosen, axis=1), chosen


def _with_bias(ctx: Context, y: Value, bias: Value | None, dispatch: Dispatch) -> Value:
    return y if bias is None else ctx.b.add(y, ctx.b.gather(bias, dispatch.experts, axis=0))


def _dense(ctx: Context, w: Value, bias: Value | None) -> Layer:
    """Rows times their expert's weight [experts, outputs, inputs]."""

    def layer(x: Value, dispatch: Dispatch) -> Value:
        y = ctx.b.grouped_matmul(x, ctx.transpose(w, 0, 2, 1), dispatch.counts)
        return _with_bias(ctx, y, bias, dispatch)

    return layer


def _quantized(
    ctx: Context,
    node: OnnxNode,
    packed: Value,
    scale: Value,
    zero: Value | None,
    bias: Value | None,
    bits: int,
) -> Layer:
    """The same with quantized weights, packed along the inputs."""
    bytes_ = ctx.need_array(packed, "the weight")
    qvalues = unpacked_rows(bytes_, bits, bytes_.shape[-1] * (8 // bits))
    columns = qvalues.shape[-1]
    block = node.integer("block_size", 0) or columns
    if scale.rank == 2:
        scale = ctx.unsqueeze(scale, [2])
    if zero is None:
        q, zeros = named_constant(ctx, around_middle(qvalues, bits), packed), None
    else:
        q = named_constant(ctx, qvalues, packed)
        zeros = _zero_points(ctx, zero, qvalues.shape[1], -(-columns // block), bits)

    def layer(x: Value, dispatch: Dispatch) -> Value:
        wide = ctx.cast(scale, x.dtype)
        y = ctx.b.dequant_grouped_matmul(x, q, wide, dispatch.counts, zeros, block=block)
        return _with_bias(ctx, y, bias, dispatch)

    return layer


def _zero_points(ctx: Context, zero: Value, rows: int, blocks: int, bits: int) -> Value:
    packed = ctx.need_array(zero, "the zero point")
    if packed.ndim == 3:
        return named_constant(ctx, unpacked_rows(packed, bits, blocks), zero)
    return named_constant(ctx, unpacked_rows(packed, bits, rows)[..., None], zero)


def _activated(ctx: Context, node: OnnxNode, hidden: Value, gate_y: Value | None) -> Value:
    name = node.text("activation_type", "relu")
    if name != "swiglu":
        if name not in _ACTIVATIONS:
            raise refuse(node, f"its activation {name!r} is not known")
        op, attrs = _ACTIVATIONS[name]
        y = ctx.b.op(op, hidden, **attrs)
        return y if gate_y is None else ctx.b.mul(y, gate_y)
    return _swiglu(ctx, node, hidden, gate_y)


def _swiglu(ctx: Context, node: OnnxNode, hidden: Value, gate_y: Value | None) -> Value:
    """g * sigmoid(alpha * g) * (l + beta); g and l interleaved, concatenated, or two products"""
    if gate_y is None:
        rows, both = hidden.shape
        half = both // 2
        if node.integer("swiglu_fusion", 0) == 1:
            pairs = ctx.reshape(hidden, [rows, half, 2])
            parts = ctx.b.split(pairs, axis=2, sizes=(1, 1))
            gate, linear = (ctx.squeeze(part, [2]) for part in parts)
        else:
            gate, linear = ctx.b.split(hidden, axis=1, sizes=(half, half))
    else:
        gate, linear = hidden, gate_y
    limit = node.number("swiglu_limit")
    if limit is not None:
        high, low = ctx.like(gate, limit), ctx.like(gate, -limit)
        gate, linear = ctx.b.minimum(gate, high), ctx.b.clip(linear, low, high)
    alpha, beta = node.number("activation_alpha", 1.0), node.number("activation_beta", 0.0)
    opened = ctx.b.mul(gate, ctx.b.sigmoid(ctx.b.mul(gate, ctx.like(gate, alpha))))
    return ctx.b.mul(opened, ctx.b.add(linear, ctx.like(gate, beta)))
