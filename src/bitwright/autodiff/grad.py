"""`bw.grad`: a graph with its gradients as further outputs.

    g = bw.grad(graph, loss="loss")                  # outputs of graph, grad.<name> per parameter
    g = bw.grad(graph, loss="loss", wrt=["x"])       # of the values named
    g = bw.grad(graph, loss="loss", checkpoint="auto")   # less memory, more arithmetic

The loss is one number. The sweep visits the nodes in reverse order and calls the gradient rule of
each op (`OpDef.grad`); contributions of several readers are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bitwright.autodiff.checkpoint import Recomputation, chosen_values, needed_nodes
from bitwright.errors import GraphError
from bitwright.ir.dtype import bool_
from bitwright.ir.edit import prune
from bitwright.ir.graph import Graph, Value, nearest
from bitwright.ir.types import TensorType
from bitwright.ops.control.control_gradients import stack_carried
from bitwright.ops.core.bound_sizes import bind_sizes
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.check import verify
from bitwright.ops.core.gradients import full_like
from bitwright.ops.core.opdef import NonDifferentiable
from bitwright.ops.core.registry import get
from bitwright.ops.core.reverse import backpropagate, dependent, is_differentiable
from bitwright.ops.sequence.recurrent_rules import keep_gates

PREFIX = "grad."


def grad(
    graph: Graph,
    loss: str,
    wrt: Iterable[str] | None = None,
    checkpoint: str | Sequence[str] | None = None,
) -> Graph:
    """The graph with one more output `grad.<name>` for each trainable parameter, or for each value
    named in `wrt`: the gradient of the output `loss`.

    `checkpoint` lists names or patterns of forward values to keep for the backward pass, which
    computes the others again; "auto" selects them.
    """
    graph = stack_carried(graph, wanted_values(graph, wrt))
    graph = keep_gates(graph, wanted_values(graph, wrt))
    target, values = loss_value(graph, loss), wanted_values(graph, wrt)
    b = Builder.of(graph)
    seed = b.constant(np.ones(()), target.dtype, name="one")
    seeds = {target: b.expand(seed, shape=target.shape) if target.rank else seed}
    again = None
    if checkpoint is not None:
        kept = chosen_values(graph, checkpoint, target, values)
        again = Recomputation(b, needed_nodes(graph, target), kept)
    found = backpropagate(b, graph.nodes, seeds, values, again)
    require_connected(graph, values, [target], loss)
    for value in values:
        b.output(PREFIX + value.name, found.get(value) or full_like(b, 0.0, value))
    return verify(bind_sizes(prune(b.build())))


def loss_value(graph: Graph, loss: str) -> Value:
    """The value of the loss; a `GraphError` unless it is one number of a floating type."""
    outputs = dict(graph.outputs)
    if loss not in outputs:
        raise GraphError(
            f"graph {graph.name!r} has no output {loss!r} to be the loss",
            expected=" or ".join(outputs),
            hint=nearest(loss, outputs),
        )
    value = outputs[loss]
    if not is_differentiable(value) or value.dtype.is_complex:
        raise GraphError(f"the loss {loss!r} is not a real number", found=repr(value))
    if any(size != 1 for size in value.shape):
        raise GraphError(
            f"the loss {loss!r} is not one number",
            found=repr(value),
            hint="Reduce it, for example by reduce_mean.",
        )
    return value


def wanted_values(graph: Graph, wrt: Iterable[str] | None) -> Sequence[Value]:
    """The values to differentiate by: those named, or every trainable parameter."""
    if wrt is None:
        found = [
            v
            for v in graph.parameters
            if v.node.attrs.get("trainable", True) and is_differentiable(v)
        ]
        if not found:
            raise GraphError(
                f"graph {graph.name!r} has no trainable parameter",
                hint="Name the values to differentiate by: wrt=[...].",
            )
        return found
    names = [wrt] if isinstance(wrt, str) else wrt
    values = [graph.value(name) for name in dict.fromkeys(names)]
    for value in values:
        if not is_differentiable(value):
            raise GraphError(f"{value} has no gradient: its type is {value.type}")
    return values


def require_connected(
    graph: Graph, values: Iterable[Value], targets: Iterable[Value], loss: str
) -> None:
    """Raise a `GraphError` that names a value on which the loss does not depend, or only through
    an index or another result that has no gradient.

    Comparisons and sizes are no error: gradients of relu and of means depend on x through them, and
    their derivative is zero.
    """
    needed, smooth = set(targets), set(targets)
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outputs):
            needed.update(node.operands)
        if any(value in smooth for value in node.outputs):
            smooth.update(filter(is_differentiable, node.operands))
    unused = [value for value in values if value not in needed]
    if unused:
        names = ", ".join(repr(value.name) for value in unused)
        raise GraphError(
            f"the loss {loss!r} does not depend on {names}",
            hint="Remove it, or mark the parameter as not trainable.",
        )
    for value in values:
        if value not in smooth:
            _refuse_cut(graph, value, needed, loss)


def _refuse_cut(graph: Graph, value: Value, needed: set[Value], loss: str) -> None:
    """Raise a `GraphError` that names the first op between the value and the loss whose results
    have no gradient."""
    _, reached = dependent(graph.nodes, {value})
    for node in graph.nodes:
        rule = get(node.op).grad
        if not isinstance(rule, NonDifferentiable) or reached.isdisjoint(node.operands):
            continue
        results = [v for v in node.outputs if v in needed and isinstance(v.type, TensorType)]
        is_number = any(v.dtype != bool_ for v in results)
        if is_number and node.op != "shape_of":
            raise GraphError(
                f"the loss {loss!r} depends on {value.name!r} only through {node.op}, which has no "
                f"gradient: {rule.reason}",
                where=f"{node}" + (f" (from {node.loc})" if node.loc else ""),
                hint="Choose another loss, or freeze the parameters before this node.",
            )
