"""A constant added to an integer product joins its i32 sum where that loses no precision."""

import numpy as np
import pytest

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE, compile_graph


def agrees(graph, feeds, rtol=1e-5):
    """Checks compiled results against the interpreter; returns the lowered graph."""
    (expected,) = run(graph, feeds).values()
    (found,) = compile_graph(graph, threads=2).run(feeds).values()
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-6)
    return run_passes(graph, (*INFERENCE, lower_integer))


def has_bias(graph):
    (product,) = [n for n in graph.nodes if n.op in ("integer_matmul", "integer_conv")]
    return len(product.inputs) > 4 and product.inputs[4] is not None


@pytest.mark.parametrize("channels, size", [(9, 3), (16, 4), (5, 4)])
def test_scales_per_window_are_not_taken_for_scales_per_channel(channels, size):
    rng = np.random.default_rng(channels)
    b = Builder()
    x = b.input("x", f"u8[1, {channels}, {size}, {size}]")
    real = b.dequantize(x, np.float32(0.03), np.uint8(120))
    pooled = b.avg_pool(real, kernel=(3, 3), pads=(1, 1, 1, 1), count_include_pad=False)
    by_channel = np.linspace(-1, 1, channels, dtype=np.float32).reshape(1, channels, 1, 1)
    feeds = {"x": rng.integers(0, 256, (1, channels, size, size)).astype(np.uint8)}
    agrees(b.build(y=b.add(pooled, by_channel)), feeds)


def product(depth, weight, scale, bias):
    """u8 times a constant or run-time matrix, plus a constant per column."""
    b = Builder()
    x = b.dequantize(b.input("x", f"u8[2, {depth}]"), np.float32(scale))
    w = b.input("w", f"i8[{depth}, 16]") if weight is None else np.full((depth, 16), weight, "i1")
    y = b.matmul(x, b.dequantize(w, np.float32(scale)))
    return b.build(y=b.add(y, np.broadcast_to(np.float32(bias), 16).copy()))


@pytest.mark.parametrize("weight", [127, None])
def test_a_bias_that_could_overflow_stays_outside(weight):
    depth = 60_000
    graph = product(depth, weight, 1e-3, 1000)
    feeds = {"x": np.full((2, depth), 255, np.uint8)}
    if weight is None:
        feeds["w"] = np.full((depth, 16), 127, np.int8)
    assert not has_bias(agrees(graph, feeds))


@pytest.mark.parametrize(
    "weight, bias, joins",
    [(100, 0.4, True), (None, 0.4, False), (None, 3.0, True), (1, 0.4, False)],
)
def test_a_bias_is_rounded_only_if_the_scale_is_fine(weight, bias, joins):
    graph = product(4, weight, 1, bias)
    feeds = {"x": np.zeros((2, 4), np.uint8)}
    if weight is None:
        feeds["w"] = np.zeros((4, 16), np.int8)
    lowered = run_passes(graph, (*INFERENCE, lower_integer))
    assert has_bias(lowered) == joins
    if weight != 100:
        agrees(graph, feeds)


def test_a_bias_of_nan_stays_nan():
    graph = product(4, 127, 0.01, np.nan)
    (found,) = compile_graph(graph).run({"x": np.ones((2, 4), np.uint8)}).values()
    assert np.isnan(found).all()
