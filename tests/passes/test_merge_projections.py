"""Matmuls of one input become one matmul, unless they would lose an epilogue."""

from collections import Counter

import numpy as np
import pytest

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.merge_projections import merge_projections
from bitwright.passes.manager import History, run_passes

rng = np.random.default_rng(0)


def weight(*shape):
    return rng.normal(size=shape).astype(np.float32)


def merged(graph):
    history = History()
    return run_passes(graph, [merge_projections], history), history.trace


def test_three_projections_become_one_and_keep_their_names():
    b = Builder("qkv")
    x = b.input("x", "f32[n, t, 8]")
    parts = []
    for name, width, bias in (("q", 8, True), ("k", 4, False), ("v", 6, True)):
        y = b.matmul(x, b.constant(weight(8, width)))
        parts.append(b.add(y, b.constant(weight(width)), name=name) if bias else y)
    graph = b.build(*(b.transpose(p, perm=[1, 0, 2]) for p in parts))
    found, _ = merged(graph)
    counts = Counter(node.op for node in found.nodes)
    assert (counts["matmul"], counts["add"], counts["split"]) == (1, 1, 1)
    assert {"q", "v"} <= set(found.values)
    feeds = {"x": weight(2, 3, 8)}
    for one, other in zip(run(graph, feeds).values(), run(found, feeds).values(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


@pytest.mark.parametrize("has_zero", [False, True])
def test_quantized_weights_are_concatenated(has_zero):
    b = Builder("qkv")
    qvalues, scale, zero = b.dynamic_quantize(b.input("x", "f32[n, t, 8]"), to="u8", per_token=True)
    x = b.dequantize(qvalues, scale, zero, axis=-1, block=8)
    parts = []
    for width in (8, 4, 6):
        w = b.constant(rng.integers(-127, 127, (8, width)).astype(np.int8))
        parameters = [b.constant(rng.uniform(0.1, 1, width).astype(np.float32))]
        if has_zero:
            parameters.append(b.constant(rng.integers(-9, 9, width).astype(np.int8)))
        parts.append(b.matmul(x, b.dequantize(w, *parameters, axis=1)))
    graph = b.build(*(b.transpose(p, perm=[1, 0, 2]) for p in parts))
    found, _ = merged(graph)
    assert Counter(node.op for node in found.nodes)["matmul"] == 1
    feeds = {"x": weight(2, 3, 8)}
    for one, other in zip(run(graph, feeds).values(), run(found, feeds).values(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)


def test_a_product_that_is_quantized_stays():
    b = Builder("quantized")
    x = b.input("x", "f32[n, 8]")
    products = [b.matmul(x, b.constant(weight(8, 8))) for _ in range(2)]
    graph = b.build(*(b.quantize(y, b.constant(np.float32(0.1)), to="i8") for y in products))
    assert merged(graph)[0] is graph


def test_a_product_with_an_activation_stays():
    b = Builder("gate")
    x = b.input("x", "f32[n, 8]")
    gate, up = (b.matmul(x, b.constant(weight(8, 8))) for _ in range(2))
    found, trace = merged(b.build(b.mul(b.silu(gate), up)))
    assert Counter(node.op for node in found.nodes)["matmul"] == 2
    assert "activation" in trace.events[0].reason


def test_one_product_is_left_alone():
    b = Builder("one")
    x = b.input("x", "f32[n, 8]")
    graph = b.build(b.reshape(b.matmul(x, b.constant(weight(8, 8))), shape=(x.shape[0], 2, 4)))
    assert merged(graph)[0] is graph


def test_a_product_that_is_a_result_keeps_its_bias_apart():
    b = Builder("both")
    x = b.input("x", "f32[n, 8]")
    product = b.matmul(x, b.constant(weight(8, 4)), name="product")
    summed = b.add(product, b.constant(weight(4)), name="sum")
    graph = b.build(product, summed, b.matmul(x, b.constant(weight(8, 3)), name="other"))
    found, _ = merged(graph)
    feeds = {"x": weight(5, 8)}
    for one, other in zip(run(graph, feeds).values(), run(found, feeds).values(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)
