"""Matches operands of products that are quantized values.

QuantizedOperand   x = (q - zero) * scale, q computed at run time, one scale or one per row
Weight             the same for a constant: q and zero points as arrays, a scale per channel
RuntimeWeight      a weight that training changes: q, zero points and scales are values
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitwright.ir.dtype import f32, i8, i32, u8
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.ir.types import normalize_axis
from bitwright.passes.lower_integer.scales import Scale, is_parameter
from bitwright.rewrite.producers import comes_from

Array = np.ndarray[Any, Any]
INT32_LIMIT = 2**31
"""Accumulators are i32: the magnitude of a sum must stay below this."""
MAX_DISTANCE = 255
"""The largest |q - zero| of 8-bit values."""
_PRODUCTS = frozenset({"integer_matmul", "integer_conv", "matmul", "conv"})


def has_quantize(graph: Graph) -> bool:
    """Whether the graph quantizes values at run time, so that float rounding can change them."""
    return any(node.op in ("quantize", "dynamic_quantize") for node in graph.nodes)


@dataclass(frozen=True)
class QuantizedOperand:
    qvalues: Value
    zero: Value | Array | None
    scale: float | None
    """The scale, if it is one known number."""
    dynamic_scale: Value | None
    """The scale per row (or per tensor), if it is computed at run time."""

    @property
    def constant_zero(self) -> Array | None:
        """The zero point as an array, if it is a constant."""
        return constant_value(self.zero) if isinstance(self.zero, Value) else self.zero

    @property
    def known_scale(self) -> Scale | None:
        """The scale, if it is one constant or one parameter in training."""
        if self.scale is not None:
            return np.asarray(self.scale, np.float64)
        value = self.dynamic_scale
        is_one = value is not None and value.tensor.count == 1
        return value if value is not None and is_one and is_parameter(value) else None

    @property
    def is_static(self) -> bool:
        """Whether scale and zero point are constants, or parameters in training."""
        zero = self.zero
        if isinstance(zero, Value) and constant_value(zero) is None and not is_parameter(zero):
            return False
        return self.known_scale is not None

    @property
    def zero_count(self) -> int:
        """The number of zero points; 0 if it is not known."""
        if self.zero is None or isinstance(self.zero, np.ndarray):
            return 1 if self.zero is None else self.zero.size
        count = self.zero.tensor.count
        return count if isinstance(count, int) else 0

    @property
    def max_distance(self) -> int:
        """The largest possible |q - zero|."""
        element = self.qvalues.dtype
        low, high = int(element.min), int(element.max)
        if self.zero is None:
            return max(-low, high)
        known = self.constant_zero
        if known is None or known.size != 1:
            return high - low
        zero = int(known.reshape(-1)[0])
        return max(zero - low, high - zero)


@dataclass(frozen=True)
class RuntimeWeight:
    qvalues: Value
    perm: Sequence[int] | None
    """The transposition that makes it the weight of the product."""
    zero: Value | None
    scale: Scale
    """One, or one per output channel."""


@dataclass(frozen=True)
class Weight:
    qvalues: Array
    zero: Array | None
    """Per tensor, per output channel, or per column of batched matrices, [..., 1, N]."""
    scale: Array
    """f64, of the same granularity."""

    def symmetric(self) -> Weight | None:
        """The same weight as i8 with zero point 0, or None if i8 cannot hold it."""
        if self.zero is None:
            return self if self.qvalues.dtype == np.int8 else None
        moved = self.qvalues.astype(np.int16) - self.zero.astype(np.int16)
        fits = moved.min(initial=0) >= -128 and moved.max(initial=0) <= 127
        return Weight(moved.astype(np.int8), None, self.scale) if fits else None


def quantize_operands(node: Node) -> tuple[Value, Value, Value | None]:
    """Input, scale and zero point of a quantize or dequantize."""
    x, scale, zero = (*node.inputs, None)[:3]
    assert x is not None and scale is not None
    return x, scale, zero


def match_dequantize(value: Value, rows: bool = False) -> QuantizedOperand | str:
    """The 8-bit operand that a value dequantizes, or why not; `rows` allows a scale per row."""
    node = value.node
    if node.op != "dequantize" or value.dtype != f32:
        return f"{value} is not a dequantized value"
    qvalues, scale, zero = quantize_operands(node)
    if qvalues.dtype not in (i8, u8):
        return f"{value} is dequantized from {qvalues.dtype}"
    if scale.dtype != f32:
        return f"{value} has a scale of type {scale.dtype}"
    if node.attrs.get("axis") is None:
        known = constant_value(scale)
        if known is None:
            return QuantizedOperand(qvalues, zero, None, scale)
        number = float(known.reshape(-1)[0])
        if not (np.isfinite(number) and number > 0):
            return f"{value} has the scale {number}"
        return QuantizedOperand(qvalues, zero, number, None)
    is_last = normalize_axis(node.attrs["axis"], qvalues.rank) == qvalues.rank - 1
    if rows and is_last and node.attrs.get("block") and scale.shape[-1] == 1:
        return QuantizedOperand(qvalues, zero, None, scale)
    return f"{value} has more than one scale"


def match_static_dequantize(value: Value) -> QuantizedOperand | str:
    """As `match_dequantize`, for a non-constant whose scale and zero point are static."""
    found = match_dequantize(value)
    if isinstance(found, str):
        return found
    if not found.is_static:
        return f"{value} has a scale or zero point computed at run time"
    return f"{value} is a constant" if found.qvalues.is_constant else found


def match_dynamic_matmul(node: Node) -> tuple[QuantizedOperand, QuantizedOperand] | str | None:
    """Both operands of a matmul of two non-constants, or why it cannot be an integer matmul.

    None if the right operand is a constant.
    """
    x, w = node.inputs
    assert x is not None and w is not None
    is_real = node.outputs[0].dtype == f32
    right = match_dequantize(w) if is_real else match_integer_operand(w)
    if isinstance(right, str):
        return None if _is_constant(w) else right
    if constant_value(right.qvalues) is not None or _is_constant(right.qvalues):
        return None
    left = match_dequantize(x, rows=True) if is_real else match_integer_operand(x)
    if isinstance(left, str):
        return left
    if x.rank < 2 or w.rank < 2:
        return f"{x} and {w} are not matrices"
    if right.zero_count != 1:
        return f"{w} has more than one zero point"
    bound = max_depth(left, right)
    depth = x.shape[-1]
    if isinstance(depth, int) and depth > bound:
        return f"sums of more than {bound} products may overflow 32 bits"
    return left, right


def max_depth(left: QuantizedOperand, right: QuantizedOperand) -> int:
    """The largest number of products whose sum cannot overflow i32."""
    return (INT32_LIMIT - 1) // (left.max_distance * right.max_distance)


def _is_constant(value: Value) -> bool:
    """Whether a value is a constant behind ops that only move or convert it."""
    node = value.node
    if node.op in ("transpose", "reshape", "cast", "sub", "dequantize"):
        return _is_constant(next(iter(node.operands)))
    return value.is_constant


def match_weight(value: Value, channel: int) -> Weight | str:
    """The constant 8-bit weight with its output channels on this axis, or why it is none.

    Batched matrices have a scale per column of each matrix.
    """
    perm: Sequence[int] | None = None
    if value.node.op == "transpose":
        perm = value.node.attrs["perm"]
        (value,) = value.node.operands
    node = value.node
    if node.op != "dequantize" or value.dtype != f32:
        return f"{value} is not a dequantized constant"
    source, *parameters = quantize_operands(node)
    qvalues = constant_qvalues(source)
    scale, zero = (None if v is None else constant_value(v) for v in parameters)
    if qvalues is None or scale is None or (zero is None and len(node.inputs) > 2):
        return f"{value} is not a dequantized constant"
    if source.dtype not in (i8, u8):
        return f"{value} is dequantized from {source.dtype}"
    axis, block = node.attrs.get("axis"), node.attrs.get("block")
    if axis is not None:
        at = normalize_axis(axis, qvalues.ndim)
        order = range(qvalues.ndim) if perm is None else perm
        if block and channel == -1 and at == order[-2] and scale.shape[at] == 1:
            # one block spans the whole reduction axis of a column
            scale, zero = (None if a is None else a.transpose(order) for a in (scale, zero))
        elif block or at != order[channel]:
            return f"{value} has scales along another axis than the output channels"
    if scale is None or not (np.isfinite(scale).all() and (scale > 0).all()):
        return f"{value} has a scale that is not a positive number"
    transposed = qvalues.transpose(perm) if perm else qvalues
    has_zero = zero is not None and zero.any()
    return Weight(transposed, zero if has_zero else None, scale.astype(np.float64))


def match_runtime_weight(value: Value, channel: int) -> RuntimeWeight | str | None:
    """The 8-bit weight that training changes, with its output channels on this axis.

    None if the value is a constant, or an activation with a scale of its own.
    """
    perm: Sequence[int] | None = None
    if value.node.op == "transpose":
        perm = value.node.attrs["perm"]
        (value,) = value.node.operands
    node = value.node
    if node.op != "dequantize" or value.dtype != f32 or _is_constant(value):
        return None
    source, scale, zero = quantize_operands(node)
    known, axis = constant_value(scale), node.attrs.get("axis")
    if axis is None and (known is not None or not is_parameter(scale)) and channel == -1:
        return None
    if source.dtype not in ((i8, u8) if channel == -1 else (i8,)) or scale.dtype != f32:
        return f"{value} is dequantized from {source.dtype} with scales in {scale.dtype}"
    if axis is not None:
        order = range(source.rank) if perm is None else perm
        if node.attrs.get("block") or normalize_axis(axis, source.rank) != order[channel]:
            return f"{value} has scales along another axis than the output channels"
    if known is not None and not (np.isfinite(known).all() and (known > 0).all()):
        return f"{value} has a scale that is not a positive number"
    exact = scale if known is None else known.astype(np.float64)
    return RuntimeWeight(source, perm, _nonzero(zero), exact)


def _nonzero(zero: Value | None) -> Value | None:
    """A zero point that may differ from 0."""
    known = constant_value(zero)
    return zero if known is None or known.any() else None


def max_product(source: QuantizedOperand, has_zero: bool) -> int:
    """The largest |(x - x_zero)(w - w_zero)| of any 8-bit weight."""
    return source.max_distance * (MAX_DISTANCE if has_zero else 128)


def constant_qvalues(value: Value) -> Array | None:
    """The array of a constant, or of a transposed constant."""
    if value.node.op == "transpose":
        found = constant_value(next(iter(value.node.operands)))
        return None if found is None else found.transpose(value.node.attrs["perm"])
    return constant_value(value)


def match_integer_operand(value: Value) -> QuantizedOperand | str:
    """The 8-bit operand of `cast(q) - cast(zero)` in i32, the form that importers write."""
    if value.dtype != i32:
        return f"{value} is not an i32 value"
    node, offset = value.node, None
    if node.op == "sub":
        wide, offset = node.operands
        node = wide.node
    qvalues = next(iter(node.operands), None)
    if node.op != "cast" or qvalues is None or qvalues.dtype not in (i8, u8):
        return f"{value} is not cast from 8-bit values"
    zero = None if offset is None else _narrow_zero(offset, qvalues)
    if offset is not None and zero is None:
        return f"{offset} is not a zero point of type {qvalues.dtype}"
    if qvalues.shape != value.shape:
        return f"{value} is larger than {qvalues}"
    return QuantizedOperand(qvalues, zero, None, None)


def _narrow_zero(value: Value, qvalues: Value) -> Value | Array | None:
    """The zero point in the type of q that was cast to this i32 value."""
    known = constant_value(value)
    if known is not None:
        narrow = known.astype(qvalues.dtype.numpy)
        return narrow if (narrow == known).all() else None
    node: Node = value.node
    if node.op == "reshape" and value.tensor.count == 1:
        node = next(iter(node.operands)).node
    source = next(iter(node.operands), None)
    return source if node.op == "cast" and source and source.dtype == qvalues.dtype else None


def integer_constant(value: Value) -> Array | None:
    """A constant integer array, also of a `cast(q) - zero` that is too large to fold."""
    found = constant_value(value)
    if found is not None:
        return found
    node, offset = value.node, None
    if node.op == "transpose":
        inner = integer_constant(next(iter(node.operands)))
        return None if inner is None else inner.transpose(node.attrs["perm"])
    if node.op == "sub":
        wide, zero = node.inputs
        assert wide is not None
        node, offset = wide.node, None if zero is None else integer_constant(zero)
        if offset is None:
            return None
    if node.op != "cast" or node.outputs[0].dtype != i32:
        return None
    qvalues = integer_constant(next(iter(node.operands)))
    if qvalues is None or qvalues.dtype not in (np.int8, np.uint8):
        return None
    if offset is None:
        return qvalues
    fits = bool((np.abs(offset.astype(np.int64)) <= 255).all())
    return qvalues.astype(np.int16) - offset.astype(np.int16) if fits else None


def integer_weight(array: Array, channel: int) -> Weight | None:
    """An integer array as an 8-bit weight, with a zero point per channel where it needs one."""
    axes = tuple(a for a in range(array.ndim) if a != normalize_axis(channel, array.ndim))
    one = np.ones((), np.float64)
    low = array.min(axis=axes, initial=0).astype(np.int64)
    high = array.max(axis=axes, initial=0).astype(np.int64)
    if (low >= -128).all() and (high <= 127).all():
        return Weight(array.astype(np.int8), None, one)
    if (high - low > 255).any() or (low < -255).any() or (high > 255).any():
        return None
    shape = [-1 if a not in axes else 1 for a in range(array.ndim)]
    moved = array - low.reshape(shape)
    return Weight(moved.astype(np.uint8), (-low).astype(np.uint8), one)


def max_abs_sum(weight: Weight, channel: int, max_distance: int) -> int:
    """An upper bound of |Σ (x - x_zero)(w - w_zero)| over all output channels."""
    # differences of bytes fit 16 bits, which need a quarter of the memory of i64
    wide = np.int16 if weight.qvalues.dtype.itemsize == 1 else np.int64
    columns: Array = np.moveaxis(weight.qvalues.astype(wide), channel, -1)
    if channel != -1:  # a filter sums over all its other axes
        columns = columns.reshape(math.prod(columns.shape[:-1]), columns.shape[-1])
    if weight.zero is not None:
        columns = np.subtract(columns, weight.zero.astype(wide), out=columns)
    np.abs(columns, out=columns)
    return int(columns.sum(axis=-2, dtype=np.int64).max(initial=0)) * max_distance


def comes_from_product(value: Value) -> bool:
    """Whether a product, or elementwise ops fused into one, computes the value."""
    return comes_from(value, lambda node: node.op in _PRODUCTS)
