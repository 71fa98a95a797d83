"""Ops that only move elements, or pick the largest, work on quantized values.

    quantize(dequantize(q))                 ->  q, if both have the same parameters
    transpose(dequantize(q)), …             ->  dequantize(transpose(q)), …
    concat(dequantize(p), dequantize(q))    ->  dequantize(concat(p, q)), if the parameters agree
    pad(dequantize(q), v)                   ->  dequantize(pad(q, v_q)), if v_q represents v exactly
    quantize(concat(x, y)), …               ->  concat(quantize(x), quantize(y)), …

The last moves the quantize into the epilogue of the producer, and moves a quarter of the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dim import bounds, max_size
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.nn.windows import make_windows
from bitwright.ops.vision.resize import CROP
from bitwright.passes.lower_integer.operands import (
    comes_from_product,
    match_dequantize,
    quantize_operands,
)
from bitwright.passes.lower_integer.scales import is_parameter
from bitwright.rewrite import Match, Rule, any_operands

Array = np.ndarray[Any, Any]
# Ops that only move the elements of their first operand, or pick the largest.
_MOVES = ("transpose", "reshape", "slice", "gather", "max_pool", "split", "expand", "tile", "roll")
_QUANTIZED_BEFORE = (
    "transpose", "reshape", "concat", "max_pool", "expand", "tile", "roll", "pad",
)  # fmt: skip


def movement_rules() -> list[Rule]:
    return [
        Rule("quantize-of-dequantize", any_operands("quantize"), _undo, _why_not_undo),
        Rule("concat-before-dequantize", any_operands("concat"), _concat, _why_not_concat),
        *(
            Rule(
                f"{op}-before-dequantize".replace("_", "-"), any_operands(op), _move, _why_not_move
            )
            for op in _MOVES
        ),
        Rule.from_plan("pad-before-dequantize", any_operands("pad"), _pad_value, _pad),
        Rule("resize-before-dequantize", any_operands("resize"), _move, _why_not_resize),
        Rule(
            "quantize-before-movement",
            any_operands("quantize"),
            _quantize_before,
            _why_not_quantize_before,
        ),
    ]


def _why_not_undo(m: Match) -> str:
    x = quantize_operands(m.root)[0]
    if x.node.op != "dequantize":
        return f"{x} is not dequantized"
    if not _same_parameters(m.root, x.node):
        return "the scales differ"
    qvalues = quantize_operands(x.node)[0]
    return "" if qvalues.dtype == m.root.attrs["to"] else "the integer types differ"


def _same_parameters(a: Node, b: Node) -> bool:
    """Whether two (de)quantize nodes have the same scales and zero points."""
    granularity = [(n.attrs.get("axis"), n.attrs.get("block")) for n in (a, b)]
    parameters = zip(quantize_operands(a)[1:], quantize_operands(b)[1:], strict=True)
    return granularity[0] == granularity[1] and all(_equal(p, q) for p, q in parameters)


def _equal(a: Value | None, b: Value | None) -> bool:
    """Whether two parameters are equal; an absent zero point is 0."""
    if a is None or b is None:
        one = a if b is None else b
        known = None if one is None else constant_value(one)
        return one is None or (known is not None and not known.any())
    x, y = constant_value(a), constant_value(b)
    return a is b or (x is not None and y is not None and bool(np.array_equal(x, y)))


def _undo(op: Any, m: Match) -> Any:
    return quantize_operands(quantize_operands(m.root)[0].node)[0]


def _why_not_move(m: Match) -> str:
    x = m.root.inputs[0]
    assert x is not None
    found = match_dequantize(x)
    if isinstance(found, str):
        return found
    if found.qvalues.is_constant and m.root.op != "gather":
        return "its input is a constant"
    if m.root.op == "max_pool" and not _has_full_windows(m.root):
        return "a window may lie entirely in the padding, whose -inf has no quantized value"
    moves_all = len(m.root.outputs) == 1 or m.root.op == "split"
    return "" if moves_all else "it has several results"


def _has_full_windows(node: Node) -> bool:
    """Whether every window of a pool contains an element of the image."""
    attrs, (x,) = node.attrs, node.operands
    names = ("strides", "pads", "dilations")
    windows = make_windows(x.rank - 2, attrs["kernel"], *(attrs.get(name) for name in names))
    axes = zip(
        *(x.shape[2:], windows.begins, windows.ends, windows.extents, windows.dilations),
        strict=True,
    )
    return all(
        bounds(extent - 1 - max_size(begin, end))[0] >= 0
        and (step == 1 or bounds(size - step)[0] >= 0)  # the taps do not skip the image
        for size, begin, end, extent, step in axes
    )


def _move(op: Any, m: Match) -> Any:
    dequantize = next(m.root.operands).node
    qvalues, *parameters = dequantize.inputs
    moved = op.like(m.root, qvalues, *m.root.inputs[1:])
    if isinstance(moved, Value):
        return op.like(dequantize, moved, *parameters)
    return [op.like(dequantize, part, *parameters) for part in moved]


def _why_not_resize(m: Match) -> str:
    if not _is_nearest(m.root):
        return "it interpolates, or fills in an extrapolation value"
    return _why_not_move(m)


def _is_nearest(node: Node) -> bool:
    return bool(node.attrs["mode"] == "nearest" and node.attrs["coordinate_mode"] != CROP)


def _pad_value(m: Match) -> Array | Value | str | None:
    """The quantized padding value, which must be exact; None for other padding modes."""
    if reason := _why_not_move(m):
        return reason
    if m.root.attrs["mode"] != "constant":
        return None
    found = _quantized_padding(m.root)
    return "its padding value has no exact quantized value" if found is None else found


def _quantized_padding(node: Node) -> Array | Value | None:
    value = node.inputs[1] if len(node.inputs) > 1 else None
    number = np.zeros((), np.float32) if value is None else constant_value(value)
    assert node.inputs[0] is not None
    found = match_dequantize(node.inputs[0])
    assert not isinstance(found, str)
    zero = found.constant_zero
    if number is None or not found.is_static:
        return None
    if found.scale is None or (isinstance(found.zero, Value) and zero is None):
        if number.any():
            return None
        return np.array(0, found.qvalues.dtype.numpy) if found.zero is None else found.zero
    point = 0 if zero is None else int(zero.reshape(-1)[0])
    q = np.rint(float(number.reshape(-1)[0]) / found.scale) + point
    element = found.qvalues.dtype
    if not element.min <= q <= element.max:
        return None
    is_exact = np.float32(q - point) * np.float32(found.scale) == number.reshape(-1)[0]
    return np.array(q, element.numpy) if is_exact else None


def _pad(op: Any, m: Match, value: Array | Value | None) -> Any:
    dequantize = next(m.root.operands).node
    qvalues, *parameters = dequantize.inputs
    constant = op.constant(value) if isinstance(value, np.ndarray) else value
    if constant is not None and constant.rank:
        constant = op.reshape(constant, shape=())
    padded = op.like(m.root, qvalues, constant, *m.root.inputs[2:])
    return op.like(dequantize, padded, *parameters)


def _why_not_concat(m: Match) -> str:
    first, *rest = m.root.operands
    for value in (first, *rest):
        if isinstance(found := match_dequantize(value), str):
            return found
    for value in rest:
        types = [quantize_operands(v.node)[0].dtype for v in (value, first)]
        if not (types[0] == types[1] and _same_parameters(value.node, first.node)):
            return f"{value} and {first} have different parameters"
    return ""


def _concat(op: Any, m: Match) -> Any:
    nodes = [value.node for value in m.root.operands]
    joined = op.like(m.root, *(quantize_operands(node)[0] for node in nodes))
    return op.like(nodes[0], joined, *nodes[0].inputs[1:])


def _why_not_quantize_before(m: Match) -> str:
    x, scale, zero = quantize_operands(m.root)
    node = x.node
    if node.op not in _QUANTIZED_BEFORE and not (node.op == "resize" and _grows(node)):
        return f"{node.op} does more than move elements"
    known = [v is None or v.is_constant or is_parameter(v) for v in (scale, zero)]
    if m.root.attrs.get("axis") is not None or not all(known):
        return "it has no single constant scale"
    if m.uses(x) != 1:
        return f"{x} has another reader"
    if node.op == "max_pool" and not (
        len(node.outputs) == 1 and comes_from_product(next(iter(node.operands)))
    ):
        return "the pool leaves fewer elements to quantize"
    return ""


def _grows(node: Node) -> bool:
    """Whether a resize only repeats elements, so that there are fewer to quantize before it."""
    (x, *_), y = node.operands, node.outputs[0]
    pairs = zip(x.shape, y.shape, strict=True)
    return _is_nearest(node) and all(bounds(after - before)[0] >= 0 for before, after in pairs)


def _quantize_before(op: Any, m: Match) -> Any:
    node = quantize_operands(m.root)[0].node
    operands = list(node.operands)
    if node.op != "concat":
        del operands[1:]
    qvalues = [op.like(m.root, value, *m.root.inputs[1:]) for value in operands]
    others = list(node.inputs[len(operands) :])
    if node.op == "pad":
        value = others[0] if others else None
        added = op.constant(np.float32(0)) if value is None else value
        others[:1] = [op.reshape(op.like(m.root, added, *m.root.inputs[1:]), shape=())]
    return op.like(node, *qvalues, *others)
