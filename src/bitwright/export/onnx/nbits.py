"""Matmuls with quantized weights as MatMulNBits of ONNX Runtime.

    matmul(x, dequantize(w [K, N], scales))  ->  MatMulNBits(x, packed [N, blocks, bytes], scales)

Values of 2, 4 or 8 bits are unsigned, packed with the lowest bits first, and each row is padded to
whole blocks. Signed values are shifted by 2^(bits - 1), the default zero point. A scale per column
is repeated for each of its blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.export.onnx.scope import Ref, Scope, Step
from bitwright.ir.dtype import DType, f32, u8
from bitwright.ir.graph import Node, Value

Array = np.ndarray[Any, Any]
DOMAIN = "com.microsoft"
BITS = (2, 4, 8)
BLOCKS = (16, 32, 64, 128, 256)
"""The block sizes of ONNX Runtime's kernels."""
EXACT = 1
"""The accuracy level that computes in f32, without quantizing rows to 8 bits."""


Parts = tuple[Value, Value, Value, Value | None]


def weight_only(node: Node) -> Parts | None:
    """Rows, weight, scales and zero points of a matmul that MatMulNBits supports, or None."""
    if node.op not in ("matmul", "dequant_matmul"):
        return None
    x, w, *rest = node.inputs
    assert x is not None and w is not None
    if node.op == "dequant_matmul":
        q, scale, zero = (w, *rest, None)[:3]
        fits = node.attrs["block"] in BLOCKS
    else:
        if w.node.op != "dequantize" or w.rank != 2 or x.node.op == "dequantize" or w.dtype != f32:
            return None
        q, scale, zero = (*w.node.inputs, None)[:3]
        fits = _has_fitting_scales(w.node)
    assert q is not None and scale is not None
    held = [v for v in (_source(q), scale, zero) if v is not None]
    is_known = all(v.node.op in ("constant", "parameter") for v in held)
    is_weight = q.dtype.is_integer and q.dtype.bits in BITS and 0 not in q.shape
    is_zero = zero is None or (zero.dtype == q.dtype and not q.dtype.is_signed)
    is_f32 = x.dtype == scale.dtype == f32
    return (x, q, scale, zero) if fits and is_known and is_weight and is_zero and is_f32 else None


def _has_fitting_scales(node: Node) -> bool:
    """Whether a matrix [K, N] has one scale, one for each column, or for blocks of columns."""
    axis, block = node.attrs.get("axis"), node.attrs.get("block")
    if axis is None:
        return True
    return block in BLOCKS and axis in (0, -2) if block else axis in (1, -1)


def write_weight_only(e: Scope, node: Node, parts: Parts) -> Ref:
    x, q, scale, zero = parts
    qvalues: Array = _array(_source(q)).reshape(q.tensor.concrete({}))
    scales = _array(scale)
    zeros = None if zero is None else _array(zero)
    if node.op == "matmul":
        qvalues = qvalues.T
        block = list(node.operands)[1].node.attrs.get("block") or _block_of(qvalues.shape[1])
        shape = qvalues.shape[0], -(-qvalues.shape[1] // block)
        scales = _by_blocks(scales, shape)
        zeros = None if zeros is None else _by_blocks(zeros, shape)
    else:
        block = node.attrs["block"]
    bits = q.dtype.bits
    if zeros is None and not q.dtype.is_signed:
        zeros = np.zeros_like(scales, np.uint8)
    if zeros is not None and (_unsigned(zeros, q.dtype) == 1 << (bits - 1)).all():
        zeros = None
    blocks = -(-qvalues.shape[1] // block)
    is_packed = node.op == "dequant_matmul" and q.dtype == u8  # [N, K], whole bytes
    if is_packed and _source(q).shape == (qvalues.shape[0], blocks, block):
        packed = e.values[_source(q)]  # what another node reads too
    else:
        packed = _named(e, _packed(_unsigned(qvalues, q.dtype), bits, block), q)
    inputs: list[Ref | None] = [
        e.values[x],
        packed,
        _named(e, scales.astype(np.float32).reshape(-1), scale),
    ]
    if zeros is not None:
        rows = _packed(_unsigned(zeros, q.dtype), bits, 8 // bits)
        inputs.append(_named(e, rows.reshape(-1), zero or scale))
    bias = node.inputs[4] if node.op == "dequant_matmul" and len(node.inputs) > 4 else None
    if bias is not None:
        inputs += [None] * (5 - len(inputs)) + [e.values[bias]]
    attrs = {
        "K": qvalues.shape[1],
        "N": qvalues.shape[0],
        "bits": bits,
        "block_size": block,
        "accuracy_level": EXACT,
    }
    result = Ref(f32)
    e.session.domains[DOMAIN] = 1
    e.steps.append(Step("MatMulNBits", inputs, [result], attrs, DOMAIN))
    return result


def _source(q: Value) -> Value:
    """The constant or parameter that a weight is, or that it is a view of."""
    return next(q.node.operands) if q.node.op == "reshape" else q


def _array(value: Value) -> Array:
    return np.asarray(value.node.attrs["value"])


def _block_of(terms: int) -> int:
    """The largest block size that divides a column, else the smallest."""
    return max((size for size in BLOCKS if terms % size == 0), default=BLOCKS[0])


def _by_blocks(parameter: Array, shape: tuple[int, int]) -> Array:
    """Scales or zero points of a matrix [K, N] as [N, blocks]."""
    if parameter.ndim == 2:
        return parameter.T
    return np.broadcast_to(parameter.reshape(-1, 1), shape)


def _unsigned(qvalues: Array, element: DType) -> Array:
    if not element.is_signed:
        return qvalues.astype(np.uint8)
    half = 1 << (element.bits - 1)
    return (qvalues.astype(np.int8).astype(np.int16) + half).astype(np.uint8)


def _packed(qvalues: Array, bits: int, block: int) -> Array:
    """Rows packed to bytes [rows, blocks, bytes], with the last block padded."""
    blocks = -(-qvalues.shape[1] // block)
    rows = np.zeros((qvalues.shape[0], blocks * block), np.uint8)
    rows[:, : qvalues.shape[1]] = qvalues
    parts = rows.reshape(qvalues.shape[0], blocks, -1, 8 // bits)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed: Array = np.bitwise_or.reduce(parts << shifts, axis=-1)
    return packed


def _named(e: Scope, array: Array, like: Value) -> Ref:
    ref = e.constant(np.ascontiguousarray(array))
    ref.name = ref.name or e.session.unique(like.name)
    return ref
