"""int8 matmuls of two operands known at run time: bit-exact against numpy in int64.

The expected values use no helper of the kernels or of the ops' references.
"""

import numpy as np
import pytest
from run_kernel import TARGETS, Run, lower
from test_integer_kernels import check, product, qvalues, wrapped

from bitwright.backends.cpu.codegen import jit
from bitwright.errors import RunError
from bitwright.ops.core.builder import Builder
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.pipeline import compile_graph
from bitwright.rewrite import Trace
from bitwright.target import named

SIZES = [(1, 1, 1), (7, 16, 17), (17, 33, 127), (33, 127, 16), (10, 97, 5), (127, 49, 66)]
SIZES += [(0, 5, 4), (5, 7, 0), (5, 0, 7), (129, 64, 32)]
KINDS = [("u8", "i8"), ("i8", "u8"), ("u8", "u8"), ("i8", "i8")]


def transposed(b, name, kind, shape):
    """An operand stored with its last two axes exchanged."""
    *outer, rows, columns = shape
    place = b.input(name, f"{kind}{[*outer, columns, rows]}")
    return b.transpose(place, perm=(*range(len(outer)), len(outer) + 1, len(outer)))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows, columns, depth", SIZES)
def test_any_size(target, is_transposed, rows, columns, depth):
    rng = np.random.default_rng(rows + columns + depth)
    x, w = qvalues(rng, "u8", 2, rows, depth), qvalues(rng, "u8", 2, depth, columns)
    b = Builder("product")
    place = (
        transposed if is_transposed else lambda b, name, kind, s: b.input(name, f"{kind}{list(s)}")
    )
    points = b.constant(np.uint8(117)), b.constant(np.uint8(131))
    right = place(b, "w", "u8", w.shape)
    y = b.integer_matmul(b.input("x", f"u8[2, {rows}, {depth}]"), right, *points)
    fed = np.ascontiguousarray(w.swapaxes(-1, -2)) if is_transposed else w
    check(b.build(y), {"x": x, "w": fed}, wrapped(product(x, w, 117, 131)), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("x_kind, w_kind", KINDS)
@pytest.mark.parametrize("x_zero", ["none", "one", "rows", "run"])
@pytest.mark.parametrize("w_zero", ["none", "one", "columns", "run"])
def test_signs_and_zero_points(target, x_kind, w_kind, x_zero, w_zero):
    rng = np.random.default_rng(4)
    x, w = qvalues(rng, x_kind, 3, 9, 21), qvalues(rng, w_kind, 3, 21, 35)
    feeds = {"x": x, "w": w}
    b = Builder("product")

    def point(name, kind, form, shape):
        if form == "none":
            return None, 0
        found = qvalues(rng, kind, *(shape if form in ("rows", "columns") else (1,)))
        if form == "one":
            return b.constant(found), found
        feeds[name] = found
        return b.input(name, f"{kind}{list(found.shape)}"), found

    left, right = b.input("x", f"{x_kind}[3, 9, 21]"), b.input("w", f"{w_kind}[3, 21, 35]")
    x_point, x_number = point("x_zero", x_kind, x_zero, (3, 9, 1))
    w_point, w_number = point("w_zero", w_kind, w_zero, (3, 1, 35))
    bias = rng.integers(-9999, 9999, 35).astype(np.int32)
    y = b.integer_matmul(left, right, x_point, w_point, b.constant(bias))
    expected = product(x, w, x_number, w_number, bias)
    check(b.build(y), feeds, wrapped(expected), target, [1, 3])


@pytest.mark.parametrize("target", TARGETS)
def test_batch_axes_broadcast_with_any_strides(target):
    """Heads inside positions, keys shared by two heads, a dynamic number of positions."""
    rng = np.random.default_rng(8)
    q, k = qvalues(rng, "u8", 2, 19, 4, 10), qvalues(rng, "i8", 2, 19, 2, 10)
    b = Builder("scores")
    left = b.transpose(b.input("q", "u8[2, n, 4, 10]"), perm=(0, 2, 1, 3))
    left = b.reshape(left, shape=(2, 2, 2, left.shape[2], 10))
    right = b.transpose(b.input("k", "i8[2, n, 2, 10]"), perm=(0, 2, 3, 1))
    right = b.reshape(right, shape=(2, 2, 1, 10, right.shape[3]))
    total = b.integer_matmul(left, right, b.constant(np.uint8(99)))
    real = b.mul(b.cast(total, to="f32"), b.constant(np.float32(0.01)))
    y = b.requantize(real, b.constant(np.uint8(120)), to="u8", bounded=True)
    graph = fuse_regions(b.build(y), Trace())
    a = q.transpose(0, 2, 1, 3).reshape(2, 2, 2, 19, 10)
    w = k.transpose(0, 2, 3, 1).reshape(2, 2, 1, 10, 19)
    sums = product(a, w, 99).astype(np.float32) * np.float32(0.01)
    expected = np.clip(np.rint(sums.astype(np.float64)) + 120, 0, 255).astype(np.uint8)
    check(graph, {"q": q, "k": k}, expected, target)


def test_the_dot_product_instruction_is_emitted():
    b = Builder("product")
    y = b.integer_matmul(b.input("x", "u8[n, 64]"), b.input("w", "i8[64, 96]"))
    target = named("avx512vnni")
    ctx = lower(b.build(y), target)
    texts = [jit.assembly(ctx.text(kernel), target) for kernel in ctx.kernels.values()]
    assert sum(text.count("vpdpbusd") for text in texts) >= 24


def quantized_pair(depth):
    """matmul of two dequantized inputs."""
    b = Builder("pair")
    scale, other = b.constant(np.float32(0.02)), b.constant(np.float32(0.5))
    x = b.dequantize(b.input("x", f"u8[2, 7, {depth}]"), scale, b.constant(np.uint8(128)))
    w = b.dequantize(b.input("w", f"i8[2, {depth}, 9]"), other)
    return b.build(b.matmul(x, w))


def test_matmuls_of_dequantized_inputs_become_integer_matmuls():
    rng = np.random.default_rng(9)
    graph = quantized_pair("k")
    lowered = lower_integer(graph, Trace())
    assert "integer_matmul" in {node.op for node in lowered.nodes}
    x, w = qvalues(rng, "u8", 2, 7, 33), qvalues(rng, "i8", 2, 33, 9)
    (found,) = Run(fuse_regions(lowered, Trace()), {"x": x, "w": w}).outputs.values()
    expected = product(x, w, 128).astype(np.float32) * np.float32(0.02 * 0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_sums_that_could_overflow_32_bits_are_refused():
    trace = Trace()
    lowered = lower_integer(quantized_pair(140000), trace)
    assert "integer_matmul" not in {node.op for node in lowered.nodes}
    assert any("131071 products" in event.reason for event in trace.events)
    graph = quantized_pair("k")
    program = compile_graph(graph)
    deep = {"x": np.zeros((2, 7, 140000), np.uint8), "w": np.zeros((2, 140000, 9), np.int8)}
    with pytest.raises(RunError, match="may leave 32 bits"):
        program.run(deep)
