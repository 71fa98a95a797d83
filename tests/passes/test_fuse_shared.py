"""Fusion of elementwise values with several readers, all in one region."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace

ACTIVATIONS = {
    "silu": {},
    "swish": {"alpha": 1.5},
    "mish": {},
    "gelu": {"approximate": "tanh"},
    "erf": {},
    "softsign": {},
}


def fused(graph):
    return fuse_regions(graph, Trace())


def ops(graph):
    return [node.op for node in graph.nodes if not node.is_boundary]


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_the_derivative_of_an_activation_is_one_region(op):
    b = Builder("g")
    x, dy = b.input("x", "f32[n, 7]"), b.input("dy", "f32[n, 7]")
    loss = b.reduce_sum(b.mul(b.op(op, x, **ACTIVATIONS[op]), dy), axes=(0, 1), keepdims=False)
    graph = bw.grad(b.build(loss=loss), loss="loss", wrt=["x"])
    exe = bw.compile(graph, threads=1)
    assert not list(exe.engine.fallbacks)
    stage = exe.history.stages[-1].graph
    behind = ops(stage)[ops(stage).index("reduce_sum") + 1 :]
    assert [op for op in behind if op not in ("reshape", "expand")] == ["fused"]
    feeds = {
        name: np.random.default_rng(0).normal(size=(5, 7)).astype("f4") for name in ("x", "dy")
    }
    want = run(graph, feeds)["grad.x"]
    np.testing.assert_allclose(exe.run(feeds)["grad.x"], want, rtol=1e-5, atol=1e-6)


def test_a_value_with_a_reader_outside_stays_outside():
    b = Builder("g")
    x = b.input("x", "f32[5]")
    gate = b.sigmoid(x)
    y = b.mul(gate, b.sub(1.0, gate))
    graph = fused(b.build(y=y, gate=gate))
    assert ops(graph) == ["sigmoid", "fused"]


def test_a_broadcast_value_stays_outside():
    b = Builder("g")
    gate = b.sigmoid(b.input("x", "f32[7]"))
    y = b.add(b.mul(b.input("z", "f32[5, 7]"), gate), gate)
    assert ops(fused(b.build(y=y))) == ["sigmoid", "fused"]


def test_shared_values_at_the_epilogue_of_a_product():
    b = Builder("g")
    x, w = b.input("x", "f32[5, 6]"), b.constant(np.ones((6, 7), np.float32))
    gate = b.sigmoid(b.input("z", "f32[5, 7]"))
    rest = b.mul(gate, b.sub(1.0, gate))
    graph = b.build(y=b.add(b.matmul(x, w), rest))
    assert ops(fused(graph)) == ["fused"]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(5, 6)).astype("f4"), "z": rng.normal(size=(5, 7)).astype("f4")}
    found = bw.compile(graph, threads=1).run(feeds)["y"]
    np.testing.assert_allclose(found, run(graph, feeds)["y"], rtol=1e-5, atol=1e-6)
