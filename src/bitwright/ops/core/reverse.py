"""Reverse-mode differentiation of nodes: the sweep that `bw.grad` and composed gradients share.

A gradient rule is `grad(b, node, dys)`. It appends nodes to the builder `b` and returns one value
per operand of the node: the gradient of the loss with respect to that operand, or None for zero.
`dys` holds the gradients of the node's results, None where a result does not influence the loss;
at least one is present. A gradient has the type of the value that it belongs to. That of a complex
value is d/d(real part) + i d/d(imaginary part), as in PyTorch, so y = x w gives dx = dy conj(w).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bitwright.errors import GraphError
from bitwright.ir.graph import Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import NonDifferentiable, NotYet
from bitwright.ops.core.registry import get

Gradients = Sequence[Value | None]
Rule = Callable[[Builder, Node, list[Value | None]], Gradients]
StandIn = Callable[[Node, Sequence[Value | None]], Node]


def is_differentiable(value: Value | None) -> bool:
    """Whether a value can have a gradient: it is a float or complex tensor."""
    if value is None or not isinstance(value.type, TensorType):
        return False
    return value.dtype.is_float or value.dtype.is_complex


def backpropagate(
    b: Builder,
    nodes: Sequence[Node],
    seeds: Mapping[Value, Value],
    wrt: Iterable[Value],
    stand_in: StandIn | None = None,
) -> dict[Value, Value]:
    """Gradients of `wrt`, given the gradients of results (`seeds`).

    `nodes` are in topological order. A value of `wrt` that no seed depends on is absent from the
    answer, and so is one whose gradient is zero everywhere. `stand_in(node, dys)` returns what a
    rule sees in place of a node: the same with recomputed operands and results.
    """
    wanted = set(wrt)
    on_path, reached = dependent(nodes, wanted)
    found: dict[Value, Value] = dict(seeds)
    for node in reversed(nodes):
        dys = [found.get(value) for value in node.outputs]
        if node not in on_path or all(dy is None for dy in dys):
            continue
        with b.at(node.loc):
            needed = [v in reached and is_differentiable(v) for v in node.inputs]
            seen = stand_in(node, dys) if stand_in else node
            _add_up(b, found, node, _apply(b, seen, dys, needed))
    return {value: found[value] for value in wanted if value in found}


def takes_wanted(rule: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Marks a rule that also receives which operands need a gradient, as `wanted`."""
    rule.takes_wanted = True  # type: ignore[attr-defined]
    return rule


def dependent(nodes: Sequence[Node], wanted: set[Value]) -> tuple[set[Node], set[Value]]:
    """The nodes whose results depend differentiably on a wanted value, and all such values."""
    reached, found = set(wanted), set()
    for node in nodes:
        if any(value in reached for value in node.operands):
            outputs = [value for value in node.outputs if is_differentiable(value)]
            if outputs:
                found.add(node)
                reached.update(outputs)
    return found, reached


def _apply(b: Builder, node: Node, dys: list[Value | None], wanted: list[bool]) -> Gradients:
    rule: Any = get(node.op).grad
    if rule is NotYet:
        raise GraphError(f"the gradient of {node.op} is missing", where=str(node))
    if isinstance(rule, NonDifferentiable):
        raise GraphError(
            f"the gradient of {node.op} is asked for, and it has none: {rule.reason}",
            where=f"{node}" + (f" (from {node.loc})" if node.loc else ""),
            hint="Choose another loss, or freeze the parameters before this node.",
        )
    options = {"wanted": wanted} if getattr(rule, "takes_wanted", False) else {}
    answer: Gradients = rule(b, node, dys, **options)
    if len(answer) > len(node.inputs):
        raise GraphError(
            f"the gradient of {node.op} gives {len(answer)} values",
            expected=f"at most {len(node.inputs)}, one per operand",
        )
    return answer


def _add_up(b: Builder, found: dict[Value, Value], node: Node, gradients: Gradients) -> None:
    for value, gradient in zip(node.inputs, gradients, strict=False):
        if value is None or gradient is None or not is_differentiable(value):
            continue
        if gradient.tensor.dtype != value.dtype or gradient.rank != value.rank:
            raise GraphError(
                f"the gradient of {node.op} has another type than its operand",
                where=str(node),
                expected=repr(value),
                found=repr(gradient),
            )
        found[value] = b.add(found[value], gradient) if value in found else gradient


def composed(compose: Callable[..., Any]) -> Rule:
    """The rule of an op that `compose(b, *operands, **attrs)` expresses by differentiable ops.

    Absent operands are None. `compose` returns the op's result, or a tuple of its results.
    """

    def rule(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
        opdef = get(node.op)
        fixed = sum(not operand.variadic for operand in opdef.operands)
        inputs = [*node.inputs, *[None] * (fixed - len(node.inputs))]
        start = len(b.nodes)
        answer = compose(b, *inputs, **opdef.call_attrs(node.attrs))
        results = answer if isinstance(answer, tuple) else (answer,)
        seeds = {y: dy for y, dy in zip(results, dys, strict=False) if dy is not None}
        found = backpropagate(b, b.nodes[start:], seeds, node.operands)
        return [None if v is None else found.pop(v, None) for v in node.inputs]

    rule.compose = compose  # type: ignore[attr-defined]
    return rule


def composition(op: str) -> Callable[..., Any] | None:
    """`compose` of an op whose gradient rule is `composed(compose)`, else None."""
    return getattr(get(op).grad, "compose", None)
