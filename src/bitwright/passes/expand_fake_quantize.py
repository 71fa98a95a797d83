"""Fake quantization becomes the quantize -> dequantize pairs that a deployed model has.

    fake_quantize(x, s, z)      ->  dequantize(clip(quantize(x, s, z), low, high), s, z)
    fake_binarize(x, s)         ->  dequantize(where(x >= 0, 1, -1), s)
    fake_dynamic_quantize(x)    ->  dequantize(dynamic_quantize(x))

It runs after `grad`, so that the forward pass of a training step lowers to the integer ops of the
deployed model (`lower_integer`), while gradients use the straight-through rules of
`ops.quant.fake_quantize`. Types and attributes are those that `bw.quantize` writes: 8-bit storage,
f32 scales, zero points of the storage type, no zero point where it is absent. The clip is left out
where the range is that of the type. Weights, scales and zero points may be computed at run time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dtype import DType, f32, i8, u8
from bitwright.ir.graph import Graph, Node, Value, constant_value
from bitwright.rewrite import Match, Rule, Trace, any_operands, rewrite


def expand_fake_quantize(graph: Graph, trace: Trace) -> Graph:
    return rewrite(graph, RULES, trace)


def storage_of(node: Node) -> DType | None:
    """The 8-bit type that stores the values of a fake quantization; None if there is none."""
    low, high = node.attrs["low"], node.attrs["high"]
    zero = (*node.inputs, None)[2]
    is_typed = zero is not None and zero.dtype in (i8, u8)
    element = zero.dtype if zero is not None and is_typed else i8 if low < 0 else u8
    return element if element.min <= low and high <= element.max else None


def _why_not_pair(m: Match) -> str | bool:
    node = m.root
    x, scale, zero = (*node.inputs, None)[:3]
    assert x is not None and scale is not None
    if x.dtype != f32 or scale.dtype != f32:
        return "it is not f32"
    element = storage_of(node)
    if element is None:
        return "its range does not fit 8 bits"
    return zero is not None and _zero_point(zero, element) is None and "its zero point has no type"


def _zero_point(zero: Value, element: DType) -> Value | np.ndarray[Any, Any] | None:
    """A zero point of the storage type: the value itself, or a constant converted to it."""
    if zero.dtype == element:
        return zero
    known = constant_value(zero)
    if known is None:
        return None
    narrow = known.astype(element.numpy)
    return narrow if (narrow == known).all() else None


def _pair(op: Any, m: Match) -> Any:
    node = m.root
    x, scale, zero = (*node.inputs, None)[:3]
    assert x is not None and scale is not None
    element = storage_of(node)
    assert element is not None
    point = None if zero is None else _zero_point(zero, element)
    if isinstance(point, np.ndarray):
        point = op.constant(point)
    granularity = {"axis": node.attrs.get("axis"), "block": node.attrs.get("block", 0)}
    qvalues = op.quantize(x, scale, point, to=element, **granularity)
    low, high = node.attrs["low"], node.attrs["high"]
    if (low, high) != (element.min, element.max):
        bounds = [op.constant(np.asarray(end, element.numpy)) for end in (low, high)]
        qvalues = op.clip(qvalues, *bounds)
    return op.dequantize(qvalues, scale, point, **granularity)


def _why_not_binary(m: Match) -> str | bool:
    x, scale = m.root.inputs
    assert x is not None and scale is not None
    return (x.dtype != f32 or scale.dtype != f32) and "it is not f32"


def _binary(op: Any, m: Match) -> Any:
    x, scale = m.root.inputs
    assert x is not None
    positive = op.ge(x, op.constant(np.zeros((), np.float32)))
    qvalues = op.where(positive, *(op.constant(np.asarray(s, np.int8)) for s in (1, -1)))
    granularity = {"axis": m.root.attrs.get("axis"), "block": m.root.attrs.get("block", 0)}
    return op.dequantize(qvalues, scale, **granularity)


def _why_not_dynamic(m: Match) -> str | bool:
    return next(m.root.operands).dtype != f32 and "it is not f32"


def _dynamic(op: Any, m: Match) -> Any:
    (x,) = m.root.operands
    per_token = m.root.attrs["per_token"]
    qvalues, scale, zero = op.dynamic_quantize(x, to=m.root.attrs["to"], per_token=per_token)
    rows = {"axis": -1, "block": int(x.shape[-1])} if per_token else {}
    return op.dequantize(qvalues, scale, zero, **rows)


RULES = [
    Rule("fake-quantize-as-pair", any_operands("fake_quantize"), _pair, _why_not_pair),
    Rule("fake-binarize-as-pair", any_operands("fake_binarize"), _binary, _why_not_binary),
    Rule(
        "fake-dynamic-quantize-as-pair",
        any_operands("fake_dynamic_quantize"),
        _dynamic,
        _why_not_dynamic,
    ),
]
