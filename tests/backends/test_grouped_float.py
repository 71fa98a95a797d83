"""Products of float rows sorted by expert, and the gradient of their weights."""

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
)

from bitwright.ir.dtype import dtype
from bitwright.ops.core.opdef import draw
from bitwright.ops.core.registry import get

OPS = ("grouped_matmul", "grouped_matmul_backward_weight")


def operands(op, counts, depth, columns, element="f32"):
    rows, counts = int(np.sum(counts)), np.array(counts, np.int64)
    x = draw(rows, depth, dtype=element)
    if op == "grouped_matmul":
        return x, draw(len(counts), depth, columns, dtype=element, seed=1), counts
    return draw(rows, columns, dtype=element, seed=1), x, counts


def check(op, arrays, target="host", tolerance=1e-5, shapes=None):
    graph = graph_of(op, *arrays, shapes=shapes)
    feeds = feeds_of(graph, arrays)
    expected = reference(graph, feeds)["out0"]
    ctx = lower(graph, named(target))
    found = [Run(graph, feeds, threads=n, ctx=ctx) for n in THREADS]
    for run in found:
        assert run.fault is None
        assert_near(run.outputs["out0"], expected, tolerance)
        assert_same(run.outputs["out0"], found[0].outputs["out0"])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", TARGETS)
def test_any_size(op, target):
    for depth, columns in ((1, 1), (7, 16), (17, 33), (33, 127), (16, 7)):
        check(op, operands(op, [7, 0, 17, 1], depth, columns), target)


@pytest.mark.parametrize("op", OPS)
def test_types_samples_and_symbols(op):
    for element, tolerance in (("f64", 1e-13), ("f16", 2e-3), ("bf16", 1e-2)):
        check(op, operands(op, [7, 3], 17, 33, element), tolerance=tolerance)
    for case in get(op).samples():
        if dtype(case.inputs[0].dtype).is_float:
            check(op, case.inputs, tolerance=max(case.tolerance, 1e-5))
    shapes = {0: "[R, 33]"} if op == "grouped_matmul" else {0: "[R, 16]", 1: "[R, 33]"}
    check(op, operands(op, [7, 3], 33, 16), shapes=shapes)


@pytest.mark.parametrize("op", OPS)
def test_wrong_counts_are_a_fault(op):
    for counts in ([3, 5], [3, 3], [-1, 8]):
        first, second, _ = operands(op, [3, 4], 5, 6)
        arrays = first, second, np.array(counts, np.int64)
        graph = graph_of(op, *arrays)
        assert Run(graph, feeds_of(graph, arrays), threads=2).fault is not None
