"""Elementwise ops move in front of the transpose of a product."""

import numpy as np

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.sink_transposes import sink_transposes

RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def transposed_product(b):
    x = b.input("x", "f32[2, 5, 7]")
    return b.transpose(b.matmul(x, b.constant(numbers(7, 3))), perm=(0, 2, 1))


def ops(graph):
    return [node.op for node in graph.nodes if not node.is_boundary]


def sunk(graph):
    result = run_passes(graph, [sink_transposes])
    feeds = {"x": numbers(2, 5, 7)}
    for name, expected in run(graph, feeds).items():
        np.testing.assert_array_equal(run(result, feeds)[name], expected)
    return result


def test_constants_are_transposed_back():
    b = Builder()
    y = b.mul(transposed_product(b), numbers(3, 1))
    y = b.clip(b.add(y, numbers(1, 3, 5)), np.float32(-0.5), np.float32(0.5))
    assert ops(sunk(b.build(y=y)))[-4:] == ["mul", "add", "clip", "transpose"]


def test_quantize_goes_before_the_transpose():
    b = Builder()
    y = b.quantize(b.relu(transposed_product(b)), np.float32(0.1), np.uint8(3), to="u8")
    assert ops(sunk(b.build(y=y)))[-3:] == ["relu", "quantize", "transpose"]


def test_a_per_channel_quantize_stays_behind():
    b = Builder()
    y = b.quantize(transposed_product(b), np.float32([0.1, 0.2, 0.3]), to="i8", axis=1)
    assert ops(sunk(b.build(y=y)))[-2:] == ["transpose", "quantize"]


def test_a_value_read_twice_stays():
    b = Builder()
    t = transposed_product(b)
    assert ops(sunk(b.build(y=b.relu(t), t=t)))[-2:] == ["transpose", "relu"]


def test_other_transposes_stay():
    b = Builder()
    t = b.transpose(b.input("x", "f32[2, 5, 7]"), perm=(0, 2, 1))
    assert ops(sunk(b.build(y=b.relu(t)))) == ["transpose", "relu"]


def test_both_operands_may_be_the_transposed_value():
    b = Builder()
    t = transposed_product(b)
    assert ops(sunk(b.build(y=b.mul(t, t))))[-2:] == ["mul", "transpose"]
