"""Codes instead of real numbers through ops that only move elements, or pick the largest.

    quantize(dequantize(q))                 ->  q, where both have the same parameters
    transpose(dequantize(q)), …             ->  dequantize(transpose(q)), …
    concat(dequantize(p), dequantize(q))    ->  dequantize(concat(p, q)), the same parameters again
    pad(dequantize(q), v)                   ->  dequantize(pad(q, code)), where a code is exactly v
    quantize(concat(x, y)), …               ->  concat(quantize(x), quantize(y)), …

The last brings the step to codes to where the numbers are made, which is then where they are
stored, and moves a quarter of the bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dim import bounds, max_size
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.ops.nn.windows import make_windows
from bitwright.ops.vision.resize import CROP
from bitwright.passes.lower_integer.operands import comes_from_product, match_dequantize, parts_of
from bitwright.rewrite import Match, Rule

Array = np.ndarray[Any, Any]
# Ops that only move the elements of their first operand, or pick the largest of them.
_MOVES = ("transpose", "reshape", "slice", "gather", "max_pool", "split", "expand", "tile", "roll")
_QUANTIZED_BEFORE = (
    "transpose", "reshape", "concat", "max_pool", "expand", "tile", "roll", "pad",
)  # fmt: skip


def moving_rules() -> list[Rule]:
    return [
        Rule("codes-of-codes", _any("quantize"), _same_qvalues, _other_qvalues),
        Rule("concat-of-codes", _any("concat"), _join, _apart),
        *(Rule(f"{op}-of-codes".replace("_", "-"), _any(op), _move, _stay) for op in _MOVES),
        Rule("pad-of-codes", _any("pad"), _pad, _pads_other),
        Rule("resize-of-codes", _any("resize"), _move, _mixes),
        Rule("codes-before-moving", _any("quantize"), _quantize_before, _quantize_behind),
    ]


def _any(name: str) -> Any:
    return lambda op: getattr(op, name)(...)


def _other_qvalues(m: Match) -> str:
    x = m.root.inputs[0]
    assert x is not None
    if x.node.op != "dequantize":
        return f"{x} is not dequantized"
    if not _same_parameters(m.root, x.node):
        return "the scales differ"
    qvalues = parts_of(x.node)[0]
    return "" if qvalues.dtype == m.root.attrs["to"] else "the types of the codes differ"


def _same_parameters(a: Any, b: Any) -> bool:
    """Whether two nodes, each a quantize or a dequantize, have the same scales and zero points."""
    granularity = [(n.attrs.get("axis"), n.attrs.get("block")) for n in (a, b)]
    return granularity[0] == granularity[1] and all(map(_equal, parts_of(a)[1:], parts_of(b)[1:]))


def _equal(a: Value | None, b: Value | None) -> bool:
    """Whether two parameters are the same numbers; none is zero."""
    if a is None or b is None:
        one = a if b is None else b
        known = None if one is None else constant_value(one)
        return one is None or (known is not None and not known.any())
    x, y = constant_value(a), constant_value(b)
    return a is b or (x is not None and y is not None and bool(np.array_equal(x, y)))


def _same_qvalues(op: Any, m: Match) -> Any:
    return parts_of(parts_of(m.root)[0].node)[0]


def _stay(m: Match) -> str:
    x = m.root.inputs[0]
    assert x is not None
    found = match_dequantize(x)
    if isinstance(found, str):
        return found
    if found.qvalues.is_constant and m.root.op != "gather":
        return "a constant is moved when the program is made"
    if m.root.op == "max_pool" and not _windows_meet(m.root):
        return "a window may lie in the padding only, whose maximum is no quantized value"
    moves_all = len(m.root.outputs) == 1 or m.root.op == "split"
    return "" if moves_all else "it has several results"


def _windows_meet(node: Node) -> bool:
    """Whether every window of a pool is sure to hold an element of the image."""
    attrs, (x,) = node.attrs, node.operands
    names = ("strides", "pads", "dilations")
    windows = make_windows(x.rank - 2, attrs["kernel"], *(attrs.get(name) for name in names))
    axes = zip(
        *(x.shape[2:], windows.begins, windows.ends, windows.extents, windows.dilations),
        strict=True,
    )
    return all(
        bounds(extent - 1 - max_size(begin, end))[0] >= 0
        and (step == 1 or bounds(size - step)[0] >= 0)  # no image between two taps
        for size, begin, end, extent, step in axes
    )


def _move(op: Any, m: Match) -> Any:
    real = m.root.inputs[0].node  # type: ignore[union-attr]
    qvalues, *parameters = real.inputs
    moved = op.like(m.root, qvalues, *m.root.inputs[1:])
    if isinstance(moved, Value):
        return op.like(real, moved, *parameters)
    return [op.like(real, part, *parameters) for part in moved]


def _mixes(m: Match) -> str:
    """Why a resize does more than to move elements."""
    if not _is_nearest(m.root):
        return "it mixes neighbours, or fills in a number of its own"
    return _stay(m)


def _is_nearest(node: Node) -> bool:
    return node.attrs["mode"] == "nearest" and node.attrs["coordinate_mode"] != CROP


def _pads_other(m: Match) -> str:
    """Why a pad stays one of real numbers."""
    if reason := _stay(m):
        return reason
    if m.root.attrs["mode"] == "constant" and _pad_code(m.root) is None:
        return "what it adds is no code"
    return ""


def _pad_code(node: Node) -> Array | None:
    """The code that stands for exactly what a pad adds."""
    value = node.inputs[1] if len(node.inputs) > 1 else None
    number = np.zeros((), np.float32) if value is None else constant_value(value)
    assert node.inputs[0] is not None
    found = match_dequantize(node.inputs[0])
    assert not isinstance(found, str)
    zero = found.known_zero
    if number is None or found.step is None or (found.zero is not None and zero is None):
        return None
    point = 0 if zero is None else int(zero.reshape(-1)[0])
    code = np.rint(float(number.reshape(-1)[0]) / found.step) + point
    element = found.qvalues.dtype
    if not element.min <= code <= element.max:
        return None
    is_exact = np.float32(code - point) * np.float32(found.step) == number.reshape(-1)[0]
    return np.array(code, element.numpy) if is_exact else None


def _pad(op: Any, m: Match) -> Any:
    real = m.root.inputs[0].node  # type: ignore[union-attr]
    qvalues, *parameters = real.inputs
    value = None
    if m.root.attrs["mode"] == "constant":
        value = op.constant(_pad_code(m.root))
    padded = op.like(m.root, qvalues, value, *m.root.inputs[2:])
    return op.like(real, padded, *parameters)


def _apart(m: Match) -> str:
    """Why operands stay real numbers while they are put behind each other."""
    first, *rest = m.root.operands
    for value in (first, *rest):
        if isinstance(found := match_dequantize(value), str):
            return found
    for value in rest:
        is_same = parts_of(value.node)[0].dtype == parts_of(first.node)[0].dtype
        if not (is_same and _same_parameters(value.node, first.node)):
            return f"{value} and {first} have different parameters"
    return ""


def _join(op: Any, m: Match) -> Any:
    nodes = [value.node for value in m.root.operands]
    joined = op.like(m.root, *(parts_of(node)[0] for node in nodes))
    return op.like(nodes[0], joined, *nodes[0].inputs[1:])


def _quantize_behind(m: Match) -> str:
    """Why values become codes behind the op that moves them."""
    x, scale, zero = parts_of(m.root)
    node = x.node
    if node.op not in _QUANTIZED_BEFORE and not (node.op == "resize" and _grows(node)):
        return f"{node.op} does more than to move elements"
    known = [v is None or constant_value(v) is not None for v in (scale, zero)]
    if m.root.attrs.get("axis") is not None or not all(known):
        return "it is not one known scale"
    if m.uses(x) != 1:
        return f"{x} is read elsewhere too"
    if node.op == "max_pool" and not (
        len(node.outputs) == 1 and comes_from_product(next(iter(node.operands)))
    ):
        return "fewer elements are left to be quantized behind it"
    return ""


def _grows(node: Node) -> bool:
    """Whether a resize repeats elements: there are fewer to be quantized before it."""
    (x, *_), y = node.operands, node.outputs[0]
    pairs = zip(x.shape, y.shape, strict=True)
    return _is_nearest(node) and all(bounds(after - before)[0] >= 0 for before, after in pairs)


def _quantize_before(op: Any, m: Match) -> Any:
    node = parts_of(m.root)[0].node
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
