"""AArch64 products in an emulator, if there is one, bit-exact with numpy."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from run_aarch64 import EMULATOR, emulate
from run_kernel import lower

from bitwright.backends.cpu.codegen import jit
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite import Trace
from bitwright.target import named

needs_emulator = pytest.mark.skipif(EMULATOR is None, reason="qemu-aarch64 is not installed")


def target_of(name):
    """AArch64 with 8-bit dot products of equal signs, of mixed signs, or without any."""
    base = named("aarch64")
    features = base.features | {"i8mm"} if name == "i8mm" else base.features
    features = features - {"dotprod"} if name == "neon" else features
    text = ",".join(f"+{feature}" for feature in sorted(features))
    return replace(base, features=features, llvm_features=text)


INSTRUCTIONS = {"dotprod": "sdot", "i8mm": "usdot", "neon": "mla"}


def layer(kind, depth=37, columns=29):
    rng, b = np.random.default_rng(1), Builder("layer")
    w = rng.integers(-128, 128, (depth, columns)).astype(np.int8)
    zero, bias = np.array(3, kind), rng.integers(-999, 999, columns).astype(np.int32)
    x = b.input("x", f"{'u8' if kind is np.uint8 else 'i8'}[n, {depth}]")
    total = b.integer_matmul(x, b.constant(w), b.constant(zero), None, b.constant(bias))
    factor = rng.uniform(1e-3, 1e-2, columns).astype(np.float32)
    y = b.requantize(b.mul(b.cast(total, to="f32"), b.constant(factor)), np.uint8(99), to="u8")
    return fuse_regions(b.build(y=y), Trace()), (w, bias, factor)


@pytest.mark.parametrize("features", INSTRUCTIONS)
def test_instructions(features):
    target = target_of(features)
    ctx = lower(layer(np.uint8)[0], target)
    (kernel,) = ctx.kernels.values()
    assert INSTRUCTIONS[features] in jit.assembly(ctx.text(kernel), target)


@needs_emulator
@pytest.mark.parametrize("features", INSTRUCTIONS)
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_products_of_quantized_values(features, kind, tmp_path):
    graph, (w, bias, factor) = layer(kind)
    info = np.iinfo(kind)
    x = np.random.default_rng(2).integers(info.min, info.max, (13, 37), endpoint=True).astype(kind)
    sums = (x.astype(np.int64) - 3) @ w.astype(np.int64) + bias
    real = sums.astype(np.float32) * factor
    expected = np.clip(np.rint(real.astype(np.float64)) + 99, 0, 255)
    for threads in (1, 3):
        found = emulate(graph, {"x": x}, target_of(features), threads, tmp_path)
        np.testing.assert_array_equal(found, expected)


@needs_emulator
@pytest.mark.parametrize("rows", [1, 11])
def test_quantized_weights(rows, tmp_path):
    rng, b = np.random.default_rng(3), Builder("layer")
    q = rng.integers(-8, 8, (21, 70)).astype(np.int8)
    scale = rng.uniform(0.1, 1, (21, 3)).astype(np.float32)
    x = b.input("x", "f32[n, 70]")
    qvalues = b.constant(q.astype(ml_dtypes.int4))
    graph = b.build(y=b.dequant_matmul(x, qvalues, b.constant(scale), block=32))
    feeds = {"x": rng.normal(size=(rows, 70)).astype(np.float32)}
    found = emulate(graph, feeds, named("aarch64"), 2, tmp_path)
    w = (q * np.repeat(scale.astype(np.float64), 32, axis=1)[:, :70]).T
    expected = feeds["x"].astype(np.float64) @ w
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
