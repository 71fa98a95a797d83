"""Movements that change nothing, and chains of movements that are one."""

from __future__ import annotations

from typing import Any

from bitwright.ir.dim import Dim
from bitwright.ir.dtype import holds_exactly
from bitwright.ir.graph import Node
from bitwright.ir.types import normalize_axis
from bitwright.ops.shape.gather import constant_range
from bitwright.rewrite import Match, Rule
from bitwright.rewrite.match import is_number


def _why_not_identity(m: Match) -> str | bool:
    return m.x.type != m.root.types[0] and f"{m.x.type} becomes {m.root.types[0]}"


def _why_not_one_cast(m: Match) -> str | bool:
    start, middle = m.x.dtype, m.inner.outputs[0].dtype
    return not holds_exactly(middle, start) and f"{middle} cannot represent every {start}"


def _compose(op: Any, x: Any, p: Any, q: Any) -> Any:
    return op.transpose(x, perm=[p[axis] for axis in q])


def _why_not_reshape(m: Match) -> str | bool:
    """A transpose that keeps the order of all axes of size > 1 is a reshape."""
    kept = [axis for axis in m.root.attrs["perm"] if m.x.shape[axis] != 1]
    return kept != sorted(kept) and "it reorders axes of size > 1"


def _as_reshape(op: Any, x: Any, m: Match) -> Any:
    return op.reshape(x, shape=m.root.outputs[0].shape)


def _why_not_one_reshape(m: Match) -> str | bool:
    """The operand of the merged reshape must bind every symbolic size of the result."""
    final = {
        s.name for size in m.root.outputs[0].shape if isinstance(size, Dim) for s in size.symbols
    }
    known = {s.name for s in m.x.type.symbols}
    return not final <= known and f"size {min(final - known)!r} is not a size of {m.x}"


# gathers and pads


def _why_not_slice(m: Match) -> str | bool:
    size = m.x.shape[normalize_axis(m.a, m.x.rank)]
    if m.i.rank != 1 or not isinstance(size, int):
        return "a scalar index is a view" if not m.i.rank else "its indices may be out of range"
    return constant_range(m.i, size) is None and "its indices are no constant range"


def _gather_as_slice(op: Any, m: Match) -> Any:
    axis = normalize_axis(m.a, m.x.rank)
    found = constant_range(m.i, m.x.shape[axis])
    assert found is not None
    (start, step), (count,) = found, m.i.shape
    last = start + (count - 1) * step
    stop = last + (1 if step > 0 else -1)
    return op.slice(m.x, starts=(start,), stops=(stop,), steps=(step,), axes=(axis,))


def _padded_axis(node: Node) -> tuple[int, Any, Any] | None:
    """The only axis on which a node pads with zeros, and the sizes before and after."""
    rank, pads = node.outputs[0].rank, node.attrs.get("pads")
    if pads is None or node.attrs["mode"] != "constant":
        return None
    if len(node.inputs) > 1 and not is_number(node.inputs[1], 0):
        return None
    axes = [axis for axis in range(rank) if pads[axis] != 0 or pads[rank + axis] != 0]
    return (axes[0], pads[axes[0]], pads[rank + axes[0]]) if len(axes) == 1 else None


def _neighbours(m: Match) -> tuple[int, list[Any], Any, Any] | None:
    """The axis of two padded values, the values in order, and the sizes before and after both."""
    found = [_padded_axis(node) for node in (m.p, m.q)]
    if found[0] is None or found[1] is None or found[0][0] != found[1][0]:
        return None
    axis = found[0][0]
    sides = [(m.x, *found[0][1:]), (m.y, *found[1][1:])]
    for (x, before, _), (y, start, after) in (sides, sides[::-1]):
        if before + x.shape[axis] == start:
            return axis, [x, y], before, after
    return None


def _why_not_joined(m: Match) -> str | bool:
    if m.uses(m.p.outputs[0]) > 1 or m.uses(m.q.outputs[0]) > 1:
        return "a padded value has another reader"
    return m.memo(_neighbours) is None and "they are not next to each other on one axis"


def _joined(op: Any, m: Match) -> Any:
    found = m.memo(_neighbours)
    assert found is not None
    axis, parts, before, after = found
    whole = op.concat(*parts, axis=axis)
    pads = [[size if at == axis else 0 for at in range(whole.rank)] for size in (before, after)]
    return op.pad(whole, pads=(*pads[0], *pads[1]))


def _flat_parts(m: Match) -> list[Any]:
    """The operands of a concat, with those of concats along the same axis in their place."""
    axis, parts = normalize_axis(m.root.attrs["axis"], m.root.outputs[0].rank), list[Any]()
    for value in m.root.operands:
        node = value.node
        is_same = node.op == "concat" and normalize_axis(node.attrs["axis"], value.rank) == axis
        parts += node.operands if is_same and m.uses(value) == 1 else [value]
    return parts


def _why_not_flat(m: Match) -> str | bool:
    count = len(list(m.root.operands))
    return len(m.memo(_flat_parts)) == count and "no operand is a concat along this axis"


RULES = [
    Rule("identity", lambda op, x: op.identity(x), lambda op, x: x),
    Rule("cast-to-own-type", lambda op, x: op.cast(x), lambda op, x: x, _why_not_identity),
    Rule(
        "cast-of-cast",
        lambda op, x, t: op.cast(op.cast(x, as_="inner"), to=t),
        lambda op, x, m: op.like(m.root, x),
        _why_not_one_cast,
    ),
    Rule(
        "transpose-to-own-order",
        lambda op, x, p: op.transpose(x, perm=p),
        lambda op, x: x,
        lambda m: list(m.p) != sorted(m.p) and "the order changes",
    ),
    Rule(
        "transpose-of-transpose",
        lambda op, x, p, q: op.transpose(op.transpose(x, perm=p), perm=q),
        _compose,
    ),
    Rule("transpose-as-reshape", lambda op, x: op.transpose(x), _as_reshape, _why_not_reshape),
    Rule("reshape-to-own-shape", lambda op, x: op.reshape(x), lambda op, x: x, _why_not_identity),
    Rule(
        "reshape-of-reshape",
        lambda op, x: op.reshape(op.reshape(x)),
        _as_reshape,
        _why_not_one_reshape,
    ),
    Rule("expand-to-own-shape", lambda op, x: op.expand(x), lambda op, x: x, _why_not_identity),
    Rule(
        "slice-of-everything",
        lambda op, x: op.slice(x),
        lambda op, x: x,
        lambda m: (
            _why_not_identity(m) or (any(s < 0 for s in m.root.attrs["steps"]) and "it reverses")
        ),
    ),
    Rule(
        "pad-by-nothing",
        lambda op, x, v: op.pad(x, op.maybe(v)),
        lambda op, x: x,
        lambda m: any(p != 0 for p in m.root.attrs["pads"]) and "it pads",
    ),
    Rule(
        "tile-once",
        lambda op, x: op.tile(x),
        lambda op, x: x,
        lambda m: any(r != 1 for r in m.root.attrs["repeats"]) and "it repeats",
    ),
    Rule(
        "gather-of-range-as-slice",
        lambda op, x, i, a: op.gather(x, i, axis=a),
        _gather_as_slice,
        _why_not_slice,
    ),
    Rule(
        "sum-of-neighbouring-pads-as-concat",
        lambda op, x, y, u, v: op.add(
            op.pad(x, op.maybe(u), as_="p"), op.pad(y, op.maybe(v), as_="q")
        ),
        _joined,
        _why_not_joined,
    ),
    Rule(
        "concat-of-concat",
        lambda op: op.concat(...),
        lambda op, m: op.concat(*m.memo(_flat_parts), axis=m.root.attrs["axis"]),
        _why_not_flat,
    ),
    Rule("concat-of-one", lambda op, x: op.concat(x), lambda op, x: x),
    Rule(
        "split-into-one",
        lambda op, x: op.split(x),
        lambda op, x: x,
        lambda m: len(m.root.outputs) != 1 and "it has several parts",
    ),
    Rule("where-on-constant-true", lambda op, x, y: op.where(1, x, y), lambda op, x: x),
    Rule("where-on-constant-false", lambda op, x, y: op.where(0, x, y), lambda op, y: y),
    Rule("where-of-equal-branches", lambda op, c, x: op.where(c, x, x), lambda op, x: x),
]
