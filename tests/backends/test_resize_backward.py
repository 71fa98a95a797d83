"""The gradient of resize by its kernel, against the interpreter."""

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

from bitwright.lir.schedule import InterpreterFallback
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.opdef import draw
from bitwright.ops.core.registry import get

OP = "resize_backward"


def check(dy, target="host", threads=THREADS, tolerance=1e-5, shapes=None, **attrs):
    graph = graph_of(OP, dy, shapes=shapes, **attrs)
    feeds = feeds_of(graph, [dy])
    expected = reference(graph, feeds)["out0"]
    ctx = lower(graph, named(target))
    found = [Run(graph, feeds, threads=n, ctx=ctx).outputs["out0"] for n in threads]
    for result in found:
        assert_near(result, expected, tolerance)
        assert_same(result, found[0])


@pytest.mark.parametrize("target", TARGETS)
def test_modes_and_sizes(target):
    for mode in ("nearest", "linear", "cubic"):
        for coordinates in ("half_pixel", "align_corners", "asymmetric"):
            attrs = {"mode": mode, "coordinate_mode": coordinates}
            check(draw(2, 3, 14, 33), target, shape=(2, 3, 7, 17), **attrs)
            check(draw(1, 2, 7, 16), target, shape=(1, 2, 17, 33), **attrs)


def test_other_axes_types_and_symbols():
    check(draw(2, 14, 5, 127), shape=(2, 7, 5, 127), mode="linear")
    check(draw(14, 1), shape=(1, 7), mode="linear")
    check(draw(2, 3, 4, 4, dtype="f64"), shape=(2, 3, 3, 8), mode="cubic", tolerance=1e-12)
    check(draw(2, 3, 8, 8, dtype="f16"), shape=(2, 3, 4, 4), mode="linear", tolerance=2e-3)
    check(draw(2, 3, 8), shape=(2, 3, 8), mode="linear")
    b = Builder("symbolic")
    dy = b.input("dy", "f32[n, 3, 8]")
    graph = b.build(dx=b.resize_backward(dy, shape=(dy.shape[0], 3, 4), mode="linear"))
    feeds = {"dy": draw(5, 3, 8)}
    assert_near(Run(graph, feeds, threads=2).outputs["dx"], reference(graph, feeds)["dx"])


def test_samples():
    for case in get(OP).samples():
        graph = graph_of(OP, *case.inputs, **case.attrs)
        steps = lower(graph).schedule.steps
        if not any(isinstance(step, InterpreterFallback) for step in steps):
            check(case.inputs[0], tolerance=max(case.tolerance, 1e-5), **case.attrs)


def test_sizes_that_are_not_constant_are_refused():
    dy = np.zeros((2, 3, 8), np.float32)
    graph = graph_of(OP, dy, shapes={0: "[n, 3, w]"}, shape=(2, 3, 4), mode="linear")
    (step,) = lower(graph).schedule.steps
    assert "not constant" in step.why
