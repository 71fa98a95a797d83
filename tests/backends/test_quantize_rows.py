"""Dynamic quantization of rows: bit for bit, on every instruction set."""

import numpy as np
import pytest
from run_kernel import TARGETS, Run, assert_near, lower

import bitwright as bw
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite import Trace
from bitwright.target import named

THREADS = [1, 2, 3, 7]
SIZES = [(1, 1), (3, 7), (2, 16), (5, 17), (9, 33), (4, 127), (2, 384), (0, 5), (3, 0)]
LIMITS = {"u8": (0, 255), "i8": (-128, 127)}


def quantize_rows(x, kind):
    """Quantized values, scale and zero point of every row, in numpy."""
    low, high = LIMITS[kind]
    top = np.maximum(x.max(axis=-1, keepdims=True, initial=0), np.float32(0))
    bottom = np.minimum(x.min(axis=-1, keepdims=True, initial=0), np.float32(0))
    scale = np.where(top == bottom, np.float32(1), (top - bottom) / np.float32(high - low))
    zero = np.rint(np.clip(np.float32(low) - bottom / scale, low, high))
    q = np.clip(np.rint(x / scale).astype(np.float64) + zero, low, high)
    kind = np.uint8 if kind == "u8" else np.int8
    return q.astype(kind), scale, zero.astype(kind)


def check(graph, feeds, expected, target):
    ctx = lower(graph, named(target))
    for threads in THREADS:
        found = Run(graph, feeds, named(target), threads, ctx=ctx).outputs.values()
        for have, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("rows, columns", SIZES)
def test_rows_of_any_size(target, kind, rows, columns):
    rng = np.random.default_rng(rows + columns)
    x = rng.normal(size=(rows, columns)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (rows, 1))
    b = Builder("quantize")
    q = b.dynamic_quantize(b.input("x", "f32[rows, columns]"), to=kind, per_token=True)
    x = x.astype(np.float32)
    check(b.build(*q), {"x": x}, quantize_rows(x, kind), target)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_of_any_magnitude(target):
    """Quotients near a half, and scales outside the range of the fast division."""
    rng = np.random.default_rng(1)
    halves = (rng.integers(-200, 200, (64, 97)) + 0.5).astype(np.float32)
    halves[:, 0] = 255 - halves[:, 1:].min(axis=1)
    x = halves * 2.0 ** rng.integers(-146, 118, (64, 1))
    x = np.concatenate([x.astype(np.float32), np.nextafter(x.astype(np.float32), np.float32(9e9))])
    x = np.concatenate([x, x * np.float32(1.7), np.zeros((1, 97), np.float32), -np.abs(x)])
    b = Builder("quantize")
    found = b.dynamic_quantize(b.input("x", "f32[rows, 97]"), to="u8", per_token=True)
    with np.errstate(all="ignore"):
        expected = quantize_rows(x, "u8")
    check(b.build(*found), {"x": x}, expected, target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_non_finite_row_does_not_affect_others(target):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 37)).astype(np.float32)
    x[1, 36], x[2, 5] = np.nan, np.inf
    b = Builder("quantize")
    graph = b.build(*b.dynamic_quantize(b.input("x", "f32[4, 37]"), to="u8", per_token=True))
    q, scale, zero = Run(graph, {"x": x}, named(target)).outputs.values()
    for have, want in zip((q, scale, zero), quantize_rows(x[[0, 3]], "u8"), strict=True):
        np.testing.assert_array_equal(have[[0, 3]], want)
    assert np.isnan(scale[1]) and np.isposinf(scale[2])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("heavy", [False, True])
def test_prologues(target, heavy):
    rng = np.random.default_rng(3)
    x, other = (rng.normal(size=(2, 5, 50)).astype(np.float32) for _ in range(2))
    factor = rng.uniform(0.5, 2, 50).astype(np.float32)
    b = Builder("quantize")
    value = b.input("x", "f32[2, n, 50]")
    value = b.silu(value) if heavy else b.mul(value, b.constant(factor))
    value = b.mul(value, b.input("other", "f32[2, n, 50]"))
    graph = fuse_regions(b.build(*b.dynamic_quantize(value, to="u8", per_token=True)), Trace())
    assert [n.op for n in graph.nodes if not n.is_boundary] == ["fused"]
    feeds = {"x": x, "other": other}
    if heavy:
        expected = run(graph, feeds)
        for threads in THREADS:
            found = Run(graph, feeds, named(target), threads).outputs
            for (name, have), want in zip(found.items(), expected.values(), strict=True):
                if have.dtype == np.float32:
                    assert_near(have, want)
                else:
                    assert np.abs(have.astype(int) - want.astype(int)).max() <= 1, name
    else:
        check(graph, feeds, quantize_rows(x * factor * other, "u8"), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [7, 64, 101])
@pytest.mark.parametrize("shows, smooths, adds", [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0)])
def test_rows_of_a_norm(target, op, columns, shows, smooths, adds):
    rng = np.random.default_rng(4)
    x, other = (rng.normal(size=(2, 9, columns)).astype(np.float32) for _ in range(2))
    scale, factor = (rng.uniform(0.5, 2, columns).astype(np.float32) for _ in range(2))
    b = Builder("norm")
    rows = b.input("x", f"f32[2, n, {columns}]")
    other_rows = b.input("other", f"f32[2, n, {columns}]")
    if adds:
        rows = b.add(rows, other_rows)
    y = getattr(b, op)(rows, b.constant(scale))
    late = b.mul(y, other_rows) if shows else None
    coder = b.dynamic_quantize(
        b.mul(y, b.constant(factor)) if smooths else y, to="u8", per_token=True
    )
    graph = b.build(*coder, *((late, y) if shows else ()))
    fused = fuse_regions(graph, Trace())
    first = next(n for n in fused.nodes if not n.is_boundary)
    assert first.op == "fused" and len(first.outputs) == (4 if shows else 3)
    feeds = {"x": x, "other": other}
    expected = list(run(graph, feeds).values())
    ctx = lower(fused, named(target))
    results = [Run(fused, feeds, named(target), t, ctx=ctx).outputs for t in THREADS]
    for found in results[1:]:
        for have, want in zip(found.values(), results[0].values(), strict=True):
            np.testing.assert_array_equal(have, want)
    q, steps, zeros, *rest = results[0].values()
    assert_near(steps, expected[1])
    assert np.abs(q.astype(int) - expected[0].astype(int)).max() <= 1
    if shows:
        assert_near(rest[0], expected[3])
        assert_near(rest[1], expected[4])
        wanted = quantize_rows(rest[1] * factor if smooths else rest[1], "u8")
        for have, want in zip((q, steps, zeros), wanted, strict=True):
            np.testing.assert_array_equal(have, want)


def test_quantized_rows_of_a_norm_that_a_float_product_reads():
    """The cast of the quantized values is their only reader, and scales have readers of their own:
    it must not become the end of the region."""
    rng = np.random.default_rng(4)
    b = Builder("norm")
    x = b.input("x", "f32[rows, 32]")
    scale, bias = (b.constant(rng.normal(size=32).astype(np.float32)) for _ in range(2))
    parts = b.dynamic_quantize(b.layer_norm(x, scale, bias, axis=-1), per_token=True)
    rows = b.dequantize(*parts, axis=-1, block=32)
    w = b.constant(rng.normal(size=(32, 8)).astype(np.float32))
    graph = b.build(y=b.matmul(rows, w))
    feeds = {"x": rng.normal(size=(5, 32)).astype(np.float32)}
    found = bw.compile(graph, threads=1).run(feeds)["y"]
    # one value of a row may be rounded to the neighbouring quantized value
    np.testing.assert_allclose(found, run(graph, feeds)["y"], rtol=1e-4, atol=0.2)
