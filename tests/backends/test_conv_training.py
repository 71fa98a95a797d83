"""Kernels of convolutions in training: weights known at run time, gradients of input and weight."""

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


def check(graph, feeds, target="host", threads=1, tolerance=2e-5, families=None):
    fused = run_passes(graph, [separate_bias, fuse_regions])
    done = Run(fused, feeds, named(target), threads, host=False)
    for name, expected in run(graph, feeds).items():
        scale = np.abs(expected).max(initial=1e-30)
        np.testing.assert_allclose(
            done.outputs[name], expected, rtol=tolerance, atol=tolerance * scale
        )
    if families is not None:
        found = {kernel.rsplit("_", 1)[0] for kernel in done.kernels}
        assert families <= found, found
    return done


GEOMETRY = [
    ((1, 3, 7, 9), (5, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 4, 8, 8), (17, 4, 1, 1), {}),
    ((1, 16, 5, 5), (33, 16, 1, 1), {"strides": [2, 2]}),
    ((2, 16, 8, 8), (20, 16, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 16, 9, 9), (16, 16, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((3, 17, 8, 8), (16, 17, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 32, 12, 12), (32, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 2, 9, 12), (3, 2, 3, 2), {"strides": [2, 3], "pads": [0, 1, 2, 0]}),
    ((1, 5, 11, 9), (4, 5, 3, 3), {"dilations": [2, 2], "pads": [2, 2, 2, 2]}),
    ((1, 5, 11, 9), (4, 5, 3, 3), {"dilations": [2, 3], "strides": [2, 2], "pads": [2, 2, 2, 2]}),
    ((1, 1, 6, 6), (2, 1, 5, 5), {"pads": [2, 2, 2, 2]}),
    ((2, 3, 5, 5), (4, 3, 2, 2), {"pads": [3, 2, 1, 4]}),
    ((3, 6, 5), (4, 6, 3), {"pads": [1, 1]}),
    ((1, 6, 8), (4, 6, 3), {"strides": [4]}),
    ((1, 8, 6, 6), (12, 2, 3, 3), {"groups": 4, "pads": [1, 1, 1, 1]}),
    ((1, 8, 6, 6), (12, 2, 3, 3), {"groups": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 7, 6, 5), (7, 1, 3, 3), {"groups": 7, "pads": [1, 1, 1, 1]}),
    ((2, 33, 9, 9), (33, 1, 3, 3), {"groups": 33, "strides": [2, 2], "pads": [0, 1, 1, 0]}),
    ((1, 6, 5, 5), (12, 1, 3, 3), {"groups": 6, "pads": [1, 1, 1, 1]}),
    ((1, 1, 1, 1), (1, 1, 1, 1), {}),
    ((1, 1, 1, 1), (1, 1, 3, 3), {"pads": [1, 1, 1, 1]}),
]


def image(b, x):
    return b.input("x", f"f32[n, {', '.join(map(str, x.shape[1:]))}]")


def windows(b, x, w, attrs):
    """The gradient of a result of the convolution, as an input of the graph."""
    probe = Builder("probe")
    y = probe.conv(probe.constant(x), probe.constant(w), **attrs)
    return normal(*y.shape)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("x_shape, w_shape, attrs", GEOMETRY)
def test_conv_with_weights_known_at_run_time(x_shape, w_shape, attrs, target):
    x, w = normal(*x_shape), normal(*w_shape)
    b = Builder("conv")
    y = b.conv(image(b, x), b.input("w", f"f32{list(w.shape)}"), **attrs)
    check(b.build(y=y), {"x": x, "w": w}, target)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("groups", [1, 24])
def test_epilogues_of_run_time_convolutions(threads, groups):
    x, w = normal(2, 24, 9, 7), normal(24, 24 // groups, 3, 3)
    b = Builder("conv")
    weight, other = b.input("w", f"f32{list(w.shape)}"), b.input("z", "f32[n, 24, 9, 7]")
    y = b.conv(image(b, x), weight, groups=groups, pads=[1, 1, 1, 1])
    y = b.relu(b.add(y, other))
    check(b.build(y=y), {"x": x, "w": w, "z": normal(2, 24, 9, 7)}, threads=threads)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("x_shape, w_shape, attrs", GEOMETRY)
def test_input_gradient(x_shape, w_shape, attrs, target):
    x, w = normal(*x_shape), normal(*w_shape)
    dy = windows(b := Builder("dx"), x, w, attrs)
    shape = ", ".join(map(str, dy.shape[1:]))
    given = b.input("dy", f"f32[n, {shape}]")
    n = given.shape[0]
    dx = b.conv_backward_input(
        given, b.input("w", f"f32{list(w.shape)}"), shape=(n, *x_shape[1:]), **attrs
    )
    check(b.build(dx=dx), {"dy": dy, "w": w}, target)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_epilogues_of_input_gradients(threads, strides):
    """The gradient of a residual connection and the mask of relu."""
    x, w = normal(2, 16, 9, 8), normal(24, 16, 3, 3)
    attrs = {"strides": strides, "pads": [1, 1, 1, 1]}
    dy = windows(b := Builder("dx"), x, w, attrs)
    given, weight = b.input("dy", f"f32{list(dy.shape)}"), b.input("w", f"f32{list(w.shape)}")
    other, mask = (b.input(name, f"f32{list(x.shape)}") for name in ("z", "x"))
    dx = b.add(b.conv_backward_input(given, weight, shape=x.shape, **attrs), other)
    dx = b.where(b.gt(mask, 0.0), dx, 0.0)
    feeds = {"dy": dy, "w": w, "z": normal(*x.shape), "x": x}
    done = check(b.build(dx=dx), feeds, threads=threads)
    assert all("where" not in kernel for kernel in done.kernels)


def weight_gradient(x, w, attrs, element="f32"):
    dy = windows(b := Builder("dw"), x, w, attrs)
    given = [
        b.input(name, f"{element}[n, {', '.join(map(str, array.shape[1:]))}]")
        for name, array in (("dy", dy), ("x", x))
    ]
    dw = b.conv_backward_weight(*given, shape=w.shape, **attrs)
    return b.build(dw=dw), {"dy": dy, "x": x}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("x_shape, w_shape, attrs", GEOMETRY)
def test_weight_gradient(x_shape, w_shape, attrs, target):
    graph, feeds = weight_gradient(normal(*x_shape), normal(*w_shape), attrs)
    check(graph, feeds, target)


@pytest.mark.parametrize("images", [1, 5, 33])
def test_weight_gradient_does_not_depend_on_threads(images):
    attrs = {"pads": [1, 1, 1, 1]}
    graph, feeds = weight_gradient(normal(images, 20, 6, 5), normal(33, 20, 3, 3), attrs)
    found = [check(graph, feeds, threads=n).outputs["dw"] for n in (1, 2, 3, 7)]
    assert all((other == found[0]).all() for other in found)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_weight_gradient_of_half_floats(element, target):
    from bitwright.ir import dtype

    attrs = {"pads": [1, 1, 1, 1]}
    graph, feeds = weight_gradient(normal(3, 20, 6, 5), normal(18, 20, 3, 3), attrs, element)
    feeds = {name: array.astype(dtype(element).numpy) for name, array in feeds.items()}
    done = Run(graph, feeds, named(target), 2, host=False)
    expected = run(graph, feeds)["dw"].astype(np.float32)
    found = done.outputs["dw"].astype(np.float32)
    assert np.abs(found - expected).max() <= 8e-3 * np.abs(expected).max()
