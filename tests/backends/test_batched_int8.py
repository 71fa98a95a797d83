"""int8 matmuls with batches of constant matrices, and with one matrix per expert: bit-exact.

The expected values are computed by plain numpy in int64, as in `test_integer_kernels`.
"""

import numpy as np
import pytest
from run_kernel import TARGETS, Run, lower
from test_integer_kernels import check, product, qvalues, wrapped

import bitwright as bw
from bitwright.errors import RunError
from bitwright.lir.schedule import KernelStep
from bitwright.ops.core.builder import Builder
from bitwright.target import named

SHAPES = [
    ((3, 5, 17), (3, 17, 9)),
    ((5, 17), (3, 17, 33)),
    ((2, 3, 7, 16), (3, 16, 40)),
    ((2, 1, 5, 16), (2, 3, 16, 40)),
    ((4, 1, 64), (4, 64, 70)),
    ((4, 0, 8), (4, 8, 7)),
    ((2, 33, 127), (2, 127, 16)),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("x_shape, w_shape", SHAPES)
def test_any_size(target, x_shape, w_shape):
    rng = np.random.default_rng(len(x_shape))
    x, w = qvalues(rng, "u8", *x_shape), qvalues(rng, "i8", *w_shape)
    b = Builder("batched")
    y = b.integer_matmul(b.input("x", f"u8{list(x_shape)}"), b.constant(w), np.uint8(117))
    check(b.build(y), {"x": x}, wrapped(product(x, w, 117)), target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("x_kind, w_kind", [("u8", "i8"), ("i8", "u8"), ("u8", "u8")])
@pytest.mark.parametrize("x_zero", ["none", "one", "rows", "run"])
@pytest.mark.parametrize("w_zero", ["none", "one", "columns", "each"])
def test_signs_and_zero_points(target, x_kind, w_kind, x_zero, w_zero):
    rng = np.random.default_rng(4)
    x, w = qvalues(rng, x_kind, 3, 9, 21), qvalues(rng, w_kind, 3, 21, 35)
    feeds, b = {"x": x}, Builder("batched")
    x_point, x_number = None, 0
    if x_zero != "none":
        x_number = qvalues(rng, x_kind, *((3, 9, 1) if x_zero == "rows" else (1,)))
        x_point = x_number
        if x_zero != "one":
            feeds["z"] = x_number
            x_point = b.input("z", f"{x_kind}{list(x_number.shape)}")
    shape = {"none": (), "one": (1,), "columns": (35,), "each": (3, 1, 35)}[w_zero]
    w_number = 0 if w_zero == "none" else qvalues(rng, w_kind, *shape)
    w_point = None if w_zero == "none" else b.constant(w_number)
    bias = rng.integers(-9999, 9999, 35).astype(np.int32)
    source = b.input("x", f"{x_kind}[3, 9, 21]")
    y = b.integer_matmul(source, b.constant(w), x_point, w_point, b.constant(bias))
    expected = product(x, w, x_number, w_number, bias)
    check(b.build(y), feeds, wrapped(expected), target, [1, 3])


def test_matrices_are_packed_at_compile_time():
    """The schedule has one step, and no copy of the weight."""
    rng = np.random.default_rng(0)
    b = Builder("batched")
    y = b.integer_matmul(b.input("x", "u8[3, n, 16]"), b.constant(qvalues(rng, "i8", 3, 16, 8)))
    ctx = lower(b.build(y), named("host"))
    (step,) = ctx.schedule.steps
    assert isinstance(step, KernelStep)


def by_expert(x, w, counts, scale, zero=0):
    owners = np.repeat(np.arange(len(counts)), counts)
    rows = x.astype(np.int64) - np.asarray(zero, np.int64)
    sums = np.stack([row @ w[e].astype(np.int64) for row, e in zip(rows, owners, strict=True)])
    return wrapped(sums).astype(np.float32) * scale[owners, 0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("zero", ["none", "one", "rows", "run"])
@pytest.mark.parametrize(
    "counts, depth, columns", [((4, 0, 9), 17, 33), ((1, 30, 0, 2, 7), 64, 70), ((5,), 3, 1)]
)
def test_rows_are_multiplied_by_the_weight_of_their_expert(target, zero, counts, depth, columns):
    rng = np.random.default_rng(depth)
    rows, experts = sum(counts), len(counts)
    x, w = qvalues(rng, "u8", rows, depth), qvalues(rng, "i8", experts, depth, columns)
    scale = rng.uniform(0.01, 1, (experts, 1, columns)).astype(np.float32)
    feeds, b = {"x": x, "counts": np.array(counts)}, Builder("experts")
    point, number = None, 0
    if zero != "none":
        point = number = qvalues(rng, "u8", *((rows, 1) if zero == "rows" else (1,)))
        if zero != "one":
            feeds["zero"] = number
            point = b.input("zero", f"u8{list(number.shape)}")
    source = b.input("x", f"u8[{rows}, {depth}]")
    y = b.integer_grouped_matmul(source, w, b.input("counts", f"i64[{experts}]"), scale, point)
    graph, expected = b.build(y), by_expert(x, w, counts, scale, number)
    ctx = lower(graph, named(target))
    for threads in (1, 2, 3, 7):
        (found,) = Run(graph, feeds, named(target), threads, ctx=ctx).outputs.values()
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("counts", [(-1, 7), (3, 9), (1, 2), (2**62, 2**62)])
def test_counts_that_do_not_divide_the_rows_are_an_error(counts):
    rng = np.random.default_rng(0)
    b = Builder("experts")
    x, given = b.input("x", "u8[6, 4]"), b.input("counts", "i64[2]")
    scale = np.ones((2, 1, 3), np.float32)
    graph = b.build(y=b.integer_grouped_matmul(x, qvalues(rng, "i8", 2, 4, 3), given, scale))
    exe = bw.compile(graph)
    with pytest.raises(RunError, match="outside"):
        exe.run({"x": qvalues(rng, "u8", 6, 4), "counts": np.array(counts)})
    exe.run({"x": qvalues(rng, "u8", 6, 4), "counts": np.array([6, 0])})
