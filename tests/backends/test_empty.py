"""Products and convolutions of which a size is 0: no rows, no depth, no columns, no channels."""

import itertools

import numpy as np
import pytest
from run_kernel import TARGETS

from bitwright.backends.cpu.backend import CpuBackend
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.manager import run_passes
from bitwright.pipeline import CPU, INFERENCE
from bitwright.target import named

rng = np.random.default_rng(0)
SIZES = [sizes for sizes in itertools.product((0, 3), repeat=3) if 0 in sizes]
KINDS = {"f32": np.float32, "f16": np.float16, "u8": np.uint8, "i8": np.int8}


def numbers(kind, *shape):
    return rng.integers(0, 9, shape).astype(KINDS[kind])


def check(b, y, feeds, target):
    graph = b.build(y=y)
    expected = run(graph, feeds)["y"]
    program = CpuBackend(named(target)).compile(run_passes(run_passes(graph, INFERENCE), CPU), 2)
    for _ in range(2):
        found = program.run(feeds)["y"]
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, depth, columns", SIZES)
def test_products(rows, depth, columns, kind, is_constant, target):
    b = Builder("product")
    feeds = {"x": numbers(kind, rows, depth)}
    x = b.input("x", f"{kind}[n, {depth}]")
    w = numbers("i8" if kind == "u8" else kind, depth, columns)
    if is_constant:
        other = b.constant(w)
    else:
        other, feeds["w"] = b.input("w", f"{'i8' if kind == 'u8' else kind}[{depth}, m]"), w
    if kind in ("u8", "i8"):
        y = b.integer_matmul(x, other, b.constant(KINDS[kind](3)))
    else:
        y = b.relu(b.add(b.matmul(x, other), b.constant(numbers(kind, 1))))
    check(b, y, feeds, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", ["i4", "i8"])
@pytest.mark.parametrize("rows, depth, columns", SIZES)
def test_products_with_weights_of_few_bits(rows, depth, columns, bits, target):
    b = Builder("weights")
    x = b.input("x", f"f32[n, {depth}]")
    w = b.cast(b.constant(numbers("i8", depth, columns) - 4), to=bits)
    scale = b.constant(np.full(columns, 0.5, np.float32))
    y = b.matmul(x, b.dequantize(w, scale, axis=1))
    check(b, y, {"x": numbers("f32", rows, depth)}, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["f32", "u8"])
@pytest.mark.parametrize("batch, channels, filters", SIZES)
@pytest.mark.parametrize("taps", [1, 3])
def test_convolutions(batch, channels, filters, taps, kind, target):
    b = Builder("conv")
    x = b.input("x", f"{kind}[n, {channels}, 5, 5]")
    feeds = {"x": numbers(kind, batch, channels, 5, 5)}
    w = numbers("i8" if kind == "u8" else kind, filters, channels, taps, taps)
    y = b.integer_conv(x, b.constant(w)) if kind == "u8" else b.conv(x, b.constant(w))
    check(b, y, feeds, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("batch, channels, filters", SIZES)
def test_transposed_convolutions(batch, channels, filters, target):
    b = Builder("transposed")
    x = b.input("x", f"f32[n, {channels}, 2, 2]")
    w = b.constant(numbers("f32", channels, filters, 3, 3))
    y = b.conv_transpose(x, w, strides=[2, 2])
    check(b, y, {"x": numbers("f32", batch, channels, 2, 2)}, target)
