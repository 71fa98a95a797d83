"""The order of nodes by the memory that they free."""

import numpy as np

from bitwright.ops.core.builder import Builder
from bitwright.passes.order_for_memory import order_for_memory
from bitwright.rewrite.trace import Trace


def order(graph):
    return [n.name for n in order_for_memory(graph, Trace()).nodes if not n.is_boundary]


def step(reads_later=False, outputs_gradient=False):
    """Two parameters whose gradients are made before either is updated."""
    b = Builder("step")
    x, rate = b.input("x", "f32[n, 64]"), b.input("rate", "f32[]")
    weights = [b.state(f"w{i}", np.ones((64, 64), np.float32)) for i in range(2)]
    gradients = [b.matmul(b.transpose(x, perm=(1, 0)), b.matmul(x, w)) for w in weights]
    if reads_later:
        b.output("y", b.matmul(x, weights[0]))
    if outputs_gradient:
        b.output("g", gradients[1])
    apply = b.lt(b.abs(rate), np.inf)
    for w, g in zip(weights, gradients, strict=True):
        new = b.sgd_update(w, g, rate, rate, apply)
        b.update(w, new[0] if isinstance(new, tuple) else new)
    return b.build(), [g.node.name for g in gradients], [v.node.name for _, v in b.updates]


def test_a_parameter_is_updated_right_after_its_gradient():
    graph, gradients, updates = step()
    found = order(graph)
    assert sorted(found) == sorted(n.name for n in graph.nodes if not n.is_boundary)
    for gradient, update in zip(gradients, updates, strict=True):
        assert found.index(update) == found.index(gradient) + 1


def test_an_update_waits_for_other_readers_of_the_old_value():
    graph, gradients, updates = step(reads_later=True)
    found = order(graph)
    assert found.index(updates[0]) > found.index(dict(graph.outputs)["y"].node.name)
    assert found.index(updates[1]) == found.index(gradients[1]) + 1


def test_nodes_that_free_nothing_stay_behind():
    b = Builder("plain")
    x = b.input("x", "f32[n, 64]")
    first = b.matmul(x, np.ones((64, 64), np.float32))
    second = b.matmul(first, np.ones((64, 8), np.float32))
    third = b.matmul(x, np.ones((64, 32), np.float32))
    graph = b.build(second=second, third=third)
    assert order_for_memory(graph, Trace()) is graph
