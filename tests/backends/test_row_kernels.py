"""Norms and softmax against the interpreter: every target, odd sizes, prologues and epilogues."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    THREADS,
    Run,
    assert_near,
    assert_same,
    feeds_of,
    graph_of,
    lower,
    named,
    reference,
    run_op,
)

from bitwright.backends.cpu.codegen import jit
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import get
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace

ROW_OPS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "lp_norm")
CHANNEL_OPS = ("group_norm", "instance_norm", "batch_norm", "lrn")
SIZES = (1, 7, 16, 17, 33, 127, 400)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check(op, *arrays, target="host", threads=2, tolerance=2e-5, **attrs):
    graph = graph_of(op, *arrays, **attrs)
    expected = reference(graph, feeds_of(graph, arrays))["out0"]
    found = run_op(op, *arrays, target=named(target), threads=threads, **attrs)
    assert_near(found, expected, tolerance)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ROW_OPS)
def test_rows_of_any_length(op, target):
    for size in SIZES:
        for threads in THREADS:
            check(op, draw(5, size), target=target, threads=threads)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ("softmax", "log_softmax", "lp_norm"))
def test_along_inner_axes(op, target):
    for size in (1, 5, 16, 40):
        check(op, draw(3, 9, size), target=target, axis=1)
        check(op, draw(size, 3, 7), target=target, axis=0, threads=3)


@pytest.mark.parametrize("op", (*ROW_OPS, *CHANNEL_OPS))
def test_samples(op):
    for case in get(op).samples():
        graph = graph_of(op, *case.inputs, **case.attrs)
        feeds = feeds_of(graph, case.inputs)
        expected = reference(graph, feeds)["out0"]
        for target in TARGETS:
            found = Run(graph, feeds, named(target), 2).outputs["out0"]
            assert_near(found, expected, max(case.tolerance, 2e-5))


@pytest.mark.parametrize("op", ("softmax", "log_softmax", "layer_norm"))
def test_results_do_not_depend_on_threads(op):
    x = draw(13, 77)
    one, *more = (run_op(op, x, threads=threads) for threads in (1, 2, 5))
    for other in more:
        assert_same(other, one)


@pytest.mark.parametrize("op", ("softmax", "log_softmax"))
@pytest.mark.parametrize("target", TARGETS)
def test_special_values(op, target):
    x = draw(7, 37)
    x[0, 3], x[1, 5], x[2, :], x[3, 4], x[4, 7] = np.nan, np.inf, -np.inf, -np.inf, 3e38
    x[5, :], x[6, 3] = -3e38, -200.0
    check(op, x, target=target)
    check(op, np.ascontiguousarray(x.T), target=target, axis=0)


def test_softmax_of_a_masked_row_is_exactly_zero_where_masked():
    x = draw(2, 20)
    x[:, 5:] = -np.inf
    found = run_op("softmax", x)
    assert (found[:, 5:] == 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ("layer_norm", "rms_norm", "softmax", "log_softmax"))
def test_prologue_and_epilogue(op, target):
    """A residual sum before; scale, bias and an epilogue after."""
    b = Builder("g")
    x, residual = b.input("x", "f32[n, 50]"), b.input("r", "f32[n, 50]")
    w = b.input("w", "f32[50]")
    before = b.mul(b.add(x, residual), 0.5)
    weights = (w, w) if op.endswith("norm") else ()
    y = b.op(op, before, *weights)
    graph = fuse_regions(b.build(b.gelu(b.add(y, residual))), Trace())
    assert sum(n.op == "fused" for n in graph.nodes) == 1
    feeds = {"x": draw(9, 50), "r": draw(9, 50, seed=1), "w": draw(50, seed=2)}
    (expected,) = reference(graph, feeds).values()
    (found,) = Run(graph, feeds, named(target), 3).outputs.values()
    assert_near(found, expected, 2e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ("group_norm", "instance_norm"))
def test_channel_norms_with_an_epilogue(op, target):
    b = Builder("g")
    x, w = b.input("x", "f32[2, 6, 5, 7]"), b.input("w", "f32[6]")
    y = b.op(op, x, w, w, **({"groups": 2} if op == "group_norm" else {}))
    y = b.add(b.silu(b.mul(y, b.input("gate", "f32[2, 6, 1, 1]"))), b.input("row", "f32[7]"))
    graph = fuse_regions(b.build(y), Trace())
    assert sum(n.op == "fused" for n in graph.nodes) == 1
    feeds = {"x": draw(2, 6, 5, 7), "w": draw(6), "gate": draw(2, 6, 1, 1), "row": draw(7)}
    (expected,) = reference(graph, feeds).values()
    (found,) = Run(graph, feeds, named(target), 3).outputs.values()
    assert_near(found, expected, 2e-5)


@pytest.mark.parametrize("op", ("softmax", "layer_norm", "group_norm", "lrn"))
def test_strided_operands(op):
    b = Builder("g")
    x = b.transpose(b.input("x", "f32[5, 6, 7]"), perm=(2, 1, 0))
    attrs = {"group_norm": {"groups": 3}, "lrn": {"size": 3}}.get(op, {})
    graph = b.build(b.op(op, x, **attrs))
    feeds = {"x": draw(5, 6, 7)}
    (expected,) = reference(graph, feeds).values()
    (found,) = Run(graph, feeds, threads=2).outputs.values()
    assert_near(found, expected, 2e-5)


def test_group_norm_at_odd_sizes():
    for target in TARGETS:
        for columns in (1, 7, 33, 130):
            x, scale, bias = draw(2, 6, columns), draw(6, seed=1), draw(6, seed=2)
            check("group_norm", x, scale, bias, groups=3, target=target, threads=3)
            check("instance_norm", x, scale, bias, target=target)


def test_rows_are_read_once_from_memory_and_not_spilled():
    graph = graph_of("layer_norm", draw(4, 64), draw(64), draw(64))
    ctx = lower(graph)
    (kernel,) = ctx.kernels.values()
    assert "Spill" not in jit.assembly(ctx.text(kernel), ctx.target)


def test_norms_of_f64():
    for columns in (1, 9, 40, 77):
        x = 1000 + draw(6, columns).astype(np.float64)
        for op in ("layer_norm", "rms_norm"):
            check(op, x, threads=3, tolerance=1e-10)
