"""Sums of products treat subnormal numbers as zeros, and restore the caller's setting."""

import numpy as np
import pytest
from emitted import Compiled, instructions
from run_kernel import TARGETS, Run, run_op

from bitwright.backends.cpu.codegen.emit import Module, Signature, f32
from bitwright.ops.core.builder import Builder
from bitwright.passes.manager import run_passes
from bitwright.pipeline import CPU, INFERENCE
from bitwright.target import host, named

TINY = np.float32(1e-40)
pytestmark = pytest.mark.skipif(
    host().architecture not in ("x86_64", "aarch64"), reason="this processor has no switch"
)


def doubled(target):
    """y = 2 x, one number per iteration."""
    module = Module(target)
    with (
        module.kernel("kernel", Signature(("x", "y"), ("count",))) as f,
        f.subnormals_as_zeros(),
        f.loop(0, f.args.size("count")) as loop,
    ):
        f.store(f.load(f32, f.args.pointer("x"), loop.index) * 2.0, f.args.pointer("y"), loop.index)
    return module


def caller_keeps_subnormals():
    return np.multiply(np.full(40, TINY), np.float32(0.5)).all()


@pytest.mark.parametrize("target", TARGETS)
def test_subnormals_are_flushed_inside_and_kept_outside(target):
    x = np.array([TINY, -TINY, 1e-38, 0.75e-38, 1, np.inf, np.nan], np.float32)
    y = np.empty_like(x)
    Compiled(doubled(named(target)))(x=x, y=y, count=x.size)
    smallest = np.finfo(np.float32).tiny
    np.testing.assert_array_equal(y, np.where(np.abs(x) < smallest, 0, 2 * x))
    assert caller_keeps_subnormals()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("groups", [1, 8])
def test_convolutions(target, groups):
    w = np.full((8, 8 // groups, 3, 3), TINY)
    w[:, :, 1, 1] = 1
    b = Builder("conv")
    image = b.input("x", "f32[1, 8, 5, 5]")
    graph = b.build(y=b.conv(image, b.constant(w), None, groups=groups, pads=[1, 1, 1, 1]))
    x = np.where(np.arange(200) % 3 == 0, TINY, np.float32(1)).reshape(1, 8, 5, 5)
    kept = np.where(x < 1, 0, x)
    expected = kept if groups == 8 else np.broadcast_to(kept.sum(1, keepdims=True), x.shape)
    np.testing.assert_array_equal(Run(graph, {"x": x}, named(target)).outputs["y"], expected)
    assert caller_keeps_subnormals()


@pytest.mark.parametrize("constant", [(), (1,)])
def test_products(constant):
    a, w = np.full((5, 7), TINY), np.ones((7, 9), np.float32)
    assert not run_op("matmul", a, w, constants=constant).any()
    assert caller_keeps_subnormals()


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("groups", [1, 8])
def test_scaled_results_of_int8_products(conv, groups):
    """A layer whose scales became subnormal is not slower than others."""
    b = Builder("int8")
    factor = np.full((8, 1, 1) if conv else 8, TINY)
    if conv:
        x, w = b.input("x", "u8[1, 8, 5, 5]"), np.ones((8, 8 // groups, 3, 3), np.int8)
        y = b.op("integer_conv", x, b.constant(w), groups=groups, pads=[1, 1, 1, 1])
    else:
        x, w = b.input("x", "u8[5, 8]"), np.ones((8, 8), np.int8)
        y = b.op("integer_matmul", x, b.constant(w))
    graph = b.build(y=b.gelu(b.mul(b.cast(y, to="f32"), b.constant(factor))))
    fused = run_passes(graph, (*INFERENCE, *CPU))
    feeds = {"x": np.full([int(s) for s in x.shape], 3, np.uint8)}
    assert not Run(fused, feeds).outputs["y"].any()
    assert caller_keeps_subnormals()


def test_elementwise_kernels_keep_subnormals():
    x = np.full(33, TINY)
    np.testing.assert_array_equal(run_op("mul", x, np.full(33, np.float32(0.5))), x / 2)


def test_other_architectures():
    settings = [line for line in instructions(doubled(named("aarch64"))) if "FPCR" in line.upper()]
    assert len(settings) == 3
    assert instructions(doubled(named("riscv64"))) and instructions(doubled(named("wasm32")))
