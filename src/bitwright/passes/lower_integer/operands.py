"""How values of a graph stand for codes: what `lower_integer` looks for behind an operand.

Coded     x = (codes - zero) * scale, with one scale, or one for each row made by the run
          (a product of two of them: `coded_pair`)
Weight    the same for a constant: codes and zero points as arrays, a scale per output channel
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
from bitwright.rewrite.producers import comes_from

Array = np.ndarray[Any, Any]
LIMIT = 2**31
"""What sums of 32 bits stay below."""
_PRODUCTS = frozenset({"integer_matmul", "integer_conv", "matmul", "conv"})


def has_quantize(graph: Graph) -> bool:
    """Whether values become codes in it, which last bits of floats may change."""
    return any(node.op in ("quantize", "dynamic_quantize") for node in graph.nodes)


@dataclass(frozen=True)
class QuantizedOperand:
    qvalues: Value
    zero: Value | Array | None
    step: float | None
    """The scale, where it is one known number."""
    scale: Value | None
    """The scale of each row (or of all), where the run makes it."""

    @property
    def known_zero(self) -> Array | None:
        """The zero point as an array, where it is a constant."""
        return constant_value(self.zero) if isinstance(self.zero, Value) else self.zero

    @property
    def zero_count(self) -> int:
        """How many zero points there are, 0 where the number is not known."""
        if self.zero is None or isinstance(self.zero, np.ndarray):
            return 1 if self.zero is None else self.zero.size
        count = self.zero.tensor.count
        return count if isinstance(count, int) else 0

    @property
    def reach(self) -> int:
        """The largest distance of a code from the zero point."""
        element = self.qvalues.dtype
        low, high = int(element.min), int(element.max)
        if self.zero is None:
            return max(-low, high)
        known = self.known_zero
        if known is None or known.size != 1:
            return high - low
        zero = int(known.reshape(-1)[0])
        return max(zero - low, high - zero)


@dataclass(frozen=True)
class Weight:
    qvalues: Array
    zero: Array | None
    """One number, one for each output channel, or one for each column of several matrices,
    [..., 1, N]."""
    scale: Array
    """f64, the same."""

    def around_zero(self) -> Weight | None:
        """The same weight as i8 without a zero point, or None where that does not hold it."""
        if self.zero is None:
            return self if self.qvalues.dtype == np.int8 else None
        moved = self.qvalues.astype(np.int16) - self.zero.astype(np.int16)
        fits = moved.min(initial=0) >= -128 and moved.max(initial=0) <= 127
        return Weight(moved.astype(np.int8), None, self.scale) if fits else None


def parts_of(node: Node) -> tuple[Value, Value, Value | None]:
    """Values or codes, scale and zero point of a quantize or dequantize."""
    x, scale, zero = (*node.inputs, None)[:3]
    assert x is not None and scale is not None
    return x, scale, zero


def match_dequantize(value: Value, rows: bool = False) -> QuantizedOperand | str:
    """What a real value is coded as, or why it is not; `rows` admits a scale for each row."""
    node = value.node
    if node.op != "dequantize" or value.dtype != f32:
        return f"{value} is not a dequantized value"
    qvalues, scale, zero = (*node.inputs, None)[:3]
    assert qvalues is not None and scale is not None
    if qvalues.dtype not in (i8, u8):
        return f"{value} has {qvalues.dtype} codes"
    if scale.dtype != f32:
        return f"{value} has a scale of type {scale.dtype}"
    if node.attrs.get("axis") is None:
        known = constant_value(scale)
        if known is None:
            return QuantizedOperand(qvalues, zero, None, scale)
        step = float(known.reshape(-1)[0])
        if not (np.isfinite(step) and step > 0):
            return f"{value} has the scale {step}"
        return QuantizedOperand(qvalues, zero, step, None)
    is_last = normalize_axis(node.attrs["axis"], qvalues.rank) == qvalues.rank - 1
    if rows and is_last and node.attrs.get("block") and scale.shape[-1] == 1:
        return QuantizedOperand(qvalues, zero, None, scale)
    return f"{value} has more than one scale"


def quantized_pair(node: Node) -> tuple[QuantizedOperand, QuantizedOperand] | str | None:
    """What a matmul of values that are both made by the run is coded as, or why it is not; None
    where its second operand is a constant."""
    x, w = node.inputs
    assert x is not None and w is not None
    is_real = node.outputs[0].dtype == f32
    right = match_dequantize(w) if is_real else centred(w)
    if isinstance(right, str):
        return None if _is_constant(w) else right
    if constant_value(right.qvalues) is not None or _is_constant(right.qvalues):
        return None
    left = match_dequantize(x, rows=True) if is_real else centred(x)
    if isinstance(left, str):
        return left
    if x.rank < 2 or w.rank < 2:
        return f"{x} and {w} are not matrices"
    if right.zero_count != 1:
        return f"{w} has more than one zero point"
    bound = deepest_sum(left, right)
    depth = x.shape[-1]
    if isinstance(depth, int) and depth > bound:
        return f"sums of more than {bound} products may leave 32 bits"
    return left, right


def deepest_sum(left: QuantizedOperand, right: QuantizedOperand) -> int:
    """How many products of codes add up to less than 32 bits."""
    return (LIMIT - 1) // (left.reach * right.reach)


def _is_constant(value: Value) -> bool:
    """Whether constants alone make a value, through what only moves or converts them."""
    node = value.node
    if node.op in ("transpose", "reshape", "cast", "sub", "dequantize"):
        return _is_constant(next(iter(node.operands)))
    return value.is_constant


def weight_of(value: Value, channel: int) -> Weight | str:
    """The constant codes of a weight whose output channels lie on this axis, or why not.

    A weight of several matrices has a scale for each column of each of them.
    """
    perm: Sequence[int] | None = None
    if value.node.op == "transpose":
        perm = value.node.attrs["perm"]
        (value,) = value.node.operands
    node = value.node
    if node.op != "dequantize" or value.dtype != f32:
        return f"{value} is not a dequantized constant"
    source, *parameters = (*node.inputs, None)[:3]
    assert source is not None
    qvalues = constant_qvalues(source)
    scale, zero = (None if v is None else constant_value(v) for v in parameters)
    if qvalues is None or scale is None or (zero is None and len(node.inputs) > 2):
        return f"{value} is not a dequantized constant"
    if source.dtype not in (i8, u8):
        return f"{value} has {source.dtype} codes"
    axis, block = node.attrs.get("axis"), node.attrs.get("block")
    if axis is not None:
        at = normalize_axis(axis, qvalues.ndim)
        order = range(qvalues.ndim) if perm is None else perm
        if block and channel == -1 and at == order[-2] and scale.shape[at] == 1:
            # one block holds all terms of a column
            scale, zero = (None if a is None else a.transpose(order) for a in (scale, zero))
        elif block or at != order[channel]:
            return f"{value} has scales along another axis than the output channels"
    if scale is None or not (np.isfinite(scale).all() and (scale > 0).all()):
        return f"{value} has a scale that is not a positive number"
    transposed = qvalues.transpose(perm) if perm else qvalues
    has_zero = zero is not None and zero.any()
    return Weight(transposed, zero if has_zero else None, scale.astype(np.float64))


def constant_qvalues(value: Value) -> Array | None:
    """A constant, or one that is only turned around."""
    if value.node.op == "transpose":
        found = constant_value(next(iter(value.node.operands)))
        return None if found is None else found.transpose(value.node.attrs["perm"])
    return constant_value(value)


def centred(value: Value) -> QuantizedOperand | str:
    """Codes behind `cast(q) - cast(zero)` in i32, which importers write."""
    if value.dtype != i32:
        return f"{value} is not an i32 value"
    node, offset = value.node, None
    if node.op == "sub":
        wide, offset = node.operands
        node = wide.node
    qvalues = next(iter(node.operands), None)
    if node.op != "cast" or qvalues is None or qvalues.dtype not in (i8, u8):
        return f"{value} is not made of 8-bit codes"
    zero = None if offset is None else _narrow(offset, qvalues)
    if offset is not None and zero is None:
        return f"{offset} is not a zero point of the codes' type"
    if qvalues.shape != value.shape:
        return f"{value} is larger than its codes"
    return QuantizedOperand(qvalues, zero, None, None)


def _narrow(value: Value, qvalues: Value) -> Value | Array | None:
    """The zero point in the codes' type that was widened to this value."""
    known = constant_value(value)
    if known is not None:
        narrow = known.astype(qvalues.dtype.numpy)
        return narrow if (narrow == known).all() else None
    node: Node = value.node
    if node.op == "reshape" and value.tensor.count == 1:
        node = next(iter(node.operands)).node
    source = next(iter(node.operands), None)
    return source if node.op == "cast" and source and source.dtype == qvalues.dtype else None


def whole_numbers(value: Value) -> Array | None:
    """A constant of whole numbers, also where it is too large to be folded: `cast(q) - zero`."""
    found = constant_value(value)
    if found is not None:
        return found
    node, offset = value.node, None
    if node.op == "transpose":
        inner = whole_numbers(next(iter(node.operands)))
        return None if inner is None else inner.transpose(node.attrs["perm"])
    if node.op == "sub":
        wide, zero = node.inputs
        assert wide is not None
        node, offset = wide.node, None if zero is None else whole_numbers(zero)
        if offset is None:
            return None
    if node.op != "cast" or node.outputs[0].dtype != i32:
        return None
    qvalues = whole_numbers(next(iter(node.operands)))
    if qvalues is None or qvalues.dtype not in (np.int8, np.uint8):
        return None
    if offset is None:
        return qvalues
    fits = bool((np.abs(offset.astype(np.int64)) <= 255).all())
    return qvalues.astype(np.int16) - offset.astype(np.int16) if fits else None


def centred_weight(array: Array, channel: int) -> Weight | None:
    """Constant whole numbers as codes, with a zero point per channel where they need one."""
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


def largest_sum(weight: Weight, channel: int, reach: int) -> int:
    """A bound of |Σ (x - x_zero)(w - w_zero)| over all columns."""
    # differences of bytes fit 16 bits, a quarter of what wide ones take
    wide = np.int16 if weight.qvalues.dtype.itemsize == 1 else np.int64
    columns = np.moveaxis(weight.qvalues.astype(wide), channel, -1)
    if channel != -1:  # a filter, all of whose other axes are summed over
        columns = columns.reshape(math.prod(columns.shape[:-1]), columns.shape[-1])
    if weight.zero is not None:
        columns -= weight.zero.astype(wide)
    np.abs(columns, out=columns)
    return int(columns.sum(axis=-2, dtype=np.int64).max(initial=0)) * reach


def comes_from_product(value: Value) -> bool:
    """Whether a product and what is elementwise behind it made the value, all in one kernel."""
    return comes_from(value, lambda node: node.op in _PRODUCTS)
