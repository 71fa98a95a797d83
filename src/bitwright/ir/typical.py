"""Bytes of tensors whose sizes may be symbolic, for comparisons before a run."""

from __future__ import annotations

import math

from bitwright.ir.dim import Dim, Size, evaluate
from bitwright.ir.graph import Value
from bitwright.ir.types import TensorType

TYPICAL_SIZE = 16
"""What stands for a symbolic size without a bound."""


def typical_bytes(value: Value) -> int:
    """The bytes of a tensor with typical sizes; 0 for values that are no tensors."""
    type_ = value.type
    if not isinstance(type_, TensorType):
        return 0
    return math.prod(map(_typical, type_.shape)) * max(type_.dtype.bits, 8) // 8


def _typical(size: Size) -> int:
    if not isinstance(size, Dim):
        return size
    return max(evaluate(size, {s.name: s.bound or TYPICAL_SIZE for s in size.symbols}), 1)
