"""Transposed convolutions against the interpreter: phases, edges, groups, epilogues."""

import numpy as np
import pytest
from run_kernel import TARGETS, THREADS, Run

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.manager import run_passes
from bitwright.passes.simplify.separate_bias import separate_bias
from bitwright.target import named

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def transposed(x, w, bias=None, sizes=None, **attrs):
    b = Builder("transposed")
    shape = ", ".join(map(str, sizes or x.shape[1:]))
    image = b.input("x", f"f32[n, {shape}]")
    return b, b.conv_transpose(image, b.constant(w), bias and b.constant(bias), **attrs)


def check(graph, feeds, target="host", threads=1):
    fused = run_passes(graph, [separate_bias, fuse_regions])
    done = Run(fused, feeds, named(target), threads)
    for name, expected in run(graph, feeds).items():
        scale = np.abs(expected).max(initial=1e-30)
        np.testing.assert_allclose(done.outputs[name], expected, rtol=1e-5, atol=2e-5 * scale)
    return [step.kernel.rsplit("_", 1)[0] for step in done.schedule.steps]


PHASES = [
    ((1, 3, 5, 7), (3, 6, 2, 2), {"strides": [2, 2]}),
    ((2, 5, 4, 6), (5, 17, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    (
        (1, 4, 5, 5),
        (4, 3, 3, 3),
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
    ),
    ((1, 4, 5, 6), (4, 3, 5, 3), {"strides": [3, 2], "pads": [0, 2, 1, 0]}),
    ((1, 4, 6, 5), (4, 9, 3, 3), {}),
    ((1, 4, 1, 1), (4, 2, 3, 3), {"strides": [2, 2]}),
    *[
        ((n, 8, h, w), (8, m, 3, 3), {"strides": [2, 2], "groups": groups})
        for n, h, w in [(2, 1, 1), (3, 1, 2), (3, 2, 1)]
        for m, groups in [(8, 1), (4, 2), (1, 8)]
    ],
    ((2, 8, 1), (8, 8, 2), {"strides": [2]}),
    ((5, 3, 1), (3, 2, 4), {"strides": [3], "pads": [1, 1]}),
    ((1, 2, 4, 4), (2, 3, 2, 2), {"strides": [2, 2], "pads": [2, 3, 3, 2]}),
    ((1, 8, 5, 4), (8, 3, 4, 4), {"strides": [2, 2], "groups": 4, "pads": [1, 1, 1, 1]}),
    ((1, 19, 5, 4), (19, 1, 4, 4), {"strides": [2, 2], "groups": 19, "pads": [1, 1, 1, 1]}),
    ((2, 6, 9), (6, 5, 4), {"strides": [2], "pads": [1, 1]}),
    ((1, 4, 5, 5), (4, 3, 1, 1), {"strides": [2, 2]}),
]
OTHERS = [
    ((1, 4, 5, 5), (4, 3, 3, 3), {"strides": [2, 2], "dilations": [2, 2]}),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape, filter_shape, attrs", PHASES)
def test_phases(shape, filter_shape, attrs, target):
    x = normal(*shape)
    b, y = transposed(x, normal(*filter_shape), **attrs)
    assert "batched_matmul_f32" not in check(b.build(y=y), {"x": x}, target)


@pytest.mark.parametrize("shape, filter_shape, attrs", OTHERS)
def test_fallback_to_im2col(shape, filter_shape, attrs):
    x = normal(*shape)
    b, y = transposed(x, normal(*filter_shape), **attrs)
    assert "batched_matmul_f32" in check(b.build(y=y), {"x": x})


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("groups", [1, 24])
def test_epilogues_and_dynamic_sizes(threads, groups):
    x, w = normal(2, 24, 5, 7), normal(24, 24 // groups, 4, 4)
    attrs = {"strides": [2, 2], "pads": [1, 1, 1, 1], "groups": groups}
    b, y = transposed(x, w, sizes=(24, "h", "w"), **attrs)
    skip = b.input("skip", "f32[n, 24, 2*h, 2*w]")
    y = b.relu(b.add(b.mul(y, b.constant(normal(24, 1, 1))), skip))
    check(b.build(y=y), {"x": x, "skip": normal(2, 24, 10, 14)}, threads=threads)
