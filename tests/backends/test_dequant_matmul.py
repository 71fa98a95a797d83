"""Matmuls with quantized weights against dequantized weights in f64, on every target and number of
threads: 2 to 8 bits, integers and floats, every type of scale, complete and incomplete blocks."""

import ml_dtypes
import numpy as np
import pytest
from run_kernel import TARGETS, Run, assert_near, assert_same, lower

from bitwright.backends.cpu.codegen import jit
from bitwright.ir.dtype import dtype
from bitwright.lir.buffer import Storage
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite import Trace
from bitwright.target import named

THREADS = [1, 2, 3, 7]
ROWS = [1, 2, 3, 5, 8, 9, 17, 140]


def qvalues_of(rng, kind, *shape):
    element = dtype(kind)
    if element.is_float:
        every = np.arange(1 << element.bits, dtype=np.uint8)
        finite = every[np.isfinite(every.view(element.numpy).astype(np.float32))]
        return rng.choice(finite, shape).view(element.numpy)
    low, high = int(element.min), int(element.max)
    return rng.integers(low, high, shape, np.int16, True).astype(element.numpy)


def repeat(parameter, block, depth):
    return np.repeat(parameter.astype(np.float64), block, axis=1)[:, :depth]


def dequantized(q, scale, zero, block):
    """w[k, n] in f64, without helpers of the compiler."""
    depth = q.shape[1]
    distance = q.astype(np.float64) - (0 if zero is None else repeat(zero, block, depth))
    return (distance * repeat(scale, block, depth)).T


def lowered(q, scale, zero, block, target, epilogue=False):
    b = Builder("layer")
    x = b.input("x", f"f32[n, {q.shape[1]}]")
    zero = None if zero is None else b.constant(zero)
    y = b.dequant_matmul(x, b.constant(q), b.constant(scale), zero, block=block)
    if epilogue:
        y = b.relu(b.add(y, b.constant(np.linspace(-1, 1, q.shape[0], dtype=np.float32))))
    graph = fuse_regions(b.build(y=y), Trace())
    return graph, lower(graph, named(target))


def check(q, scale, zero, block, target, rows=ROWS, epilogue=False):
    graph, ctx = lowered(q, scale, zero, block, target, epilogue)
    rng = np.random.default_rng(5)
    w = dequantized(q, scale, zero, block)
    for count in rows:
        x = rng.normal(size=(count, q.shape[1])).astype(np.float32)
        expected = x.astype(np.float64) @ w
        if epilogue:
            expected = np.maximum(expected + np.linspace(-1, 1, q.shape[0]), 0)
        found = [
            Run(graph, {"x": x}, named(target), threads, ctx=ctx).outputs["y"]
            for threads in THREADS
        ]
        assert_near(found[0], expected.astype(np.float32))
        for other in found[1:]:
            assert_same(other, found[0])
    return ctx


SCALES = {"f32": np.float32, "f16": np.float16, "e8m0": None}
FORMS = {
    # weights, scales, zero points, terms, columns, block
    "i4": ("i4", "f32", None, 70, 83, 32),
    "u4 with zero points": ("u4", "f16", "u4", 64, 33, 16),
    "u4 with real zero points": ("u4", "f32", "f32", 40, 17, 16),
    "i8 per column": ("i8", "f32", None, 600, 49, 600),
    "u8 with zero points": ("u8", "f32", "u8", 57, 20, 57),
    "i2": ("i2", "f32", None, 67, 7, 16),
    "f4": ("f4e2m1", "e8m0", None, 96, 50, 32),
    "f8 with four bits of exponent": ("f8e4m3fn", "e8m0", None, 64, 33, 32),
    "f8 with five": ("f8e5m2", "f32", None, 33, 19, 64),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_products(target, form):
    kind, scales, zeros, depth, columns, block = FORMS[form]
    rng = np.random.default_rng(1)
    q = qvalues_of(rng, kind, columns, depth)
    shape = columns, -(-depth // block)
    scale = 2.0 ** rng.integers(-4, 4, shape) if scales == "e8m0" else rng.uniform(0.1, 1, shape)
    scale = scale.astype(SCALES[scales] or ml_dtypes.float8_e8m0fnu)
    zero = None
    if zeros == "f32":
        zero = rng.uniform(0, 15, shape).astype(np.float32)
    elif zeros:
        zero = qvalues_of(rng, zeros, *shape)
    check(q, scale, zero, block, target, epilogue=form == "i4")


@pytest.mark.parametrize("kind", ["i4", "i8"])
def test_long_columns_take_several_segments(kind):
    rng = np.random.default_rng(2)
    q = qvalues_of(rng, kind, 50, 3000)
    scale = rng.uniform(0.1, 1, (50, -(-3000 // 1000))).astype(np.float32)
    check(q, scale, None, 1000, "host", rows=[1, 4, 9, 200])


def test_no_rows_no_terms_no_columns():
    empty = np.zeros((5, 0), ml_dtypes.int4)
    check(empty, np.zeros((5, 0), np.float32), None, 32, "host", rows=[0, 1, 20])
    check(np.zeros((0, 8), np.int8), np.zeros((0, 1), np.float32), None, 8, "host", rows=[1, 20])


@pytest.mark.parametrize(
    "kind, block, value",
    [("i4", 5, 1), ("i8", 7, 1), ("f8e4m3fn", 8, np.nan), ("f8e5m2", 8, np.inf)],
)
def test_unsupported_weights_become_f32(kind, block, value):
    rng = np.random.default_rng(3)
    q = qvalues_of(rng, kind, 6, 24)
    q[2, 3] = value
    scale = rng.uniform(0.1, 1, (6, -(-24 // block))).astype(np.float32)
    graph, ctx = lowered(q, scale, None, block, "host")
    assert all(name.startswith("matmul_f32") for name in ctx.kernels)
    x = rng.normal(size=(2, 24)).astype(np.float32)
    found = Run(graph, {"x": x}, ctx=ctx).outputs["y"]
    assert_near(
        found, (x.astype(np.float64) @ dequantized(q, scale, None, block)).astype(np.float32)
    )


def held(ctx):
    constants = (b for b in ctx.schedule.buffers if b.storage is Storage.CONSTANT)
    return sum(buffer.array.nbytes for buffer in constants)


def test_weights_are_stored_in_their_bits():
    q, scale = np.zeros((96, 256), ml_dtypes.int4), np.full((96, 8), 0.3, np.float32)
    assert held(lowered(q, scale, None, 32, "host")[1]) == 96 * 256 // 2 + 96 * 8 * 4
    half, powers = scale.astype(np.float16), np.full((96, 8), 0.25, np.float32)
    assert held(lowered(q, half, None, 32, "avx2")[1]) == 96 * 256 // 2 + 96 * 8 * 2
    assert held(lowered(q, powers, None, 32, "avx2")[1]) == 96 * 256 // 2 + 96 * 8


def test_4_bit_weights_use_lookups_where_the_target_has_them():
    q, scale = np.ones((96, 256), ml_dtypes.float4_e2m1fn), np.full((96, 8), 0.3, np.float32)
    ctx = lowered(q, scale, None, 32, "avx512")[1]
    (kernel,) = ctx.kernels.values()
    assert jit.assembly(ctx.text(kernel), named("avx512")).count("vperm") >= 24
