"""Matrix products with weight-only quantization: weights are dequantized block by block.

    dequant_matmul           x @ ((q - zero_point) * scale).T + bias
    dequant_grouped_matmul   the same per expert, rows of x sorted by expert

q[..., N, K] has an integer or small float type; each entry of scale and zero_point
[..., N, ceil(K / block)] applies to `block` consecutive values of K. The last block may be short.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import InferenceError
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import composed
from bitwright.ops.math.matmul import (
    add_bias,
    multiply,
    multiply_grouped,
    require_bias,
    require_counts,
    swap_last,
)
from bitwright.ops.quant.parameters import spread_value
from bitwright.ops.quant.quantize import is_quantized_dtype
from bitwright.ops.shape.gather import check_shape


def _require_blocks(
    x: TensorType, q: TensorType, scale: TensorType, zero_point: TensorType | None, block: int
) -> None:
    """Check q[..., K] and its scale and zero point per block of K."""
    is_8_bit = lambda d: is_quantized_dtype(d) and d.bits <= 8
    expect.floating("x", x)
    expect.dtype("q", q, is_8_bit, "a quantized type of at most 8 bits")
    expect.floating("scale", scale)
    if block < 1:
        raise InferenceError("the block is too small", expected="at least 1", found=block)
    if not x.rank:
        raise InferenceError("x has the wrong rank", expected="rank 1 or more", found=x)
    expect.size("the last axis of q", q.shape[-1], x.shape[-1])
    blocks = (q.shape[-1] + block - 1) // block
    for what, type_ in (("scale", scale), ("zero_point", zero_point)):
        if type_ is not None:
            expect.shape(what, type_, (*q.shape[:-1], blocks))
    if zero_point is not None:
        expect.dtype(
            "zero_point", zero_point, lambda d: d == q.dtype or d.is_float, f"{q.dtype} or a float"
        )


def dequantize_blocks(q: Array, scale: Array, zero_point: Array | None, block: int) -> Array:
    """(q - zero_point) * scale, where each scale applies to `block` values of the last axis."""

    def spread(what: str, parameter: Array) -> Array:
        check_shape(what, parameter.shape, (*q.shape[:-1], -(-q.shape[-1] // block)))
        return np.repeat(wide(parameter).astype(np.float64), block, axis=-1)[..., : q.shape[-1]]

    qvalues = wide(q).astype(np.float64)
    if zero_point is not None:
        qvalues = qvalues - spread("zero_point", zero_point)
    return np.asarray(qvalues * spread("scale", scale))


def _infer_dequant(
    x: TensorType,
    q: TensorType,
    scale: TensorType,
    zero_point: TensorType | None,
    bias: TensorType | None,
    block: int,
) -> TensorType:
    expect.rank("q", q, 2)
    _require_blocks(x, q, scale, zero_point, block)
    require_bias(bias, x.dtype, q.shape[0])
    return x.with_shape((*x.shape[:-1], q.shape[0]))


def _dequant(
    x: Array, q: Array, scale: Array, zero_point: Array | None, bias: Array | None, block: int
) -> Array:
    return add_bias(multiply(x, dequantize_blocks(q, scale, zero_point, block).T), bias)


def _infer_dequant_grouped(
    x: TensorType,
    q: TensorType,
    scale: TensorType,
    counts: TensorType,
    zero_point: TensorType | None,
    block: int,
) -> TensorType:
    expect.rank("x", x, 2)
    expect.rank("q", q, 3)
    _require_blocks(x, q, scale, zero_point, block)
    require_counts(counts, q.shape[0])
    return x.with_shape((x.shape[0], q.shape[1]))


def _dequant_grouped(
    x: Array, q: Array, scale: Array, counts: Array, zero_point: Array | None, block: int
) -> Array:
    return multiply_grouped(
        x, dequantize_blocks(q, scale, zero_point, block).swapaxes(1, 2), counts
    )


def _dequant_samples() -> list[Sample]:
    i4 = draw(6, 8, dtype="i4", low=-8, high=7)
    u4 = draw(6, 7, dtype="u4", low=0, high=15)
    scale = draw(6, 2, seed=1, low=0.1)
    zero = draw(6, 2, dtype="u4", seed=2, low=0, high=15)
    return [
        sample(draw(3, 8, seed=3), i4, scale, block=4),
        sample(draw(2, 3, 7, seed=3), u4, scale, zero, draw(6, seed=4), block=4),
        sample(
            draw(7, seed=3), draw(6, 7, dtype="i2", low=-2, high=1), scale[:, :1], None, block=7
        ),
        sample(draw(2, 7, seed=3), u4, scale, draw(6, 2, seed=2, low=0, high=15), block=4),
    ]


def _dequant_grouped_samples() -> list[Sample]:
    qvalues = draw(2, 6, 8, dtype="u4", low=0, high=15)
    scale, counts = draw(2, 6, 2, seed=1, low=0.1), np.array([3, 1])
    zero = draw(2, 6, 2, dtype="u4", seed=2, low=0, high=15)
    return [
        sample(draw(4, 8, seed=3), qvalues, scale, counts, block=4),
        sample(draw(4, 8, seed=3), qvalues, scale, counts, zero, block=4),
    ]


def _weights(b: Builder, x: Value, q: Value, scale: Value, zero: Value | None, block: int) -> Any:
    """The dequantized weights [..., N, K], in the type of x."""
    if zero is None or zero.dtype == q.dtype:
        return b.dequantize(q, scale, zero, axis=q.rank - 1, block=block, to=x.dtype)
    offset, factor = (
        spread_value(b, p if p.dtype == x.dtype else b.cast(p, to=x.dtype), q, q.rank - 1, block)
        for p in (zero, scale)
    )
    return b.mul(b.sub(b.cast(q, to=x.dtype), offset), factor)


def _compose(
    b: Builder,
    x: Value,
    q: Value,
    scale: Value,
    zero_point: Value | None,
    bias: Value | None,
    block: int,
) -> Any:
    y = b.matmul(x, swap_last(b, _weights(b, x, q, scale, zero_point, block)))
    return y if bias is None else b.add(y, bias)


def _compose_grouped(
    b: Builder,
    x: Value,
    q: Value,
    scale: Value,
    counts: Value,
    zero_point: Value | None,
    block: int,
) -> Any:
    w = swap_last(b, _weights(b, x, q, scale, zero_point, block))
    return b.grouped_matmul(x, w, counts)


OPDEFS = [
    OpDef(
        "dequant_matmul",
        Kind.COMPUTE,
        "x, q, scale, zero_point?, bias?",
        infer=_infer_dequant,
        reference=_dequant,
        takes_epilogue=True,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1],
        samples=_dequant_samples,
        grad=composed(_compose),
        attrs={"block": Attr("int")},
        doc="x @ dequant(q).T + bias with quantized q[N, K] and a scale for each block of K.",
        keeps=("scale", "zero_point"),
    ),
    OpDef(
        "dequant_grouped_matmul",
        Kind.COMPUTE,
        "x, q, scale, counts, zero_point?",
        infer=_infer_dequant_grouped,
        reference=_dequant_grouped,
        flops=lambda xs, ys, attrs: 2 * ys[0].count * xs[0].shape[-1],
        samples=_dequant_grouped_samples,
        grad=composed(_compose_grouped),
        attrs={"block": Attr("int")},
        doc="grouped_matmul with quantized q[E, N, K] and a scale for each block of K.",
        keeps=("scale", "zero_point"),
    ),
]
