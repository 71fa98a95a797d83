"""Rotary embeddings written in arithmetic: rotated halves (NeoX) or pairs (interleaved).

x * cos + concat(-x[half:], x[:half]) * sin     cos, sin over all features, both halves equal
concat(a * c - b * s, b * c + a * s)            a, b the halves of x, as our exporter writes it
stack(a * c - b * s, a * s + b * c)             a, b the even and odd features
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bitwright.ir.dim import broadcast_size
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.rewrite import Match, Rule

_KEEPS_HALVES = frozenset({"cos", "sin", "cast", "identity"})


def _heads_axis(x: Value, table: Value) -> int | None:
    """The axis of heads in x: that of 1 and 2 along which the table is constant."""
    if x.rank != 4 or table.rank > 4:
        return None
    shape = (1,) * (4 - table.rank) + tuple(table.shape)
    for heads, positions in ((1, 2), (2, 1)):
        if shape[heads] == 1 and shape[positions] != 1:
            fits = broadcast_size(shape[positions], x.shape[positions]) == x.shape[positions]
            return heads if fits else None
    return None


def _equal_halves(value: Value) -> bool:
    """Whether both halves of the last axis are equal, derived from the ops that compute it."""
    while True:
        array = constant_value(value)
        if array is not None:
            half = array.shape[-1] // 2
            is_even = array.shape[-1] == 2 * half
            return is_even and bool(np.array_equal(array[..., :half], array[..., half:]))
        node = value.node
        first = node.inputs[0] if node.inputs else None
        if first is None or not isinstance(value.shape[-1], int):
            return False
        if node.op == "concat" and node.attrs["axis"] in (-1, value.rank - 1):
            return len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
        scaled = node.op == "mul" and _is_scalar(node.inputs[1])
        if not (scaled or node.op in _KEEPS_HALVES or _keeps_last_axis(node)):
            return False
        value = first


def _is_scalar(value: Value | None) -> bool:
    array = constant_value(value)
    return array is not None and array.size == 1


def _keeps_last_axis(node: Node) -> bool:
    source = node.inputs[0]
    if source is None or not source.rank or source.shape[-1] != node.outputs[0].shape[-1]:
        return False
    if node.op == "gather":
        return node.attrs["axis"] not in (-1, source.rank - 1)
    return node.op in ("reshape", "expand") and len(node.inputs) == 1


def _table(op: Any, table: Value, x: Value, heads: int, half: int) -> Any:
    """[B or 1, S, half] of a table that broadcasts against x."""
    if table.shape[-1] != half:
        table = op.slice(table, starts=[0], stops=[half], steps=[1], axes=[table.rank - 1])
    shape = [1] * (4 - table.rank) + list(table.shape)
    del shape[heads]
    return op.reshape(table, shape=shape)


def _rotate(op: Any, x: Value, cos: Value, sin: Value, heads: int, interleaved: bool) -> Any:
    half = x.shape[-1] // 2
    tables = [_table(op, t, x, heads, half) for t in (cos, sin)]
    if heads == 1:
        return op.rotary(x, *tables, interleaved=interleaved)
    swap = [0, 2, 1, 3]
    transposed = op.rotary(op.transpose(x, perm=swap), *tables, interleaved=interleaved)
    return op.transpose(transposed, perm=swap)


def _slice_is(node: Node, start: int, stop: int, size: int) -> bool:
    a = node.attrs
    return (
        len(node.inputs) == 1
        and [axis % node.outputs[0].rank for axis in a["axes"]] == [node.outputs[0].rank - 1]
        and (tuple(a["starts"]), tuple(a["stops"]), tuple(a["steps"])) == ((start,), (stop,), (1,))
    )


def _why_not_tables(m: Match) -> str | bool:
    if not isinstance(m.x.shape[-1], int) or m.x.shape[-1] % 2:
        return "the number of features is not a known even number"
    heads = _heads_axis(m.x, m.cos)
    if heads is None or heads != _heads_axis(m.x, m.sin):
        return "the tables are not over positions and features only"
    return False


def _why_not_halves(m: Match) -> str | bool:
    if reason := _why_not_tables(m):
        return reason
    if not (_equal_halves(m.cos) and _equal_halves(m.sin)):
        return "the halves of the tables are not known to be equal"
    size = m.x.shape[-1]
    if "high" in m.bindings:
        swapped = _slice_is(m.high, size // 2, size, size) and _slice_is(m.low, 0, size // 2, size)
    else:
        swapped = tuple(m.parts.attrs["sizes"]) == (size // 2, size // 2)
    return not swapped and "the halves are not swapped"


def _rotate_halves(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    return _rotate(op, x, cos, sin, _heads_axis(x, cos) or 1, False)


def _rotated_pattern(op: Any, x: Any, cos: Any, sin: Any) -> Any:
    low, high = op.split(x, as_="parts")[0], op.split(x)[1]
    real = op.sub(op.mul(low, cos), op.mul(high, sin))
    return op.concat(real, op.add(op.mul(high, cos), op.mul(low, sin)), as_="whole")


def _why_not_rotated(m: Match) -> str | bool:
    if reason := _why_not_tables(m):
        return reason
    half = m.x.shape[-1] // 2
    if any(table.shape[-1] != half for table in (m.cos, m.sin)):
        return "the tables have another number of angles"
    is_last = all(node.attrs["axis"] in (-1, 3) for node in (m.parts, m.whole))
    halved = is_last and tuple(m.parts.attrs["sizes"]) == (half, half)
    return not halved and "the parts are not the halves of the features"


def _interleaved_pattern(op: Any, y: Any, c: Any, s: Any) -> Any:
    even, odd = op.gather(y, 0, as_="even"), op.gather(y, 1, as_="odd")
    real = op.sub(op.mul(even, c), op.mul(odd, s))
    imaginary = op.add(op.mul(even, s), op.mul(odd, c))
    return op.reshape(op.concat(op.reshape(real), op.reshape(imaginary), as_="pairs"))


def _why_not_interleaved(m: Match) -> str | bool:
    shape = m.root.outputs[0].shape
    if m.y.rank != 5 or len(shape) != 4 or tuple(m.pairs.outputs[0].shape) != tuple(m.y.shape):
        return "the pairs are not stacked along the last axis"
    if any(node.attrs["axis"] not in (-1, 4) for node in (m.even, m.odd)):
        return "the pairs are not along the last axis"
    if shape[:3] != m.y.shape[:3]:
        return "positions or heads are reshaped"
    even = m.even.outputs[0]
    heads = _heads_axis(even, m.c)
    return (
        heads is None or heads != _heads_axis(even, m.s)
    ) and "the tables do not match the heads"


def _rotate_pairs(op: Any, y: Any, c: Any, s: Any, m: Match) -> Any:
    heads = _heads_axis(m.even.outputs[0], c) or 1
    x = op.reshape(y, shape=m.root.outputs[0].shape)
    return _rotate(op, x, c, s, heads, True)


RULES = [
    Rule(
        "rotary-from-sliced-halves",
        lambda op, x, cos, sin: op.add(
            op.mul(x, cos),
            op.mul(op.concat(op.neg(op.slice(x, as_="high")), op.slice(x, as_="low")), sin),
        ),
        _rotate_halves,
        _why_not_halves,
    ),
    Rule(
        "rotary-from-split-halves",
        lambda op, x, cos, sin: op.add(
            op.mul(x, cos),
            op.mul(op.concat(op.neg(op.split(x, as_="parts")[1]), op.split(x)[0]), sin),
        ),
        _rotate_halves,
        _why_not_halves,
    ),
    Rule("rotary-from-rotated-halves", _rotated_pattern, _rotate_halves, _why_not_rotated),
    Rule("rotary-from-pairs", _interleaved_pattern, _rotate_pairs, _why_not_interleaved),
]
