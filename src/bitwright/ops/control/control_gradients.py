"""Gradients of if, loop and scan: their bodies are differentiated as graphs.

    if     an if whose bodies give the gradients of the captures
    scan   a scan in the opposite direction; its carried values are the gradients of the carried
           values and sums of the gradients of captures
    loop   the same scan, over the iterations that ran

A body of the backward scan computes the forward body again from the carried values before the
iteration. These are stacked results of the forward node. `stack_carried` adds them to a graph
before it is differentiated; without them, the rule runs the forward node once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bitwright.errors import GraphError
from bitwright.ir.edit import Replacement, prune, replace_nodes
from bitwright.ir.graph import Graph, Node, Value
from bitwright.ir.types import TensorType
from bitwright.ops.core.bound_sizes import bind_sizes
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.gradients import full_like
from bitwright.ops.core.reverse import (
    Gradients,
    backpropagate,
    dependent,
    is_differentiable,
    takes_wanted,
)


class _Body:
    """A body under differentiation: its nodes, and further inputs for gradients."""

    def __init__(self, b: Builder, body: Graph) -> None:
        self.graph = body = stack_carried(body, parent=b)
        self.b = Builder(f"{body.name}.grad", parent=b)
        self.b.meta = dict(body.meta)
        for node in body.nodes:
            self.b.append(node)

    def input(self, name: str, like: Value) -> Value:
        node = Node("input", (), {}, (like.type,), (self.b.fresh_name(name),))
        return self.b.append(node).outputs[0]

    def sweep(self, seeds: dict[Value, Value], wrt: Iterable[Value]) -> dict[Value, Value]:
        return backpropagate(self.b, self.graph.nodes, seeds, wrt)

    def build(self, inputs: Sequence[Value], outputs: Iterable[Value]) -> Graph:
        """The body with these inputs in this order; nodes that no output needs are left out."""
        first = [value.node for value in inputs]
        rest = [node for node in self.b.nodes if node.op != "input"]
        named = tuple((f"out{i}", value) for i, value in enumerate(outputs))
        return bind_sizes(prune(Graph(self.b.name, (*first, *rest), named, (), self.b.meta)))


def _shaped(b: Builder, gradient: Value, like: Value | None) -> Value:
    """The gradient in the shape of its value, where a body does not tell the sizes."""
    assert like is not None
    if gradient.shape == like.shape:
        return gradient
    shaped: Value = b.reshape(gradient, shape=like.shape)
    return shaped


def _zeros(b: Builder, like: Value) -> Value:
    return full_like(b, 0.0, like)


# if


@takes_wanted
def if_gradient(
    b: Builder, node: Node, dys: list[Value | None], wanted: Sequence[bool]
) -> Gradients:
    """An if whose bodies compute the gradients of the captures."""
    given = [i for i, dy in enumerate(dys) if dy is not None]
    places = [i for i, is_wanted in enumerate(wanted) if i and is_wanted]
    if not places:
        return ()
    bodies = {name: _branch(b, node.attrs[name], given, places) for name in ("then", "else")}
    operands = [*node.inputs, *[dys[i] for i in given]]
    made = b.node("if", operands, bodies, []).outputs
    answer: list[Value | None] = [None] * len(node.inputs)
    for place, gradient in zip(places, made, strict=True):
        answer[place] = _shaped(b, gradient, node.inputs[place])
    return answer


def _branch(b: Builder, graph: Graph, given: list[int], places: list[int]) -> Graph:
    body = _Body(b, graph)
    results = [body.graph.outputs[i][1] for i in given]
    captures = list(body.graph.inputs)
    incoming = [body.input(f"grad.{value.name}", value) for value in results]
    seeds: dict[Value, Value] = {}
    for value, dy in zip(results, incoming, strict=True):
        seeds[value] = body.b.add(seeds[value], dy) if value in seeds else dy
    wrt = [captures[place - 1] for place in places]
    found = body.sweep({v: dy for v, dy in seeds.items() if is_differentiable(v)}, wrt)
    return body.build([*captures, *incoming], [found.get(v) or _zeros(body.b, v) for v in wrt])


# scan and loop


class _Iteration:
    """What scan and loop have in common: carried values, rows, and inputs of the body by role."""

    def __init__(self, node: Node) -> None:
        self.node, self.body = node, node.attrs["body"]
        self.carried: int = node.attrs["carried"]
        self.is_loop = node.op == "loop"
        # operands before the carried ones, inputs of the body before them, outputs before them
        self.first, self.first_input, self.first_output = (2, 2, 1) if self.is_loop else (0, 0, 0)
        self.scanned: int = 0 if self.is_loop else node.attrs["scanned"]
        self.operands: list[Value | None] = list(node.inputs[self.first :])
        self.inputs: list[Value] = list(self.body.inputs[self.first_input :])
        self.results: list[Value] = [v for _, v in self.body.outputs[self.first_output :]]

    def per_row(self, name: str, count: int) -> list[int]:
        return list(self.node.attrs.get(name) or [0] * count)

    @property
    def rows(self) -> list[Value]:
        return self.results[self.carried :]

    def stacked_before(self) -> list[Value] | None:
        """The results of the node that stack the carried values before each iteration, and for a
        loop the number of each iteration; None if one is missing."""
        count = len(self.rows)
        axes, turned = self.per_row("output_axes", count), self.per_row("output_directions", count)
        found = []
        for value in self._needed():
            at = next(
                (
                    i
                    for i, row in enumerate(self.rows)
                    if row is value and axes[i] == 0 and not turned[i]
                ),
                None,
            )
            if at is None:
                return None
            found.append(self.node.outputs[self.carried + at])
        return found

    def _needed(self) -> list[Value]:
        return self.inputs[: self.carried] + ([self.body.inputs[0]] if self.is_loop else [])

    def with_stack(self) -> tuple[dict[str, Any], int]:
        """The attributes of the node with these results, and how many there are."""
        body, needed = self.body, self._needed()
        taken = {name for name, _ in body.outputs}
        outputs = list(body.outputs)
        for value in needed:
            name = f"before.{value.name}"
            while name in taken:
                name += "_"
            taken.add(name)
            outputs.append((name, value))
        attrs = {**self.node.attrs, "body": body.with_(outputs=tuple(outputs))}
        count = len(self.rows)
        for name in ("output_axes", "output_directions"):
            if attrs.get(name) is not None:
                attrs[name] = (*self.per_row(name, count), *[0] * len(needed))
        return attrs, len(needed)

    def require_lasting_sizes(self) -> None:
        """Raise a `GraphError` if a carried value may change its size between iterations."""
        for value, result, inner in zip(
            self.operands, self.node.outputs[: self.carried], self.inputs, strict=False
        ):
            is_tensor = value is not None and isinstance(value.type, TensorType)
            if not is_tensor or value.type != result.type:  # type: ignore[union-attr]
                raise GraphError(
                    f"the gradient of {self.node.op} is asked for, and the carried value "
                    f"{inner.name!r} changes its size between iterations",
                    where=str(self.node),
                    expected=value.type if value is not None else None,
                    found=result.type,
                    hint="Carry a value of one size and write rows into it, or stack the rows.",
                )


@takes_wanted
def iteration_gradient(
    b: Builder, node: Node, dys: list[Value | None], wanted: Sequence[bool]
) -> Gradients:
    """A scan over the iterations of a loop or scan in the opposite order."""
    forward = _Iteration(node)
    forward.require_lasting_sizes()
    before = forward.stacked_before()
    if before is None:
        attrs, count = forward.with_stack()
        before = list(b.node(node.op, node.inputs, attrs, []).outputs[-count:])
    body = _Body(b, forward.body)
    inputs = list(body.graph.inputs[forward.first_input :])
    results = [v for _, v in body.graph.outputs[forward.first_output :]]
    last = forward.carried + forward.scanned
    active = _active(body.graph, inputs, results, forward.carried, wanted[forward.first :])
    states = [i for i in range(forward.carried) if i in active and is_differentiable(results[i])]
    rows = [
        i
        for i in range(forward.carried, len(forward.results))
        if dys[i] is not None and is_differentiable(results[i])
    ]
    carried_dys = {i: body.input(f"grad.{results[i].name}", results[i]) for i in states}
    row_dys = {i: body.input(f"grad.{results[i].name}", results[i]) for i in rows}
    seeds: dict[Value, Value] = {}
    for i, dy in (carried_dys | row_dys).items():
        value = results[i]
        seeds[value] = body.b.add(seeds[value], dy) if value in seeds else dy
    found = body.sweep(seeds, [inputs[i] for i in sorted(active)])
    elements = [i for i in range(forward.carried, last) if inputs[i] in found]
    captures = [i for i in range(last, len(inputs)) if inputs[i] in found]
    sums = {i: body.input(f"sum.{inputs[i].name}", inputs[i]) for i in captures}
    outputs = [
        *[found.get(inputs[i]) or _zeros(body.b, inputs[i]) for i in states],
        *[body.b.add(sums[i], found[inputs[i]]) for i in captures],
        *[found[inputs[i]] for i in elements],
    ]
    ahead = body.graph.inputs[: forward.first_input]  # iteration and condition of a loop
    order = [
        *carried_dys.values(),
        *sums.values(),
        *inputs[: forward.carried],
        *ahead[:1],
        *inputs[forward.carried : last],
        *row_dys.values(),
        *ahead[1:],
        *inputs[last:],
    ]
    backward = body.build(order, outputs)
    given = forward.operands
    starts = [_start(b, dys[i], given[i]) for i in states]
    totals = [_start(b, None, given[i]) for i in captures]
    going = [b.constant(np.asarray(True))] if forward.is_loop else []
    sequences = [*before, *given[forward.carried : last], *[dys[i] for i in rows]]
    axes = forward.per_row("input_axes", forward.scanned)
    turned = forward.per_row("input_directions", forward.scanned)
    count = len(forward.rows)
    row_axes = forward.per_row("output_axes", count)
    row_turned = forward.per_row("output_directions", count)
    at = [i - forward.carried for i in rows]
    made = b.node(
        "scan",
        [*starts, *totals, *sequences, *going, *given[last:]],
        {
            "body": backward,
            "carried": len(states) + len(captures),
            "scanned": len(sequences),
            "input_axes": [*[0] * len(before), *axes, *[row_axes[i] for i in at]],
            "input_directions": [
                *[1] * len(before),
                *[1 - way for way in turned],
                *[1 - row_turned[i] for i in at],
            ],
            "output_axes": [axes[i - forward.carried] for i in elements],
            "output_directions": [1 - turned[i - forward.carried] for i in elements],
        },
        [],
    ).outputs
    answer: list[Value | None] = [None] * len(node.inputs)
    for i, gradient in zip([*states, *captures, *elements], made, strict=True):
        answer[forward.first + i] = _shaped(b, gradient, given[i])
    return answer


def _start(b: Builder, dy: Value | None, like: Value | None) -> Value:
    assert like is not None
    return _zeros(b, like) if dy is None else dy


def _active(
    body: Graph,
    inputs: Sequence[Value],
    results: Sequence[Value],
    carried: int,
    wanted: Sequence[bool],
) -> set[int]:
    """The positions of inputs whose gradients are needed: wanted ones, and carried values that
    depend on them in some iteration."""
    found = {i for i, is_wanted in enumerate(wanted) if is_wanted and is_differentiable(inputs[i])}
    while True:
        _, reached = dependent(body.nodes, {inputs[i] for i in found})
        more = {i for i in range(carried) if results[i] in reached} - found
        if not more:
            return found
        found |= more


def stack_carried(
    graph: Graph, wrt: Iterable[Value] | None = None, parent: Builder | None = None
) -> Graph:
    """The graph in which loops and scans also give what their gradients read: the carried values
    before each iteration. With `wrt`, only nodes that depend on one of these values change."""
    if not any(node.op in ("loop", "scan") for node in graph.nodes):
        return graph
    chosen = None if wrt is None else {n.names for n in dependent(graph.nodes, set(wrt))[0]}
    b = Builder(graph.name, parent)
    b.reserve_symbols(s.name for _, node in graph.walk() for t in node.types for s in t.symbols)
    for name in graph.values:
        b.fresh_name(name)

    def change(node: Node) -> Node | Replacement:
        if node.op not in ("loop", "scan") or (chosen is not None and node.names not in chosen):
            return node
        iteration = _Iteration(node)
        if not any(map(is_differentiable, node.outputs)) or iteration.stacked_before() is not None:
            return node
        try:
            iteration.require_lasting_sizes()
        except GraphError:
            return node  # the rule raises it, if the sweep gets there
        attrs, count = iteration.with_stack()
        names = [f"{node.name}.before{i}" for i in range(count)]
        kept = len(node.outputs)
        more = b.node(node.op, node.inputs, attrs, [b.fresh_name("") for _ in range(kept)] + names)
        made = node.with_(
            attrs=more.attrs,
            types=(*node.types, *more.types[kept:]),
            names=(*node.names, *more.names[kept:]),
        )
        return Replacement([made], made.outputs[:kept])

    return replace_nodes(graph, change, bodies=False)
