"""Recomputation in the backward pass: the same gradients in less memory."""

from functools import cache

import numpy as np
import pytest

from bitwright.autodiff.grad import grad
from bitwright.compiler import compile
from bitwright.errors import GraphError
from bitwright.lir.plan import plan
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run

DEPTH, WIDTH, BATCH = 24, 48, 256


def chain(kind="parameter", depth=DEPTH, residual=False):
    b, rng = Builder("chain"), np.random.default_rng(0)
    h = b.input("x", f"f32[n, {WIDTH}]")
    for i in range(depth):
        w = (rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
        weight = getattr(b, kind)(f"w{i}", w)
        y = b.tanh(b.matmul(h, weight), name=f"y{i}")
        h = b.add(h, y, name=f"h{i}") if residual else y
    return b.build(loss=b.reduce_mean(b.mul(h, h), axes=(0, 1), keepdims=False))


def weights(graph):
    return [v.name for v in (*graph.parameters, *graph.states)]


def feeds():
    return {"x": np.random.default_rng(1).standard_normal((BATCH, WIDTH)).astype(np.float32)}


@cache
def without_recomputation(kind, residual):
    graph = chain(kind, residual=residual)
    return compile(grad(graph, "loss", weights(graph)))


@pytest.mark.parametrize("kind", ["parameter", "state"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("checkpoint", ["auto", ["?5", "?11", "?17"]])
def test_memory_falls_and_gradients_stay(kind, residual, checkpoint):
    graph, plain = chain(kind, residual=residual), without_recomputation(kind, residual)
    saving = compile(grad(graph, "loss", weights(graph), checkpoint=checkpoint))
    sizes = [plan(exe.engine.schedule, {"n": BATCH}).total for exe in (plain, saving)]
    assert sizes[1] < 0.6 * sizes[0]
    expected, found = plain.run(feeds()), saving.run(feeds())
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_interpreted_gradients_are_the_same():
    graph = chain(depth=9)
    names = weights(graph)
    expected = run(grad(graph, "loss", names), feeds())
    found = run(grad(graph, "loss", names, checkpoint="auto"), feeds())
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_random_values_are_kept():
    """A mask drawn in the forward pass is the one that the backward pass reads."""
    b = Builder("dropout")
    h = b.input("x", "f32[8, 16]")
    for i in range(6):
        mask = b.bernoulli(b.constant(np.full((8, 16), 0.5, np.float32)), name=f"mask{i}")
        h = b.mul(b.mul(h, h, name=f"square{i}"), mask, name=f"h{i}")
    graph = b.build(loss=b.reduce_sum(h, axes=(0, 1), keepdims=False))
    made = grad(graph, "loss", ["x"], checkpoint=["h1", "h3"])
    assert sum(node.op == "bernoulli" for node in made.nodes) == 6
    assert any(node.op == "optimization_barrier" for node in made.nodes)


def test_values_of_the_last_segment_are_not_computed_again():
    graph = chain(depth=4)
    made = grad(graph, "loss", ["w0"], checkpoint=["y1"])
    again = {node.name for node in made.nodes if node.name.startswith("again.")}
    assert "again.y0" in again
    assert not any("y2" in name or "y3" in name for name in again)


def test_a_pattern_without_a_match_is_an_error():
    with pytest.raises(GraphError, match="no value on the way to the loss matches"):
        grad(chain(depth=2), "loss", checkpoint=["layer*"])
    with pytest.raises(GraphError, match="unknown value"):
        grad(chain(depth=2), "loss", checkpoint="sometimes")
