"""int8 matmuls and convolutions: bit-exact on every instruction set and number of threads.

The expected values are computed by plain numpy in int64 here, without helpers of the kernels or of
the ops' references.
"""

from dataclasses import replace

import numpy as np
import pytest
from run_kernel import TARGETS, Run, lower

from bitwright.backends.cpu.codegen import jit
from bitwright.backends.cpu.kernels.conv import lower_winograd_int8
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite import Trace
from bitwright.target import host, named

THREADS = [1, 2, 3, 7]
PRODUCT_TARGETS = TARGETS + [name for name in ("avx512",) if named(name).runs_here()]
SIZES = [(1, 1, 1), (1, 384, 33), (7, 16, 17), (16, 17, 7), (17, 33, 127), (33, 127, 16)]
SIZES += [(127, 49, 3), (9, 48, 64), (10, 97, 5), (0, 5, 4), (5, 7, 0)]
LIMITS = {"u8": (0, 256), "i8": (-128, 128)}


def qvalues(rng, kind, *shape):
    """Random values of the whole range, with many at its ends."""
    low, high = LIMITS[kind]
    found = rng.integers(low, high, shape)
    extremes = rng.integers(0, 8, shape)
    found[extremes == 0], found[extremes == 1] = low, high - 1
    return found.astype(np.int8 if kind == "i8" else np.uint8)


def wrapped(total):
    """A sum modulo 2^32."""
    return total.astype(np.int64).astype(np.uint64).astype(np.uint32).view(np.int32)


def requantized(total, factor, zero, low, high, relu=False):
    """saturate(rne(f32(total) * factor) + zero), each step rounded to f32."""
    real = wrapped(total).astype(np.float32) * factor.astype(np.float32)
    if relu:
        real = np.where(real > 0, real, np.float32(0))
    whole = np.rint(real.astype(np.float64)).astype(np.int64) + zero
    return np.minimum(np.maximum(whole, low), high)


def check(graph, feeds, expected, target, threads=THREADS):
    ctx = lower(graph, named(target))
    for count in threads:
        (found,) = Run(graph, feeds, named(target), count, ctx=ctx).outputs.values()
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def product(x, w, x_zero=0, w_zero=0, bias=0):
    rows = x.astype(np.int64) - np.asarray(x_zero, np.int64)
    return rows @ (w.astype(np.int64) - np.asarray(w_zero, np.int64)) + np.asarray(bias, np.int64)


@pytest.mark.parametrize("target", PRODUCT_TARGETS)
@pytest.mark.parametrize("rows, columns, depth", SIZES)
def test_products_of_any_size(target, rows, columns, depth):
    rng = np.random.default_rng(rows + columns + depth)
    x, w = qvalues(rng, "u8", rows, depth), qvalues(rng, "i8", depth, columns)
    b = Builder("product")
    y = b.integer_matmul(b.input("x", f"u8[{rows}, {depth}]"), b.constant(w))
    check(b.build(y), {"x": x}, wrapped(product(x, w)), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("x_kind", ["u8", "i8"])
@pytest.mark.parametrize("w_kind", ["u8", "i8"])
@pytest.mark.parametrize("w_zero", ["none", "one", "columns"])
def test_signs_and_zero_points(target, x_kind, w_kind, w_zero):
    rng = np.random.default_rng(5)
    rows, depth, columns = 9, 37, 50
    x, w = qvalues(rng, x_kind, 2, rows, depth), qvalues(rng, w_kind, depth, columns)
    x_zero = qvalues(rng, x_kind, 1)[0]
    zeros = {"none": None, "one": qvalues(rng, w_kind, 1), "columns": qvalues(rng, w_kind, columns)}
    bias = rng.integers(-9999, 9999, columns).astype(np.int32)
    b = Builder("product")
    w_point = None if zeros[w_zero] is None else b.constant(zeros[w_zero])
    y = b.integer_matmul(
        b.input("x", f"{x_kind}[2, {rows}, {depth}]"),
        b.constant(w),
        b.constant(x_zero),
        w_point,
        b.constant(bias),
    )
    expected = product(x, w, x_zero, 0 if zeros[w_zero] is None else zeros[w_zero], bias)
    check(b.build(y), {"x": x}, wrapped(expected), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("depth", [100, 700, 34000])
def test_zero_points_of_rows_with_large_sums(target, kind, depth):
    """Sums of 14, 17 and 23 bits, of both signs."""
    rng = np.random.default_rng(12)
    x, zero = qvalues(rng, kind, 9, depth), qvalues(rng, kind, 9, 1)
    w = np.broadcast_to(np.array([127, -128, 1, 0, -1, 90], np.int8), (depth, 6)).copy()
    b = Builder("product")
    place = b.input("zero", f"{kind}[9, 1]")
    y = b.integer_matmul(b.input("x", f"{kind}[9, {depth}]"), b.constant(w), place)
    check(b.build(y), {"x": x, "zero": zero}, wrapped(product(x, w, zero)), target, [1, 3])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("per_row", [True, False])
def test_zero_points_known_at_run_time(target, per_row):
    rng = np.random.default_rng(6)
    x, w = qvalues(rng, "u8", 3, 5, 19), qvalues(rng, "i8", 19, 21)
    zero = qvalues(rng, "u8", 3, 5, 1) if per_row else qvalues(rng, "u8", 1).reshape(())
    b = Builder("product")
    place = b.input("zero", f"u8{list(zero.shape)}")
    y = b.integer_matmul(b.input("x", "u8[3, 5, 19]"), b.constant(w), place)
    check(b.build(y), {"x": x, "zero": zero}, wrapped(product(x, w, zero)), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows, columns", [(1, 64), (37, 112), (37, 105)])
def test_large_results_use_non_temporal_stores(target, rows, columns):
    """A cache of 1 KiB makes a small result large; rows of 105 columns are not aligned."""
    rng = np.random.default_rng(11)
    small = replace(named(target), l2_bytes=1024)
    x, w = qvalues(rng, "u8", rows, 9), qvalues(rng, "i8", 9, columns)
    b = Builder("product")
    graph = b.build(b.integer_matmul(b.input("x", "u8[n, 9]"), b.constant(w)))
    ctx = lower(graph, small)
    (kernel,) = (k for k in ctx.kernels.values() if k.name.startswith("matmul"))
    assert ("nontemporal" in ctx.text(kernel)) == (columns % 16 == 0)
    for threads in THREADS:
        (found,) = Run(graph, {"x": x}, small, threads, ctx=ctx).outputs.values()
        np.testing.assert_array_equal(found, wrapped(product(x, w)))


def test_sums_wrap_at_32_bits():
    depth = 70000
    x, w = np.full((1, depth), 255, np.uint8), np.full((depth, 3), 127, np.int8)
    b = Builder("product")
    y = b.integer_matmul(b.input("x", f"u8[1, {depth}]"), b.constant(w))
    total = product(x, w)
    assert total.max() > 2**31
    graph = b.build(y)
    for target in TARGETS:
        check(graph, {"x": x}, wrapped(total), target, [1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
def test_a_layer_from_quantized_values_to_quantized_values(target, kind):
    """Bias, multiplier, activation, a residual of another scale, and requantization."""
    rng = np.random.default_rng(7)
    rows, depth, columns = 35, 64, 83
    x, w = qvalues(rng, "u8", rows, depth), qvalues(rng, "i8", depth, columns)
    other = qvalues(rng, "i8", rows, columns)
    factor = rng.uniform(1e-4, 1e-3, columns).astype(np.float32)
    bias = rng.integers(-9999, 9999, columns).astype(np.int32)
    low, high = LIMITS[kind]
    zero = np.array(3, np.int8 if kind == "i8" else np.uint8)
    b = Builder("layer")
    shape = f"[{rows}, {columns}]"
    total = b.integer_matmul(
        b.input("x", f"u8[{rows}, {depth}]"),
        b.constant(w),
        b.constant(np.uint8(117)),
        None,
        b.constant(bias),
    )
    real = b.mul(b.cast(total, to="f32"), b.constant(factor))
    branch = b.mul(b.cast(b.input("other", f"i8{shape}"), to="f32"), b.constant(np.float32(0.37)))
    y = b.requantize(b.relu(b.add(real, branch)), b.constant(zero), to=kind)
    graph = fuse_regions(b.build(y), Trace())
    assert [n.op for n in graph.nodes if not n.is_boundary] == ["fused"]
    t = wrapped(product(x, w, 117, 0, bias)).astype(np.float32) * factor
    t = t + other.astype(np.float32) * np.float32(0.37)
    whole = np.rint(np.maximum(t, np.float32(0)).astype(np.float64)).astype(np.int64) + 3
    expected = np.clip(whole, low, high - 1).astype(zero.dtype)
    check(graph, {"x": x, "other": other}, expected, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("columns", [1, 16, 33, 48, 64, 83, 80, 128])
def test_saturation_of_quantized_results(target, kind, columns):
    """Values far outside the 8-bit range, bounds per column, and several vectors per store."""
    rng = np.random.default_rng(columns)
    rows, depth = 26, 20
    x, w = qvalues(rng, "u8", rows, depth), qvalues(rng, "i8", depth, columns)
    factor = rng.choice([1e-4, 1e-2, 1.0, 1e3], columns).astype(np.float32)
    highest = rng.uniform(-50, 300, columns).astype(np.float32)
    low, high = LIMITS[kind]
    zero = np.array(29, np.int8 if kind == "i8" else np.uint8)
    b = Builder("layer")
    total = b.integer_matmul(b.input("x", f"u8[{rows}, {depth}]"), b.constant(w))
    real = b.mul(b.cast(total, to="f32"), b.constant(factor))
    points = b.constant(zero), b.constant(highest)
    graph = fuse_regions(b.build(b.requantize(real, *points, to=kind, bounded=True)), Trace())
    t = np.minimum(product(x, w).astype(np.float32) * factor, highest)
    whole = np.rint(t.astype(np.float64)).astype(np.int64) + 29
    check(graph, {"x": x}, np.clip(whole, low, high - 1).astype(zero.dtype), target)


def convolved(x, w, x_zero, w_zero, bias, strides, pads, dilations, groups):
    """A convolution by plain loops over the filter."""
    images, channels, height, width = x.shape
    filters, inner, kh, kw = w.shape
    (sy, sx), (dy, dx) = strides, dilations
    top, left, bottom, right = pads
    wide = np.zeros((images, channels, height + top + bottom, width + left + right), np.int64)
    wide[:, :, top : top + height, left : left + width] = x.astype(np.int64) - x_zero
    oh = (wide.shape[2] - (kh - 1) * dy - 1) // sy + 1
    ow = (wide.shape[3] - (kw - 1) * dx - 1) // sx + 1
    y = np.zeros((images, filters, oh, ow), np.int64)
    each = filters // groups
    for m in range(filters):
        first = m // each * inner
        for c in range(inner):
            for u in range(kh):
                for v in range(kw):
                    part = wide[:, first + c, u * dy :: sy, v * dx :: sx][:, :oh, :ow]
                    y[:, m] += part * (int(w[m, c, u, v]) - int(w_zero[m]))
    return y + bias.reshape(1, -1, 1, 1)


CONVS = {
    "pointwise": ((2, 19, 5, 7), (33, 19, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "first layer": ((1, 3, 11, 13), (17, 3, 3, 3), (2, 2), (1, 1, 0, 1), (1, 1), 1),
    "lines": ((2, 16, 6, 32), (16, 16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "strided lines": ((2, 9, 7, 31), (33, 9, 2, 3), (2, 2), (1, 1, 0, 1), (2, 1), 1),
    "few columns": ((1, 24, 4, 8), (7, 24, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "square": ((1, 8, 9, 7), (40, 8, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "winograd": ((2, 16, 9, 11), (16, 16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "larger winograd": ((1, 32, 18, 17), (48, 32, 3, 3), (1, 1), (0, 2, 1, 0), (1, 1), 1),
    "dilated": ((1, 5, 9, 10), (6, 5, 3, 2), (1, 2), (2, 0, 2, 1), (2, 3), 1),
    "grouped": ((1, 6, 6, 5), (10, 3, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 2),
    "many groups": ((1, 24, 6, 7), (48, 2, 3, 3), (2, 1), (1, 1, 1, 1), (1, 1), 12),
    "two per channel": ((2, 20, 5, 6), (40, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 20),
    "depthwise": ((2, 37, 9, 8), (37, 1, 3, 3), (2, 1), (1, 1, 1, 1), (1, 1), 37),
    "depthwise, zero point zero": ((1, 20, 6, 9), (20, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 20),
    "depthwise wide": ((1, 16, 7, 17), (16, 1, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 16),
    "depthwise strided": ((2, 33, 9, 11), (33, 1, 3, 4), (1, 2), (2, 1, 0, 3), (2, 1), 33),
    "depthwise line": ((1, 32, 1, 29), (32, 1, 1, 7), (1, 1), (0, 3, 0, 3), (1, 1), 32),
    "depthwise long": ((1, 18, 2, 90), (18, 1, 1, 70), (1, 1), (0, 9, 0, 4), (1, 1), 18),
    "depthwise large": ((1, 7, 12, 12), (7, 1, 9, 9), (3, 3), (4, 4, 4, 4), (1, 1), 7),
}


@pytest.mark.parametrize("target", PRODUCT_TARGETS)
@pytest.mark.parametrize("x_kind, w_kind", [("u8", "i8"), ("i8", "u8")])
@pytest.mark.parametrize("form", CONVS)
def test_convolutions(target, form, x_kind, w_kind):
    rng = np.random.default_rng(8)
    x_shape, w_shape, strides, pads, dilations, groups = CONVS[form]
    x, w = qvalues(rng, x_kind, *x_shape), qvalues(rng, w_kind, *w_shape)
    x_zero, w_zero = qvalues(rng, x_kind, 1), qvalues(rng, w_kind, w_shape[0])
    if form.endswith("zero"):
        x_zero[:] = 0
    bias = rng.integers(-9999, 9999, w_shape[0]).astype(np.int32)
    factor = rng.uniform(1e-4, 1e-3, (w_shape[0], 1, 1)).astype(np.float32)
    attrs = {"strides": strides, "pads": pads, "dilations": dilations, "groups": groups}

    def conv(b):
        points = (b.constant(v) for v in (w, x_zero, w_zero, bias))
        return b.integer_conv(b.input("x", f"{x_kind}{list(x_shape)}"), *points, **attrs)

    sums = convolved(x, w, int(x_zero[0]), w_zero, bias, *CONVS[form][2:])
    if target == "host":
        b = Builder("sums")
        check(b.build(conv(b)), {"x": x}, wrapped(sums), target, [1, 3])
    b = Builder("layer")
    real = b.relu(b.mul(b.cast(conv(b), to="f32"), b.constant(factor)))
    y = b.requantize(real, b.constant(np.uint8(9)), to="u8", bounded=x_kind == "u8")
    expected = requantized(sums, factor, 9, 0, 255, relu=True).astype(np.uint8)
    check(fuse_regions(b.build(y), Trace()), {"x": x}, expected, target)


@pytest.mark.parametrize("target", [t for t in PRODUCT_TARGETS if t != "host"])
@pytest.mark.parametrize(
    "results, channels, is_winograd", [(4, 64, True), (4, 256, False), (2, 64, True)]
)
def test_winograd_is_exact_for_the_largest_sums(
    target, results, channels, is_winograd, monkeypatch
):
    """Values and weights at the ends of their ranges; 256 channels are too many."""
    monkeypatch.setattr(lower_winograd_int8, "RESULTS", (results,))
    rng = np.random.default_rng(results)
    x = rng.choice(np.array([0, 255], np.uint8), (1, channels, 20, 20))
    x[0, :, :9] = 255
    w = np.where(rng.random((16, channels, 3, 3)) < 0.9, 127, -128).astype(np.int8)
    b = Builder("conv")
    attrs = {"pads": (1, 1, 1, 1)}
    y = b.integer_conv(b.input("x", f"u8[1, {channels}, h, w]"), b.constant(w), **attrs)
    graph = b.build(y)
    ctx = lower(graph, named(target))
    assert any("winograd" in name for name in ctx.kernels) == is_winograd
    none = np.zeros(16, np.int64)
    sums = convolved(x, w, 0, none, none, (1, 1), (1, 1, 1, 1), (1, 1), 1)
    for threads in (1, 3):
        (found,) = Run(graph, {"x": x}, named(target), threads, ctx=ctx).outputs.values()
        np.testing.assert_array_equal(found, wrapped(sums))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("is_last", [False, True])
def test_images_of_few_channels(target, channels, is_last):
    rng = np.random.default_rng(channels)
    x, w = qvalues(rng, "u8", 2, channels, 5, 35), qvalues(rng, "i8", 9, channels, 3, 3)
    pads, none = (1, 2, 0, 17), np.zeros(9, np.int64)
    b = Builder("conv")
    if is_last:
        image = b.transpose(b.input("x", f"u8[2, 5, 35, {channels}]"), perm=(0, 3, 1, 2))
    else:
        image = b.input("x", f"u8[2, {channels}, 5, 35]")
    y = b.integer_conv(image, b.constant(w), b.constant(np.uint8(77)), None, None, pads=pads)
    sums = convolved(x, w, 77, none, none, (1, 1), pads, (1, 1), 1)
    fed = np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if is_last else x
    check(b.build(y), {"x": fed}, wrapped(sums), target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_convolution_pads_with_a_zero_point_known_at_run_time(target):
    rng = np.random.default_rng(9)
    x, w, zero = (
        qvalues(rng, "u8", 1, 4, 5, 6),
        qvalues(rng, "i8", 7, 4, 3, 3),
        qvalues(rng, "u8", 1),
    )
    b = Builder("conv")
    point = b.input("zero", "u8[1]")
    y = b.integer_conv(
        b.input("x", "u8[1, 4, 5, 6]"), b.constant(w), point, None, None, pads=(1, 1, 1, 1)
    )
    none = np.zeros(7, np.int64)
    sums = convolved(x, w, int(zero[0]), none, none, (1, 1), (1, 1, 1, 1), (1, 1), 1)
    check(b.build(y), {"x": x, "zero": zero}, wrapped(sums), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["u8", "i8"])
@pytest.mark.parametrize("shape", [(1,), (7, 9), (2, 3, 33, 5), (256, 3), (0, 4)])
def test_lookup_tables(target, kind, shape):
    rng = np.random.default_rng(len(shape))
    x, table = qvalues(rng, kind, *shape), qvalues(rng, "i8", 256)
    b = Builder("table")
    y = b.lookup_table(b.input("x", f"{kind}{list(shape)}"), b.constant(table))
    expected = np.array([table[int(v) % 256] for v in x.reshape(-1)], np.int8).reshape(shape)
    check(b.build(y), {"x": x}, expected, target)


def assembly(target):
    b = Builder("layer")
    w = np.ones((64, 96), np.int8)
    y = b.integer_matmul(b.input("x", "u8[n, 64]"), b.constant(w))
    ctx = lower(b.build(y), target)
    (kernel,) = (k for k in ctx.kernels.values() if k.name.startswith("matmul"))
    return jit.assembly(ctx.text(kernel), target)


def test_dot_product_instructions_are_emitted():
    assert assembly(named("avx512vnni")).count("vpdpbusd") >= 24
    assert "vpmaddwd" in assembly(named("avx2")) and "vpdpbusd" not in assembly(named("avx2"))
    assert "pmaddwd" in assembly(named("sse2"))
    assert "sdot" in assembly(named("aarch64"))
    if host().has("avx512vnni"):
        dots = "tdpb" if host().has("amx-int8") else "vpdpbusd"
        assert dots in assembly(host())
