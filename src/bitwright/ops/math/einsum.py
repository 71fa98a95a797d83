"""Einstein summation: `ij,jk->ik` names the axes of operands and result by letters.

Letters that are not in the result are summed over; a repeated letter in one operand takes the
diagonal. `...` stands for the axes without letters, aligned at the right and broadcast. Without
`->` the result has the axes of `...`, then the letters that occur once, in alphabetical order.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from bitwright.errors import GraphError, InferenceError
from bitwright.ir.dim import Size, broadcast_size, product
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core import expect
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.derivatives import conjugate, where_or_zero
from bitwright.ops.core.gradients import sum_to
from bitwright.ops.core.numeric import wide
from bitwright.ops.core.opdef import Array, Attr, Kind, OpDef, Sample, draw, sample
from bitwright.ops.core.reverse import Gradients

Labels = list[str]


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """Labels of the axes of each operand and of the result.

    The axes of `...` are called .0, .1, … from the right.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise InferenceError(
            f"equation {equation!r} names another number of operands",
            expected=len(ranks),
            found=len(terms),
        )
    operands = [_expand(term, rank, equation) for term, rank in zip(terms, ranks, strict=True)]
    seen = Counter(label for labels in operands for label in labels)
    dots = sorted((label for label in seen if label[0] == "."), key=_distance, reverse=True)
    if not arrow:
        return operands, dots + sorted(
            label for label in seen if seen[label] == 1 and label.isalpha()
        )
    hidden = len(dots) if "..." in right else 0
    result = _expand(right, len(right.replace("...", "")) + hidden, equation)
    for label in result:
        if label not in seen or result.count(label) > 1:
            raise InferenceError(
                f"the result of equation {equation!r} has a bad axis {label!r}",
                expected="each axis once, and from an operand",
            )
    return operands, result


def _distance(label: str) -> int:
    """The distance of an axis of `...` from the right."""
    return int(label[1:])


def _expand(term: str, rank: int, equation: str) -> Labels:
    """The labels of one operand of this rank."""
    before, dots, after = term.partition("...")
    letters = before + after
    if any(letter not in string.ascii_letters for letter in letters):
        raise InferenceError(
            f"equation {equation!r} is not understood",
            expected="letters, commas, one ... per operand and one ->",
        )
    hidden = rank - len(letters)
    if hidden < 0 or (hidden and not dots):
        raise InferenceError(
            f"part {term!r} of equation {equation!r} does not fit its operand",
            expected=f"rank {len(letters)}" + (" or more" if dots else ""),
            found=f"rank {rank}",
        )
    return [*before, *(f".{i}" for i in reversed(range(hidden))), *after]


def _sizes(operands: list[Labels], shapes: Sequence[Sequence[Size]]) -> dict[str, Size]:
    sizes: dict[str, list[Size]] = {}
    for labels, shape in zip(operands, shapes, strict=True):
        for label, size in zip(labels, shape, strict=True):
            sizes.setdefault(label, []).append(size)
    try:
        return {label: reduce(broadcast_size, found) for label, found in sizes.items()}
    except GraphError as error:
        raise InferenceError(f"axes of one name have different sizes: {error}") from None


def _infer(*xs: TensorType, equation: str) -> TensorType:
    if not xs:
        raise InferenceError("has no operand", expected="one or more")
    for x in xs:
        expect.number("an operand", x)
    element = expect.same_dtype(*xs)
    operands, result = parse_equation(equation, [x.rank for x in xs])
    sizes = _sizes(operands, [x.shape for x in xs])
    return TensorType(element, tuple(sizes[label] for label in result))


def _reference(*xs: Array, equation: str) -> Array:
    operands, result = parse_equation(equation, [x.ndim for x in xs])
    sizes: dict[str, Any] = _sizes(operands, [x.shape for x in xs])
    number = {label: i for i, label in enumerate(sizes)}
    arguments: list[Any] = []
    for x, labels in zip(xs, operands, strict=True):
        arguments += [
            np.broadcast_to(wide(x), [sizes[label] for label in labels]),
            [number[label] for label in labels],
        ]
    return np.asarray(np.einsum(*arguments, [number[label] for label in result], optimize="greedy"))


def _flops(xs: Sequence[TensorType], ys: Sequence[TensorType], attrs: Any) -> Size:
    """Operations of products in operand order: two for each multiply-add."""
    operands, result = parse_equation(attrs["equation"], [x.rank for x in xs])
    sizes = _sizes(operands, [x.shape for x in xs])
    total: Size = 0
    current = operands[0]
    for number, labels in enumerate(operands[1:], 1):
        needed = {*result, *(label for later in operands[number + 1 :] for label in later)}
        # an axis that occurs in one operand only is summed over first
        left = [label for label in dict.fromkeys(current) if label in needed.union(labels)]
        right = [label for label in dict.fromkeys(labels) if label in needed.union(current)]
        both = list(dict.fromkeys([*left, *right]))
        is_summed = any(label not in needed for label in both)
        total = total + (2 if is_summed else 1) * product([sizes[label] for label in both])
        current = [label for label in both if label in needed]
    return total


def _samples() -> list[Sample]:
    return [
        sample(draw(3, 4), draw(4, 5, seed=1), equation="ij,jk->ik"),
        sample(draw(2, 3, 4), draw(2, 4, 5, seed=1), equation="bij, bjk -> bik"),
        sample(draw(3, 4), equation="ij->ji"),
        sample(draw(3, 4), equation="ij->i"),
        sample(draw(3, 4), equation="ba"),
        sample(draw(3, 5, 5), equation="...ii->...i"),
        sample(draw(4, 4), draw(1, 4, seed=1), equation="ii,ji->j"),
        sample(draw(3, 4), draw(1, 5, seed=1), equation="ij,ik->k"),
        sample(draw(5), draw(5, seed=1), equation="i,i"),
        sample(draw(), draw(3, seed=1), equation=",i->i"),
        sample(draw(2, 1, 3, 4), draw(6, 4, 5, seed=1), equation="...ij,...jk->...ik"),
        sample(draw(2, 3, 4), equation="...j->j"),
        sample(draw(2, 3), draw(3, 4, seed=1), draw(4, 5, seed=2), equation="ab,bc,cd->ad"),
        sample(draw(0, 3), draw(3, 2), equation="ij,jk->ik"),
        sample(draw(3, 4, dtype="i64", low=-9, high=9), equation="Ij->j"),
        sample(draw(3, 4, dtype="bf16"), equation="ij->i", tolerance=2e-2),
    ]


def _grad(b: Builder, node: Node, dys: list[Any]) -> Gradients:
    """The gradient of an operand is an einsum of dy and the other operands."""
    xs = list(node.operands)
    operands, result = parse_equation(node.attrs["equation"], [x.rank for x in xs])
    names = dict.fromkeys(label for labels in operands for label in labels)
    letters = dict(zip(names, string.ascii_letters, strict=False))
    if len(letters) < len(names):
        raise GraphError("the gradient of an einsum with more than 52 axes is not supported")
    found: list[Value | None] = []
    for number, (x, labels) in enumerate(zip(xs, operands, strict=True)):
        others = [pair for i, pair in enumerate(zip(xs, operands, strict=True)) if i != number]
        # an axis of size 1 was broadcast, and its gradient is summed
        present = {*result, *(label for _, other in others for label in other)}
        own = list(dict.fromkeys(labels))
        # a diagonal takes the longer of its axes: the shorter one has size 1 and is broadcast
        size: dict[str, Size] = dict.fromkeys(own, 1)
        size.update((label, n) for label, n in zip(labels, x.shape, strict=True) if n != 1)
        kept = [label for label in own if label in present and size[label] != 1]
        terms = [result, *(other for _, other in others)]
        left = ",".join("".join(letters[label] for label in term) for term in terms)
        equation = f"{left}->{''.join(letters[label] for label in kept)}"
        dx = b.einsum(dys[0], *(conjugate(b, other) for other, _ in others), equation=equation)
        sizes = dict(zip(kept, dx.shape, strict=True))
        shape = tuple(size[label] for label in labels)
        found.append(sum_to(b, _spread(b, dx, labels, sizes, shape), x))
    return found


def _spread(
    b: Builder, dx: Value, labels: Labels, sizes: dict[str, Size], target: tuple[Size, ...]
) -> Value:
    """dx, which has the axes in `sizes`, with all axes of an operand; off a diagonal it is 0."""
    first = {label: labels.index(label) for label in labels}
    shape = [
        sizes.get(label, 1) if axis == first[label] else 1 for axis, label in enumerate(labels)
    ]
    if tuple(shape) != dx.shape:
        dx = b.reshape(dx, shape=shape)
    if dx.shape != target:
        dx = b.expand(dx, shape=target)
    for axis, label in enumerate(labels):
        if axis != first[label]:
            on_diagonal = b.eq(_counter(b, target, axis), _counter(b, target, first[label]))
            dx = where_or_zero(b, on_diagonal, dx)
    return dx


def _counter(b: Builder, shape: tuple[Size, ...], axis: int) -> Any:
    """0, 1, ... along one axis, in a shape that broadcasts."""
    along = [size if at == axis else 1 for at, size in enumerate(shape)]
    return b.reshape(b.iota(length=shape[axis]), shape=along)


OPDEFS = [
    OpDef(
        "einsum",
        Kind.COMPUTE,
        "xs*",
        infer=_infer,
        reference=_reference,
        grad=_grad,
        flops=_flops,
        samples=_samples,
        attrs={"equation": Attr("str")},
        doc="Products of the operands, summed over the axes that are not in the result.",
    )
]
