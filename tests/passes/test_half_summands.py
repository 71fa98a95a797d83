"""Sums of two products before a requantization read f16; reductions of halves give f32."""

import numpy as np

from bitwright.ir.dtype import bf16, f16, f32
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import History, run_passes
from bitwright.passes.precision.half_residuals import half_residuals
from bitwright.passes.precision.half_summands import half_summands
from bitwright.passes.precision.policy import policy as read_policy
from bitwright.passes.simplify.widen_reductions import widen_reductions
from bitwright.rewrite.trace import Trace

RNG = np.random.default_rng(0)


def summands(with_reader):
    b = Builder("sums")
    x, w = b.input("x", "i8[6, 8]"), RNG.integers(-127, 128, (2, 8, 4), np.int8)
    a, c = (b.mul(b.cast(b.integer_matmul(x, one), to="f32"), np.float32(0.003)) for one in w)
    y = b.requantize(b.relu(b.add(a, c)), np.int8(-128), to="i8")
    return b.build(y=y, a=a) if with_reader else b.build(y=y)


def test_both_products_are_rounded_to_f16():
    graph = summands(False)
    found = half_summands(graph, Trace(), bf16)
    assert sum(node.op == "cast" and node.attrs["to"] == f16 for node in found.nodes) == 2
    feeds = {"x": RNG.integers(-128, 128, (6, 8)).astype(np.int8)}
    one, two = (run(g, feeds)["y"].astype(int) for g in (graph, found))
    assert np.abs(one - two).max() <= 1
    assert half_summands(found, Trace(), bf16) is found


def stored(to="i8", between=None, policy="mixed_bf16"):
    """The types that the summands of a requantized sum are stored in."""
    b = Builder("sums")
    x, w = b.input("x", "i8[6, 8]"), RNG.integers(-127, 128, (2, 8, 4), np.int8)
    a, c = (b.mul(b.cast(b.integer_matmul(x, one), to="f32"), np.float32(0.003)) for one in w)
    y = b.add(a, c) if between is None else between(b, b.add(a, c))
    graph = half_summands(b.build(y=b.requantize(y, to=to)), Trace(), bf16, read_policy(policy))
    return {node.attrs["to"] for node in graph.nodes if node.op == "cast"} & {f16, bf16}


def test_f16_is_only_for_sums_in_the_unit_of_eight_bits():
    assert stored() == {f16} and stored(between=lambda b, y: b.clip(y, np.float32(0))) == {f16}
    assert stored(between=lambda b, y: b.mul(b.gelu(y), np.float32(3))) == {bf16}
    assert stored("i16") == set()


def test_what_a_pattern_keeps_in_f32_stays():
    assert stored(policy="mixed_bf16:op:add=f32") == set()
    b = Builder("block")
    x, w = b.input("x", "i8[6, 8]"), RNG.integers(-127, 128, (8, 4), np.int8)
    v = b.relu(b.mul(b.cast(b.integer_matmul(x, w), to="f32"), np.float32(0.003)))
    q = b.requantize(b.mul(v, np.float32(4)), np.int8(-128), to="i8")
    graph = b.build(q=q, y=b.mul(v, np.float32(2)))
    assert half_residuals(graph, Trace(), f16, read_policy("mixed:op:relu=f32")) == graph


def test_products_with_other_readers_stay():
    graph = summands(True)
    assert half_summands(graph, Trace(), bf16) is graph


def test_residuals_are_read_in_half_and_requantized_from_f32():
    b = Builder("block")
    x, w = b.input("x", "i8[6, 8]"), RNG.integers(-127, 128, (8, 4), np.int8)
    v = b.relu(b.mul(b.cast(b.integer_matmul(x, w), to="f32"), np.float32(0.003)))
    q = b.requantize(b.mul(v, np.float32(4)), np.int8(-128), to="i8")
    graph = b.build(q=q, y=b.mul(v, np.float32(2)))
    found = half_residuals(graph, Trace(), f16)
    feeds = {"x": RNG.integers(-128, 128, (6, 8)).astype(np.int8)}
    one, two = (run(g, feeds) for g in (graph, found))
    np.testing.assert_array_equal(one["q"], two["q"])
    np.testing.assert_allclose(one["y"], two["y"], rtol=1e-3)
    assert sum(node.op == "cast" and node.attrs["to"] == f16 for node in found.nodes) == 1


def test_means_of_halves_are_widened():
    b = Builder("mean")
    x = b.input("x", "bf16[3, 4, 8]")
    graph = b.build(y=b.cast(b.reduce_mean(x, axes=[1], keepdims=False), to="f32"))
    found = run_passes(graph, [widen_reductions], History())
    (mean,) = (node for node in found.nodes if node.op == "reduce_mean")
    assert mean.types[0].dtype == f32 and mean.inputs[0].node.inputs[0].dtype == bf16
