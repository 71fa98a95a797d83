"""Sums over channels, and batch normalization of training made of them."""

import numpy as np
import pytest
from run_kernel import (
    TARGETS,
    THREADS,
    assert_near,
    assert_same,
    feeds_of,
    graph_of,
    named,
    reference,
    run_op,
)

SHAPES = [(2, 3, 4, 5), (7, 33), (1, 1, 1, 1), (16, 16, 8, 8), (5, 64, 7, 3), (3, 17, 40)]
SHAPES += [(2, 127, 3, 3), (130, 2, 1, 1)]


def draw(*shape, seed=0, element=np.float32, mean=3.0):
    return (np.random.default_rng(seed).normal(size=shape) + mean).astype(element)


def check(op, arrays, target="host", tolerance=2e-5, **attrs):
    graph = graph_of(op, *arrays, **attrs)
    expected = reference(graph, feeds_of(graph, arrays))
    results = [run_op(op, *arrays, target=named(target), threads=t, **attrs) for t in THREADS]
    for number, result in enumerate(results[0]):
        assert_near(result, expected[f"out{number}"], tolerance)
        for other in results[1:]:
            assert_same(other[number], result)


@pytest.mark.parametrize("target", TARGETS)
def test_moments(target):
    for shape in SHAPES:
        check("channel_moments", [draw(*shape)], target)


@pytest.mark.parametrize("target", TARGETS)
def test_sums(target):
    for shape in SHAPES:
        mean = draw(shape[1], seed=2)
        check("channel_sums", [draw(*shape, mean=0), draw(*shape, seed=1), mean], target)


def test_mean_far_from_zero():
    """The deviation is 1e-4 of the mean, whose square has no digits left for it in f32."""
    check("channel_moments", [draw(8, 3, 16, 16, mean=1e4)], tolerance=1e-3)


@pytest.mark.parametrize("element, tolerance", [(np.float64, 1e-12), (np.float16, 5e-3)])
def test_element_types(element, tolerance):
    x, dy = draw(3, 17, 6, 5, element=element), draw(3, 17, 6, 5, seed=1, element=element)
    check("channel_moments", [x], tolerance=tolerance)
    check("channel_sums", [dy, x, draw(17, seed=2)], tolerance=tolerance)


def test_no_pixels():
    check("channel_moments", [draw(0, 3, 2, 2)])
    check("channel_sums", [draw(0, 3, 2), draw(0, 3, 2), draw(3)])
