"""Weights of 2, 4 or 8 bits, packed into bytes with the lowest bits first.

    MatMulNBits            x @ ((q - zero) * scale)', with a scale for each block of a row
    GatherBlockQuantized   rows of such a table
    MatMulBnb4             4-bit indices into a table of values

The default zero point is 2^(bits - 1); signed values around 0 replace it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.errors import ImportModelError
from bitwright.frontend.onnx.api import Context, Inputs, OnnxNode, Results
from bitwright.frontend.onnx.microsoft.base import microsoft, refuse, required
from bitwright.frontend.onnx.tensor import unpack
from bitwright.ir import Value
from bitwright.ir.dtype import DTYPES
from bitwright.ir.types import normalize_axis

Array = np.ndarray[Any, Any]
BITS = (2, 4, 8)
NORMAL_FLOAT4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_FLOAT4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FLOAT4 = (*_FLOAT4, *(-value for value in _FLOAT4))


def unpacked_rows(packed: Array, bits: int, count: int) -> Array:
    """The first `count` values of each packed row [..., bytes], unsigned."""
    if packed.dtype != np.uint8 or not packed.ndim:
        raise ImportModelError("its packed values are not u8", found=packed.dtype.name)
    element = DTYPES[f"u{bits}"]
    per_byte = element.values_per_byte
    if packed.shape[-1] * per_byte < count:
        raise ImportModelError(
            "it has too few packed values", expected=count, found=packed.shape[-1] * per_byte
        )
    flat = np.ascontiguousarray(packed).reshape(-1)
    qvalues = flat if bits == 8 else unpack(flat, element, flat.size * per_byte)
    return qvalues.reshape(*packed.shape[:-1], packed.shape[-1] * per_byte)[..., :count]


def around_middle(qvalues: Array, bits: int) -> Array:
    """The values minus 2^(bits - 1), signed: the highest bit is flipped."""
    half = 1 << (bits - 1)
    distance = qvalues.astype(np.uint8).astype(np.int16) - half
    return distance.astype(np.int8).astype(DTYPES[f"i{bits}"].numpy)


def named_constant(ctx: Context, array: Array, like: Value) -> Value:
    """A constant with the name of `like`."""
    value = ctx.b.constant(np.ascontiguousarray(array))
    ctx.frame.claim(value, like.name)
    return value


def weight_bits(node: OnnxNode, name: str = "bits") -> int:
    bits: int = node.integer(name, 4)
    if bits not in BITS:
        raise refuse(node, f"{bits} is not in {BITS}")
    return bits


@microsoft("MatMulNBits", needs=3)
def matmul_nbits(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, packed, scale, zero, order, bias = (inputs[i] for i in range(6))
    if order is not None:
        raise refuse(node, "its columns are reordered (g_idx), which is deprecated")
    if node.flag("weight_prepacked"):
        raise refuse(node, "its weights are prepacked for one GPU kernel")
    columns, rows, block = required(node, "K"), required(node, "N"), required(node, "block_size")
    bits = weight_bits(node)
    if min(columns, rows, block) < 1 or block * bits % 8:
        raise ImportModelError(
            "K, N or block_size does not fit", where=node.where, found=(columns, rows, block)
        )
    blocks = -(-columns // block)
    data = ctx.need_array(packed, "the weight")
    if data.size != rows * blocks * block * bits // 8:
        raise ImportModelError(
            "its packed values do not fit K, N and block_size",
            where=node.where,
            expected=f"{rows * blocks * block * bits // 8} bytes",
            found=packed.type,
        )
    qvalues = unpacked_rows(data.reshape(rows, -1), bits, columns)
    if scale.shape != (rows, blocks):
        known = ctx.array(scale)
        if known is not None and known.size == rows * blocks:
            scale = named_constant(ctx, known.reshape(rows, blocks), scale)
        else:
            scale = ctx.reshape(scale, [rows, blocks])
    if zero is None:
        q = named_constant(ctx, around_middle(qvalues, bits), packed)
    else:
        q = named_constant(ctx, qvalues, packed)
        zero = _zero_points(ctx, zero, bits, rows, blocks)
    return ctx.b.dequant_matmul(x, q, scale, zero, bias, block=block)


def _zero_points(ctx: Context, zero: Value, bits: int, rows: int, blocks: int) -> Value:
    if zero.dtype.is_float:
        return ctx.reshape(zero, [rows, blocks])
    packed = ctx.need_array(zero, "the zero point")
    if not packed.size or packed.size % rows:
        raise ImportModelError("its zero points do not fit its rows", found=zero.type)
    return named_constant(ctx, unpacked_rows(packed.reshape(rows, -1), bits, blocks), zero)


@microsoft("GatherBlockQuantized", needs=3)
def gather_block_quantized(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    data, indices, scale, zero = (inputs[i] for i in range(4))
    block = node.integer("block_size", 128)
    axis = normalize_axis(node.integer("quantize_axis", 1), data.rank)
    place = normalize_axis(node.integer("gather_axis", 0), data.rank)
    if data.dtype.name == "u8":
        data, zero = _unpack_table(ctx, node, data, scale, zero)
    size = data.shape[axis]
    block = block or size
    if not isinstance(block, int) or block < 1:
        raise ImportModelError("block_size does not fit", where=node.where, found=block)
    if place == axis:
        table = ctx.b.dequantize(data, scale, zero, axis=axis, block=block)
        return ctx.b.gather(table, indices, axis=place)
    parts = [
        None if x is None else ctx.b.gather(x, indices, axis=place) for x in (data, scale, zero)
    ]
    moved = axis + indices.rank - 1 if place < axis else axis
    return ctx.b.dequantize(*parts, axis=moved, block=block)


def _unpack_table(
    ctx: Context, node: OnnxNode, data: Value, scale: Value, zero: Value | None
) -> tuple[Value, Value | None]:
    """Values and zero points, unpacked along the last axis."""
    bits = weight_bits(node)
    bytes_ = ctx.need_array(data, "the table")
    qvalues = unpacked_rows(bytes_, bits, bytes_.shape[-1] * (8 // bits))
    if zero is None:
        return named_constant(ctx, around_middle(qvalues, bits), data), None
    count = scale.shape[-1]
    if not isinstance(count, int):
        raise refuse(node, f"the size of its scales {scale.type} is not known")
    zeros = unpacked_rows(ctx.need_array(zero, "the zero point"), bits, count)
    return named_constant(ctx, qvalues, data), named_constant(ctx, zeros, zero)


@microsoft("MatMulBnb4", needs=3)
def matmul_bnb4(ctx: Context, node: OnnxNode, inputs: Inputs) -> Results:
    x, packed, scale = inputs[0], inputs[1], inputs[2]
    columns, rows, block = required(node, "K"), required(node, "N"), required(node, "block_size")
    kind = required(node, "quant_type")
    if not node.flag("transB", 1):
        raise refuse(node, "transB is 0, which is for training")
    if kind not in (0, 1) or min(columns, rows, block) < 1:
        raise ImportModelError(
            "its type or sizes do not fit", where=node.where, found=(kind, columns, rows, block)
        )
    count = columns * rows
    bytes_ = ctx.need_array(packed, "the weight").reshape(-1)
    if bytes_.size != (count + 1) // 2 or scale.shape != (-(-count // block),):
        raise ImportModelError(
            "its packed values or scales do not fit K and N",
            where=node.where,
            found=f"{packed.type} and {scale.type}",
        )
    qvalues = np.stack([bytes_ >> 4, bytes_ & 15], axis=1).reshape(-1)[:count]
    table = ctx.const(FLOAT4 if kind == 0 else NORMAL_FLOAT4, x.dtype)
    places = ctx.cast(named_constant(ctx, qvalues, packed), "i32")
    values = ctx.b.gather(table, places, axis=0)
    spread = ctx.b.gather(scale, ctx.const(np.arange(count) // block, "i32"), axis=0)
    w = ctx.reshape(ctx.b.mul(values, spread), [rows, columns])
    return ctx.b.matmul(x, ctx.transpose(w, 1, 0))
