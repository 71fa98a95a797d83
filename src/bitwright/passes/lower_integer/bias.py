"""When a constant that is added to a product of codes may join its sum, in whole steps.

    f32(Σ q w) * factor + bias   ->   f32(Σ q w + rne(bias / factor)) * factor

The sum must stay within 32 bits, and a step must be much finer than a code of the input, unless
the bias is a whole number of steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.graph import Node, Value, constant_value
from bitwright.passes.lower_integer.operands import LIMIT, Weight, largest_sum

Array = np.ndarray[Any, Any]
REACH = 255
"""The largest distance of two 8-bit codes."""
FINE = 64
"""Weights from which on a step of the sums is a small part of what a code of the input makes."""
EXACT = 2.0**-20
"""How far, in parts of it, a bias that was whole steps may be from them after rounding to f32."""


def is_by_channel(array: Array, product: Node) -> bool:
    """Whether it has one number for each output channel of an integer product."""
    rank, shape = product.outputs[0].rank, product.outputs[0].shape
    channel = rank - 1 if product.op == "integer_matmul" else 1
    place = array.ndim - rank + channel
    return place >= 0 and array.size == shape[channel] == array.shape[place]


def has_room(product: Node, most: float) -> bool:
    """Whether an integer product's sums and a number of at most this size stay within 32 bits.

    Zero points may lie anywhere.
    """
    x, w, _, w_zero = (*product.inputs, None, None)[:4]
    assert x is not None and w is not None
    is_matmul = product.op == "integer_matmul"
    terms = (x.shape[-1],) if is_matmul else w.shape[1:]
    if not all(isinstance(size, int) for size in terms):
        return False
    if most < LIMIT - int(np.prod(terms, dtype=np.int64)) * REACH**2:
        return True
    known, zero = constant_value(w), None if w_zero is None else constant_value(w_zero)
    if known is None or (w_zero is not None and zero is None):
        return False
    weight = Weight(known, zero, np.ones(1))
    return bool(most < LIMIT - largest_sum(weight, -1 if is_matmul else 0, REACH))


def steps_are_coarse(product: Node) -> bool:
    """Whether a step is a good part of a code of x: the weights are those of an average, or only
    the run knows them."""
    w = product.inputs[1]
    known = None if w is None else constant_value(w)
    return known is None or bool(np.abs(known.astype(np.int16)).max(initial=0) < FINE)


def known_bias(value: Value | None) -> Array | None:
    """A constant bias in f64, dequantized where it is codes."""
    if value is None:
        return None
    known = constant_value(value)
    if known is not None:
        return known.astype(np.float64)
    node = value.node
    if node.op == "reshape":
        inner = known_bias(next(iter(node.operands)))
        return None if inner is None else inner.reshape(value.shape)
    if node.op != "dequantize" or node.attrs.get("block"):
        return None
    arrays = [None if v is None else constant_value(v) for v in (*node.inputs, None)[:3]]
    qvalues, scale, zero = arrays
    if qvalues is None or scale is None or qvalues.ndim != 1:
        return None
    distance = qvalues.astype(np.float64) - (0 if zero is None else zero.astype(np.float64))
    return np.asarray(distance * scale.astype(np.float64))
