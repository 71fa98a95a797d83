"""`bw.jvp` and `bw.hvp`: derivatives along a direction, by two reverse sweeps.

    j = bw.jvp(graph, ["x"])                  # input tangent.x, outputs tangent.<output>
    h = bw.hvp(graph, loss="loss", wrt=["w"]) # input tangent.w, outputs grad.w and hvp.w

The first sweep gives g = Jᵀu for an arbitrary u. It is linear in u, so its derivative by u along v
is J v. The sweep of the gradient itself along v gives H v.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bitwright.autodiff.grad import PREFIX, grad, wanted_values
from bitwright.errors import GraphError
from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Value
from bitwright.ops.control.control_gradients import stack_carried
from bitwright.ops.core.bound_sizes import bind_sizes
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.gradients import full_like
from bitwright.ops.core.reverse import backpropagate, is_differentiable

TANGENT = "tangent."
PRODUCT = "hvp."


def jvp(graph: Graph, tangents: Iterable[str]) -> Graph:
    """The graph with an input `tangent.<name>` for each value named, and an output
    `tangent.<output>` for each float output: its derivative along the tangents."""
    names = _named(tangents)
    graph = stack_carried(graph, wanted_values(graph, names))
    values = wanted_values(graph, names)
    b = Builder.of(graph)
    outputs = {name: v for name, v in graph.outputs if is_differentiable(v)}
    # the sweep does not depend on the values of u, because it is linear in u
    start = len(b.nodes)
    seeds = {v: full_like(b, 0.0, v) for v in outputs.values()}
    found = backpropagate(b, graph.nodes, seeds, values)
    nodes = b.nodes[start:]
    directions = _directions(b, {v: found[v] for v in values if v in found}, values)
    moved = backpropagate(b, nodes, directions, seeds.values())
    for name, value in outputs.items():
        b.output(TANGENT + name, moved.get(seeds[value]) or full_like(b, 0.0, value))
    return verify(bind_sizes(prune(b.build())))


def hvp(graph: Graph, loss: str, wrt: Iterable[str] | None = None) -> Graph:
    """The graph with gradients, an input `tangent.<name>` for each of `wrt` and an output
    `hvp.<name>`: the Hessian of the loss times the tangents."""
    names = [v.name for v in wanted_values(graph, wrt)]
    first = grad(graph, loss, names)
    first = stack_carried(first, wanted_values(first, names))
    values, outputs = wanted_values(first, names), dict(first.outputs)
    b = Builder.of(first)
    directions = _directions(b, {v: outputs[PREFIX + v.name] for v in values}, values)
    found = backpropagate(b, first.nodes, directions, values)
    for value in values:
        b.output(PRODUCT + value.name, found.get(value) or full_like(b, 0.0, value))
    return verify(bind_sizes(prune(b.build())))


def _named(tangents: Iterable[str]) -> list[str]:
    names = [tangents] if isinstance(tangents, str) else list(dict.fromkeys(tangents))
    if not names:
        raise GraphError("there is no direction", hint="Name at least one value.")
    return names


def _directions(
    b: Builder, gradients: Mapping[Value, Value], values: Iterable[Value]
) -> dict[Value, Value]:
    """The gradients as seeds of another sweep: each has the tangent of its value."""
    seeds: dict[Value, Value] = {}
    for value in values:
        tangent = b.input(TANGENT + value.name, value.type)
        if value in gradients:
            slope = gradients[value]
            seeds[slope] = b.add(seeds[slope], tangent) if slope in seeds else tangent
    return seeds
