"""einsum becomes products of two operands at a time, from the left.

    sum     over axes that only one operand has and nothing needs later
    order   a as [batch…, left…, contracted…], b as [batch…, contracted…, right…]
    matmul  [batch…, L, K] by [batch…, K, R]; without contracted axes, a product with broadcasting

If one of two operands is a constant, it becomes the right one, whose packing happens at compile
time. A label that appears on two adjacent axes of size n selects the diagonal: every (n+1)-th of
the n² elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from bitwright.ir.dim import product
from bitwright.ir.graph import Value
from bitwright.ops.math.einsum import parse_equation
from bitwright.rewrite import Match, Rule

Term = tuple[Value, list[str]]
"""A tensor and the labels of its axes."""


def _terms(m: Match) -> tuple[list[Term], list[str]]:
    xs = list(m.root.operands)
    operands, result = parse_equation(m.root.attrs["equation"], [x.rank for x in xs])
    return list(zip(xs, operands, strict=True)), result


def expand(op: Any, m: Match) -> Any:
    given, result = _terms(m)
    sizes = _sizes(given)
    terms = [_diagonal(op, _without_ones(op, term, sizes)) for term in given]
    current = terms[0]
    for number, term in enumerate(terms[1:], 1):
        later = {label for _, labels in terms[number + 1 :] for label in labels}
        current = _contract(op, current, term, later.union(result))
    return _arranged(op, _summed(op, current, result), result)


def _diagonal(op: Any, term: Term) -> Term:
    x, labels = term
    for at, (one, other) in enumerate(pairwise(labels)):
        if one == other:
            size = x.shape[at]
            flat = op.reshape(x, shape=(*x.shape[:at], size * size, *x.shape[at + 2 :]))
            stop, step = size * size, size + 1
            picked = op.slice(flat, starts=[0], stops=[stop], steps=[step], axes=[at])
            return _diagonal(op, (picked, [*labels[:at], *labels[at + 1 :]]))
    return term


def _sizes(terms: Sequence[Term]) -> dict[str, set[Any]]:
    """The sizes of the axes of each label."""
    found: dict[str, set[Any]] = {}
    for x, labels in terms:
        for label, size in zip(labels, x.shape, strict=True):
            found.setdefault(label, set()).add(size)
    return found


def _without_ones(op: Any, term: Term, sizes: dict[str, set[Any]]) -> Term:
    """The term without axes of size 1 that broadcast to the size of another operand."""
    x, labels = term
    kept = [at for at, label in enumerate(labels) if x.shape[at] != 1 or len(sizes[label]) == 1]
    if len(kept) == len(labels):
        return term
    shape = tuple(x.shape[at] for at in kept)
    return op.reshape(x, shape=shape), [labels[at] for at in kept]


def _summed(op: Any, term: Term, needed: Iterable[str]) -> Term:
    x, labels = term
    kept = [label for label in labels if label in set(needed)]
    if kept == labels:
        return term
    axes = [axis for axis, label in enumerate(labels) if label not in kept]
    return op.reduce_sum(x, axes=axes, keepdims=False), kept


def _arranged(op: Any, term: Term, labels: Sequence[str]) -> Value:
    x, own = term
    perm = [own.index(label) for label in labels]
    return x if perm == list(range(len(perm))) else op.transpose(x, perm=perm)


def _contract(op: Any, a: Term, b: Term, needed: set[str]) -> Term:
    if is_weight(a[0]) and not is_weight(b[0]):
        a, b = b, a
    a, b = _summed(op, a, needed.union(b[1])), _summed(op, b, needed.union(a[1]))
    both = [label for label in a[1] if label in b[1]]
    batch = [label for label in both if label in needed]
    inner = [label for label in both if label not in needed]
    left = [label for label in a[1] if label not in both]
    right = [label for label in b[1] if label not in both]
    x = _arranged(op, a, [*batch, *left, *inner])
    y = _arranged(op, b, [*batch, *inner, *right])
    labels, first = [*batch, *left, *right], len(batch)
    outer = [x.shape[first + i] for i in range(len(left))]
    last = [y.shape[first + len(inner) + i] for i in range(len(right))]
    if not inner:
        x = op.reshape(x, shape=(*x.shape, *(1 for _ in right)))
        y = op.reshape(y, shape=(*y.shape[:first], *(1 for _ in left), *last))
        return op.mul(x, y), labels
    depth = product([x.shape[first + len(left) + i] for i in range(len(inner))])
    x = op.reshape(x, shape=(*x.shape[:first], product(outer), depth))
    y = op.reshape(y, shape=(*y.shape[:first], depth, product(last)))
    z = op.matmul(x, y)
    return op.reshape(z, shape=(*z.shape[:first], *outer, *last)), labels


def is_weight(value: Value) -> bool:
    """Whether it is a constant, or a transposed constant."""
    if value.node.op == "transpose":
        return next(iter(value.node.operands)).is_constant
    return value.is_constant


def why_not_expand(m: Match) -> str | bool:
    terms, _ = _terms(m)
    for x, labels in terms:
        repeated = {label for label, count in Counter(labels).items() if count > 1}
        for label in repeated:
            places = [at for at, other in enumerate(labels) if other == label]
            is_near = places[-1] - places[0] == len(places) - 1
            if not is_near or not all(isinstance(x.shape[at], int) for at in places):
                return f"the diagonal of axes {label!r} is not a strided slice"
    if any(len(found - {1}) > 1 for found in _sizes(terms).values()):
        return "axes of one name have different sizes"
    return False


EINSUM = Rule("einsum-as-products", lambda op: op.einsum(...), expand, why_not_expand)
