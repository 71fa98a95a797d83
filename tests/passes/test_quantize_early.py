"""Quantization moves to the kernel that makes a value."""

import numpy as np

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.quantize_early import quantize_early
from bitwright.passes.manager import History, run_passes

RNG = np.random.default_rng(0)


def early(graph):
    return run_passes(graph, [quantize_early], History())


def test_rows_of_halves_are_quantized_without_a_cast():
    b = Builder("g")
    x = b.input("x", "bf16[3, 8]")
    q, scale, _ = b.dynamic_quantize(b.cast(x, to="f32"), to="u8", per_token=True)
    found = early(b.build(q=q, scale=scale))
    assert [node.op for node in found.nodes] == ["input", "dynamic_quantize"]


def test_quantization_comes_before_movement_of_what_a_kernel_makes():
    b = Builder("g")
    x = b.input("x", "f32[2, 4, 6, 8]")
    y = b.reshape(b.transpose(b.softmax(x), perm=[0, 2, 1, 3]), shape=[2, 6, 32])
    q = b.cast(b.mul(y, np.float32(8)), to="f8e4m3fn")
    graph = b.build(q=q)
    found = early(graph)
    ops = [node.op for node in found.nodes if not node.is_boundary]
    assert ops == ["softmax", "mul", "cast", "transpose", "reshape"]
    feeds = {"x": RNG.normal(size=(2, 4, 6, 8)).astype(np.float32)}
    np.testing.assert_array_equal(run(graph, feeds)["q"], run(found, feeds)["q"])


def test_values_with_other_readers_or_scales_per_channel_stay():
    b = Builder("g")
    x = b.input("x", "f32[4, 8]")
    y = b.transpose(b.softmax(x), perm=[1, 0])
    scales = b.constant(RNG.random(4, np.float32))
    graph = b.build(q=b.cast(b.mul(y, scales), to="f8e4m3fn"), r=b.cast(y, to="f8e4m3fn"), y=y)
    assert early(graph) is graph
