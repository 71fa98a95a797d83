"""Gradients of norms, softmax and cross entropy against the interpreter, on every target."""

import re

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    Run,
    assert_near,
    assert_same,
    feeds_of,
    graph_of,
    named,
    reference,
    run_op,
)

import bitwright as bw
from bitwright.errors import RunError
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import get
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.rewrite.trace import Trace

NORMS = ("layer_norm_backward", "rms_norm_backward")
SOFTMAX = ("softmax_backward", "log_softmax_backward")
LOSSES = ("cross_entropy", "cross_entropy_backward")
SIZES = ((1, 1), (5, 7), (4, 16), (9, 17), (3, 33), (130, 127), (70, 1), (0, 5), (6, 0))


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def check(op, *arrays, target="host", threads=2, tolerance=2e-5, shapes=None, **attrs):
    graph = graph_of(op, *arrays, shapes=shapes, **attrs)
    feeds = feeds_of(graph, arrays)
    done = Run(graph, feeds, named(target), threads)
    assert done.fault is None
    for name, expected in reference(graph, feeds).items():
        assert_near(done.outputs[name], expected, tolerance)
    return done


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", NORMS)
def test_norms_of_any_size(op, target):
    for rows, columns in SIZES:
        dy, x, scale = draw(rows, columns), draw(rows, columns, seed=1), draw(columns, seed=2)
        shapes = {0: "[m, n]", 1: "[m, n]", 2: "[n]"}
        for threads in (1, 3):
            check(op, dy, x, scale, target=target, threads=threads, shapes=shapes, eps=0.1)


@pytest.mark.parametrize("target", TARGETS)
def test_group_norm_of_any_size(target):
    for batches, columns in ((1, 1), (2, 7), (3, 33), (2, 127), (0, 4)):
        shape = batches, 6, columns
        for groups in (1, 3, 6):
            check(
                "group_norm_backward",
                draw(*shape),
                draw(*shape, seed=1) + 3,
                draw(6, seed=2),
                groups=groups,
                eps=0.1,
                target=target,
                threads=3,
                shapes={0: "[b, 6, n]", 1: "[b, 6, n]"},
            )


@pytest.mark.parametrize("op", (*NORMS, "group_norm_backward", *SOFTMAX, *LOSSES))
def test_samples(op):
    for case in get(op).samples():
        for target in TARGETS:
            tolerance = max(case.tolerance, 2e-5)
            check(op, *case.inputs, target=target, tolerance=tolerance, **case.attrs)


@pytest.mark.parametrize("op", (*NORMS, "group_norm_backward"))
def test_element_types_of_norms(op):
    groups = {"groups": 3} if op == "group_norm_backward" else {}
    for element, tolerance in (("f64", 1e-12), ("bf16", 2e-2), ("f16", 4e-3)):
        kind = bw.dtype(element).numpy
        arrays = draw(9, 33, dtype=kind), draw(9, 33, seed=1, dtype=kind), draw(33, dtype=kind)
        check(op, *arrays, tolerance=tolerance, **groups)


@pytest.mark.parametrize("op", NORMS)
def test_only_the_input_gradient(op):
    b = Builder("g")
    dx, _, _ = b.op(op, b.input("dy", "f32[9, 20]"), b.input("x", "f32[9, 20]"))
    graph = b.build(dx=dx)
    feeds = {"dy": draw(9, 20), "x": draw(9, 20, seed=1)}
    done = Run(graph, feeds, threads=2)
    assert_near(done.outputs["dx"], reference(graph, feeds)["dx"])
    assert len(done.kernels) == 1


@pytest.mark.parametrize("op", (*NORMS, "group_norm_backward"))
def test_norms_do_not_depend_on_threads(op):
    groups = {"groups": 4} if op == "group_norm_backward" else {}
    arrays = draw(150, 36), draw(150, 36, seed=1), draw(36, seed=2)
    one, *more = (run_op(op, *arrays, threads=threads, **groups) for threads in (1, 2, 5))
    for other in more:
        for found, expected in zip(other, one, strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", SOFTMAX)
def test_softmax_along_any_axis(op, target):
    for size in (1, 5, 16, 33, 127):
        check(op, draw(5, size), draw(5, size, seed=1), target=target)
        check(op, draw(3, 9, size), draw(3, 9, size, seed=1), target=target, axis=1)
        check(op, draw(size, 3, 7), draw(size, 3, 7, seed=1), target=target, axis=0, threads=3)


@pytest.mark.parametrize("axis", (-1, 1))
@pytest.mark.parametrize("op", SOFTMAX)
def test_softmax_with_an_epilogue(op, axis):
    b = Builder("g")
    dy, y = b.input("dy", "f32[n, 6, 50]"), b.input("y", "f32[n, 6, 50]")
    dx = b.mul(b.add(b.op(op, dy, y, axis=axis), b.input("z", "f32[n, 1, 50]")), 0.125)
    graph = fuse_regions(b.build(dx=dx), Trace())
    assert sum(n.op == "fused" for n in graph.nodes) == 1
    feeds = {"dy": draw(3, 6, 50), "y": draw(3, 6, 50, seed=1), "z": draw(3, 1, 50, seed=2)}
    found = Run(graph, feeds, threads=2).outputs["dx"]
    assert_near(found, reference(graph, feeds)["dx"], 2e-5)


def loss_arrays(op, shape, reduction="mean", dtype=np.float32, weighted=False, seed=0):
    """The operands of a loss of [rows, classes, ...] logits, or of its gradient."""
    rng = np.random.default_rng(seed)
    places = (shape[0], *shape[2:])
    labels = rng.integers(0, shape[1], places)
    arrays = [draw(*shape, seed=1, dtype=dtype) * 3, labels]
    if weighted:
        arrays.append(rng.uniform(0.5, 2, shape[1]).astype(dtype))
    if op == "cross_entropy_backward":
        arrays.insert(0, draw(*(places if reduction == "none" else ()), seed=2, dtype=dtype))
    return arrays


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", LOSSES)
def test_losses_of_any_size(op, target):
    shapes = [(1, 1), (3, 7), (5, 17), (130, 10), (66, 33), (2, 3, 1, 5), (2, 7, 17), (2, 3, 1030)]
    for shape in shapes:
        arrays = loss_arrays(op, shape, weighted=len(shape) > 2)
        at = len(arrays) - 2
        symbols = {at: "[m, n]", at + 1: "[m]"} if len(shape) == 2 else None
        check(op, *arrays, target=target, threads=3, ignore_index=0, shapes=symbols)


@pytest.mark.parametrize("shape", [(9, 20), (3, 5, 19)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("op", LOSSES)
def test_options_of_losses(op, reduction, shape):
    for weighted in (False, True):
        for options in ({}, {"ignore_index": 2}, {"from_log_probs": True}):
            arrays = loss_arrays(op, shape, reduction, weighted=weighted)
            check(op, *arrays, reduction=reduction, **options)


@pytest.mark.parametrize("shape", [(5, 33), (2, 5, 19)])
@pytest.mark.parametrize("element", ["f64", "bf16", "f16"])
@pytest.mark.parametrize("op", LOSSES)
def test_element_types_of_losses(op, element, shape):
    arrays = loss_arrays(op, shape, dtype=bw.dtype(element).numpy, weighted=True)
    tolerance = {"f64": 1e-12, "bf16": 2e-2, "f16": 4e-3}[element]
    check(op, *arrays, tolerance=tolerance)


@pytest.mark.parametrize("op", LOSSES)
def test_losses_do_not_depend_on_threads(op):
    for shape in ((200, 10), (3, 4, 2100)):
        arrays = loss_arrays(op, shape, weighted=True)
        one, *more = (run_op(op, *arrays, ignore_index=1, threads=n) for n in (1, 2, 5))
        for other in more:
            assert_same(other, one)


def test_a_gradient_at_a_certain_label_keeps_its_digits():
    logits = np.zeros((1, 40), np.float32)
    logits[0, 3] = 12
    arrays = np.ones((), np.float32), logits, np.array([3])
    found = run_op("cross_entropy_backward", *arrays)
    expected = reference(
        graph := graph_of("cross_entropy_backward", *arrays), feeds_of(graph, arrays)
    )
    np.testing.assert_allclose(found, expected["out0"], rtol=2e-2)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("op", LOSSES)
def test_infinite_logits(op):
    arrays = loss_arrays(op, (7, 37), "none")
    x = arrays[-2]
    x[0, 3], x[1, 5], x[2, :], x[3, 4], x[4, 7] = np.nan, np.inf, -np.inf, -np.inf, 3e38
    for shape in ((7, 37), (1, 37, 7)):
        moved = x if len(shape) == 2 else np.ascontiguousarray(x.T)[None]
        others = [a.reshape(1, 7) if a.ndim == 1 and len(shape) == 3 else a for a in arrays]
        others[-2] = moved
        check(op, *others, reduction="none")


@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 20)])
@pytest.mark.parametrize("label", [7, -1])
def test_labels_that_are_no_class(label, shape):
    b = Builder("loss")
    x, labels = b.parameter("x", draw(*shape)), b.input("labels", f"i64{[shape[0], *shape[2:]]}")
    exe = bw.compile(bw.grad(b.build(loss=b.cross_entropy(x, labels)), loss="loss", wrt=["x"]))
    given = np.zeros((shape[0], *shape[2:]), np.int64)
    given[-1] = label
    shown = re.escape(str(list(shape)))
    with pytest.raises(RunError, match=rf"index {label} is outside.*tensor of shape {shown}"):
        exe.run({"labels": given})
    given[-1] = 4
    assert np.isfinite(exe.run({"labels": given})["loss"])
