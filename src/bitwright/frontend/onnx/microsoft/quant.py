"""Integer products with float results, and layers with quantized weights."""

from __future__ import annotations

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.attention import attend_projected
from bitwright.frontend.onnx.microsoft.base import microsoft, scalar, standard
from bitwright.frontend.onnx.microsoft.norm import EPS, embedded, mask_index
from bitwright.frontend.onnx.microsoft.qlinear import dequantize
from bitwright.frontend.onnx.standard.quant import along, centred
from bitwright.ir import Value
from bitwright.ir.dtype import u8


def _product(ctx: Context, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None) -> Value:
    """(x - x_zero) @ (w - w_zero) in i32; w_zero may be per column."""
    rows = centred(ctx, x, scalar(ctx, x_zero))
    return ctx.b.matmul(rows, centred(ctx, w, w_zero, -1))


def _scaled(
    ctx: Context, total: Value, x_scale: Value, w_scale: Value, bias: Value | None
) -> Value:
    """total * x_scale * w_scale + bias, where w_scale may be per column"""
    factor = ctx.b.mul(ctx.reshape(x_scale, []), along(ctx, w_scale, total.rank, -1))
    y = ctx.b.mul(ctx.cast(total, factor.dtype), factor)
    return y if bias is None else ctx.b.add(y, bias)


@microsoft("MatMulIntegerToFloat", needs=4)
def matmul_integer_to_float(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, x_scale, w_scale, x_zero, w_zero, bias = (inputs[i] for i in range(7))
    return _scaled(ctx, _product(ctx, x, w, x_zero, w_zero), x_scale, w_scale, bias)


@microsoft("DynamicQuantizeMatMul", needs=3)
def dynamic_quantize_matmul(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, w_scale, w_zero, bias = (inputs[i] for i in range(5))
    qvalues, x_scale, x_zero = ctx.b.dynamic_quantize(x, to=u8)
    return _scaled(ctx, _product(ctx, qvalues, w, x_zero, w_zero), x_scale, w_scale, bias)


@microsoft("MatMulInteger16", needs=2)
def matmul_integer16(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    return ctx.b.matmul(ctx.cast(inputs[0], "i32"), ctx.cast(inputs[1], "i32"))


@microsoft("ReduceSumInteger")
def reduce_sum_integer(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x = inputs[0]
    wide = ctx.cast(x, "i32" if x.dtype.is_signed else "u32")
    return standard(ctx, node, "ReduceSum", [wide], version=11)


@microsoft("QGemm", needs=6)
def qgemm(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """alpha * a_scale * b_scale * ((A - a_zero) @ (B - b_zero) + C), quantized if y has a scale"""
    x, x_scale, x_zero, w, w_scale, w_zero, bias, y_scale, y_zero = (inputs[i] for i in range(9))
    if node.flag("transA"):
        x = ctx.transpose(x, 1, 0)
    if node.flag("transB"):
        w = ctx.transpose(w, 1, 0)
    total = _product(ctx, x, w, x_zero, w_zero)
    if bias is not None:
        total = ctx.b.add(total, bias)
    alpha = node.number("alpha", 1.0)
    x_scale = x_scale if alpha == 1 else ctx.b.mul(x_scale, ctx.like(x_scale, alpha))
    y = _scaled(ctx, total, x_scale, w_scale, None)
    if y_scale is None:
        return y
    target = u8 if y_zero is None else y_zero.dtype
    return ctx.b.quantize(y, scalar(ctx, y_scale), scalar(ctx, y_zero), to=target)


@microsoft("QAttention", needs=5)
def qattention(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, w, bias, x_scale, w_scale, mask, x_zero, w_zero, past = (inputs[i] for i in range(9))
    total = _product(ctx, x, w, x_zero, w_zero)
    return attend_projected(ctx, node, _scaled(ctx, total, x_scale, w_scale, bias), mask, past)


@microsoft("DynamicQuantizeLSTM", needs=3)
def dynamic_quantize_lstm(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    """A float LSTM with dequantized weights; ONNX Runtime quantizes inputs and states too."""
    x, w, r, bias, lengths, h0, c0, peephole = (inputs[i] for i in range(8))
    w_scale, w_zero, r_scale, r_zero = (inputs[i] for i in range(8, 12))
    if w_scale is None or r_scale is None:
        raise ImportModelError("the scales of the weights are missing", where=node.where)
    wide_w, wide_r = _gates(ctx, w, w_scale, w_zero), _gates(ctx, r, r_scale, r_zero)
    operands = [x, wide_w, wide_r, bias, lengths, h0, c0, peephole]
    return standard(ctx, node, "LSTM", operands, version=14)


def _gates(ctx: Context, qvalues: Value, scale: Value, zero: Value | None) -> Value:
    """Dequantized weights [directions, inputs, gates], with gates and inputs transposed.

    Scales are one for each direction, or one for each gate of each direction.
    """
    directions, inputs, gates = qvalues.shape
    if not isinstance(inputs, int):
        raise ImportModelError("the size of its weights is not known", found=qvalues.type)

    def per_gate(x: Value) -> Value:
        column = ctx.reshape(x, [directions, 1, x.shape[1] if x.rank == 2 else 1])
        return ctx.b.expand(column, shape=(directions, 1, gates))

    zeros = None if zero is None else per_gate(zero)
    wide = ctx.b.dequantize(qvalues, per_gate(scale), zeros, axis=1, block=inputs)
    return ctx.transpose(wide, 0, 2, 1)


@microsoft("QEmbedLayerNormalization")
def qembed_layer_normalization(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    ids, segments, words, positions, table, gamma, beta, mask = (inputs[i] for i in range(8))
    scales, zeros = [inputs[i] for i in range(8, 13)], [inputs[i] for i in range(13, 18)]
    tables = [words, positions, table, gamma, beta]
    wide = [
        None if qvalues is None or scale is None else dequantize(ctx, qvalues, scale, zero)
        for qvalues, scale, zero in zip(tables, scales, zeros, strict=True)
    ]
    words, positions, table, gamma, beta = wide
    total = embedded(ctx, node, ids, words, positions, None)
    if segments is not None and table is not None:
        total = ctx.b.add(total, ctx.b.gather(table, segments, axis=0))
    y = ctx.b.layer_norm(total, gamma, beta, axis=-1, eps=node.number("epsilon", EPS))
    return [y, mask_index(ctx, ids, mask)]
