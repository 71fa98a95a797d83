"""Movements that change nothing, and chains of movements that are one."""

from __future__ import annotations

from typing import Any

from bitwright.ir.dim import Dim
from bitwright.ir.dtype import holds_exactly
from bitwright.rewrite import Match, Rule


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
