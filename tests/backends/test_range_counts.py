"""Counts between edges: the kernel equals the reference and numpy exactly."""

from itertools import pairwise

import numpy as np
import pytest
from run_kernel import TARGETS, THREADS, feeds_of, graph_of, named, reference, run_op

EDGES = np.array([-1.5, -0.5, 0, 0.25, 1], np.float32)
SHAPES = [(1,), (7,), (17, 3), (33, 127), (2, 3, 70, 50), (16384,), (5, 9001), (0, 4), ()]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("element", ["f32", "f16", "f64"])
def test_equal_to_the_reference(target, element):
    from bitwright.ir import dtype

    kind = dtype(element).numpy
    edges = EDGES.astype(np.float64) if element == "f64" else EDGES
    for number, shape in enumerate(SHAPES):
        x = np.asarray(np.random.default_rng(number).normal(size=shape), kind)
        if x.size > 6:
            x.reshape(-1)[:6] = np.nan, np.inf, -np.inf, 0.25, -0.0, 1
        graph = graph_of("range_counts", x, edges)
        expected = reference(graph, feeds_of(graph, [x, edges]))["out0"]
        for threads in THREADS:
            found = run_op("range_counts", x, edges, target=named(target), threads=threads)
            np.testing.assert_array_equal(found, expected)


def test_equal_to_numpy():
    x = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
    found = run_op("range_counts", x, EDGES, target=named("host"), threads=2)
    limits = [-np.inf, *EDGES, np.inf]
    bins = [((x > a) & (x <= b)).sum() for a, b in pairwise(limits)]
    assert list(found) == [*bins, 0, x.min(), x.max()]
