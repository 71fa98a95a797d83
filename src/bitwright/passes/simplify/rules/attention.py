"""Attention written in matmul, softmax and masks becomes one op.

softmax(scale * q @ k^T + mask) @ v  ->  attention(q, k, v, mask) {scale}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bitwright.ir.dim import Size
from bitwright.ir.graph import Node, Value, constant_value
from bitwright.rewrite import Match, Rule
from bitwright.rewrite.match import uniform

VERY_NEGATIVE = -1e4  # exp of this, after any score is subtracted, is 0 in every float type

# patterns of the scaled scores
_SCALES: dict[str, Callable[..., Any]] = {
    "plain": lambda op, q, k, s: op.matmul(q, k, as_="scores"),
    "times": lambda op, q, k, s: op.mul(op.matmul(q, k, as_="scores"), s),
    "over": lambda op, q, k, s: op.div(op.matmul(q, k, as_="scores"), s),
}
_MASKS: dict[str, Callable[..., Any]] = {
    "unmasked": lambda op, scores, mask: scores,
    "added": lambda op, scores, mask: op.add(scores, mask),
    "selected": lambda op, scores, mask: op.where(mask, scores, float("-inf")),
}
_GUARDS: dict[str, Callable[..., Any]] = {
    "bare": lambda op, p, mask: p,
    "guarded": lambda op, p, mask: op.where(op.is_nan(p), 0, p),
    "hidden": lambda op, p, mask: op.where(
        op.eq(op.reduce_max(mask, as_="top"), float("-inf")), 0, p
    ),
}


def _factor(m: Match, scale: str) -> float | None:
    if scale == "plain":
        return 1.0
    number = m.scalar("s")
    if number is None or (scale == "over" and number == 0):
        return None
    return number if scale == "times" else 1 / number


def _why_not_attention(scale: str) -> Callable[[Match], str | bool]:
    def unless(m: Match) -> str | bool:
        if _factor(m, scale) is None:
            return "the scale is not a single constant"
        rank = m.q.rank
        if rank not in (3, 4) or m.k.rank != rank or m.v.rank != rank:
            return f"ranks {m.q.rank}, {m.k.rank}, {m.v.rank} are not those of batch and heads"
        if m.soft.attrs["axis"] not in (-1, rank - 1):
            return "softmax is not over the keys"
        if "top" in m.bindings and not _is_over_keys(m.top):
            return "the guard does not reduce over all keys"
        if m.uses(m.scores.outputs[0]) != 1:
            return "the scores have another reader"
        if (
            m.q.shape[: rank - 2] != m.k.shape[: rank - 2]
            or m.k.shape[: rank - 2] != m.v.shape[: rank - 2]
        ):
            return "batch or heads differ"
        return False

    return unless


def _is_over_keys(reduction: Node) -> bool:
    """Whether a reduction of the mask is over the keys of each query."""
    (mask,) = reduction.operands
    axes = [axis % mask.rank for axis in reduction.attrs["axes"] or range(mask.rank)]
    return axes == [mask.rank - 1] and bool(reduction.attrs["keepdims"])


def _as_4d(op: Any, value: Value | None) -> Any:
    """[N, S, D] -> [1, N, S, D]; masks of lower rank broadcast."""
    if value is None or value.rank != 3:
        return value
    return op.reshape(value, shape=(1, *value.shape))


def _attend(scale: str) -> Callable[..., Any]:
    def replace(op: Any, q: Any, k: Any, v: Any, m: Match) -> Any:
        key = op.transpose(k, perm=[*range(k.rank - 2), k.rank - 1, k.rank - 2])
        mask = m.bindings.get("mask")
        if q.rank == 4:
            return op.attention(q, key, v, mask, scale=_factor(m, scale))
        y = op.attention(*(_as_4d(op, x) for x in (q, key, v, mask)), scale=_factor(m, scale))
        return op.reshape(y, shape=m.root.outputs[0].shape)

    return replace


def _rule(scale: str, masking: str, guard: str) -> Rule:
    def pattern(op: Any, q: Any, k: Any, v: Any, s: Any, mask: Any) -> Any:
        scores = _MASKS[masking](op, _SCALES[scale](op, q, k, s), mask)
        return op.matmul(_GUARDS[guard](op, op.softmax(scores, as_="soft"), mask), v)

    # the variables of a rule are the parameters of its lambda
    matches: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): lambda op, q, k, v: pattern(op, q, k, v, None, None),
        (True, False): lambda op, q, k, v, s: pattern(op, q, k, v, s, None),
        (False, True): lambda op, q, k, v, mask: pattern(op, q, k, v, None, mask),
        (True, True): pattern,
    }
    return Rule(
        f"attention-{scale}-{masking}-{guard}",
        matches[scale != "plain", masking != "unmasked"],
        _attend(scale),
        _why_not_attention(scale),
    )


def _is_causal(mask: Value) -> bool:
    """Whether an additive mask hides exactly the keys after each query."""
    array = constant_value(mask)
    if array is not None:
        rows, columns = array.shape[-2:]
        if array.size != rows * columns or array.dtype.kind != "f" or rows != columns:
            return False
        flat = array.reshape(rows, columns)
        upper = np.triu(np.ones(flat.shape, bool), 1)
        return bool((flat[upper] <= VERY_NEGATIVE).all() and (flat[~upper] == 0).all())
    node = mask.node
    if node.op == "where":
        seen, kept, hidden = node.operands
        number = uniform(hidden)
        return (
            uniform(kept) == 0 and number is not None and number <= VERY_NEGATIVE
        ) and _is_causal_condition(seen)
    if (
        node.op != "trilu"
        or len(node.inputs) != 1
        or not node.attrs["upper"]
        or node.attrs["k"] != 1
    ):
        return False
    source = node.inputs[0]
    while source is not None and source.node.op == "expand" and len(source.node.inputs) == 1:
        source = source.node.inputs[0]
    number = uniform(source)
    return number is not None and number <= VERY_NEGATIVE


def _is_causal_condition(seen: Value) -> bool:
    """Whether a condition is `key <= query` for positions that start at 0."""
    node = seen.node
    if node.op not in ("le", "ge"):
        return False
    key, query = node.inputs if node.op == "le" else node.inputs[::-1]
    assert key is not None and query is not None
    length = seen.shape[-1]
    return _is_iota(key, (length,)) and _is_iota(query, (length, 1))


def _is_iota(value: Value, shape: tuple[Size, ...]) -> bool:
    """Whether a value is 0, 1, 2, … in this shape, with leading axes of size 1."""
    leading = value.shape[: max(0, value.rank - len(shape))]
    if value.shape[len(leading) :] != shape or any(size != 1 for size in leading):
        return False
    while value.node.op == "reshape" and len(value.node.inputs) == 1:
        (value,) = value.node.operands
    array = constant_value(value)
    if array is not None:
        return bool(np.array_equal(array.reshape(-1), np.arange(array.size)))
    return value.node.op == "iota" and value.dtype.is_integer


def _why_not_causal(m: Match) -> str | bool:
    if m.node.attrs.get("causal"):
        return "it is causal already"
    if m.mask.shape[-2:] != (m.q.shape[2], m.k.shape[2]) or m.q.shape[2] != m.k.shape[2]:
        return "the mask is not square over queries and keys"
    return not _is_causal(m.mask) and "the mask is not causal"


def _repeated_heads(value: Value) -> Value | None:
    """k of a reshape(expand(reshape(k))) that repeats each head."""
    chain = [value]
    for op in ("reshape", "expand", "reshape"):
        inputs = chain[-1].node.inputs
        if chain[-1].node.op != op or len(inputs) != 1 or inputs[0] is None:
            return None
        chain.append(inputs[0])
    _, outer, middle, source = chain
    if source.rank != 4:
        return None
    batch, heads, length, depth = source.shape
    if middle.shape != (batch, heads, 1, length, depth):
        return None
    wide = outer.shape
    fits = (wide[0], wide[1], wide[3], wide[4]) == (batch, heads, length, depth)
    return source if fits else None


def _grouped_heads(m: Match) -> tuple[Value, Value] | str:
    k, v = _repeated_heads(m.k), _repeated_heads(m.v)
    if m.k.rank != 4 or k is None or v is None:
        return "keys and values are not repeated heads"
    return k, v


def _why_not_scale(m: Match) -> str | bool:
    if m.scalar("s") is None:
        return "the factor is not a single constant"
    return m.node.attrs.get("scale") is None and "it has no explicit scale"


def _scaled(op: Any, q: Any, k: Any, v: Any, m: Match) -> Any:
    return op.like(m.node, q, k, v, m.mask, scale=m.node.attrs["scale"] * m.scalar("s"))


RULES = [
    *(
        _rule(scale, masking, guard)
        for scale in ("times", "over", "plain")
        for masking in ("added", "selected", "unmasked")
        for guard in _GUARDS
        if (masking, guard) not in (("selected", "hidden"), ("unmasked", "hidden"))
    ),
    Rule(
        "causal-mask-as-attribute",
        lambda op, q, k, v, mask: op.attention(q, k, v, mask, as_="node"),
        lambda op, q, k, v, m: op.like(m.node, q, k, v, causal=True),
        _why_not_causal,
    ),
    Rule(
        "scale-of-query-into-attention",
        lambda op, q, k, v, mask, s: op.attention(op.mul(q, s), k, v, op.maybe(mask), as_="node"),
        _scaled,
        _why_not_scale,
    ),
    Rule(
        "scale-of-key-into-attention",
        lambda op, q, k, v, mask, s: op.attention(q, op.mul(k, s), v, op.maybe(mask), as_="node"),
        _scaled,
        _why_not_scale,
    ),
    Rule.from_plan(
        "grouped-heads",
        lambda op, q, k, v, mask: op.attention(q, k, v, op.maybe(mask), as_="node"),
        _grouped_heads,
        lambda op, m, heads: op.like(m.node, m.q, *heads, m.mask),
    ),
]
