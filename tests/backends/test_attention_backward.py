"""Gradients of attention by their kernel, against the interpreter."""

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

from bitwright.autodiff.grad import grad
from bitwright.lir.schedule import KernelStep
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.registry import get
from bitwright.pipeline import compile_step


def draw(*shape, seed=0, element=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(element)


def operands(queries, keys, features=16, values=16, batches=2, heads=4, shared=None):
    shared = shared or heads
    return [
        draw(batches, heads, queries, values, seed=3),
        draw(batches, heads, queries, features),
        draw(batches, shared, keys, features, seed=1),
        draw(batches, shared, keys, values, seed=2),
    ]


def check(arrays, target="host", threads=2, shapes=None, tolerance=2e-5, **attrs):
    graph = graph_of("attention_backward", *arrays, shapes=shapes, **attrs)
    expected = reference(graph, feeds_of(graph, arrays))
    how = {"target": named(target), "threads": threads, "shapes": shapes}
    found = run_op("attention_backward", *arrays, **how, **attrs)
    for number, result in enumerate(found):
        assert_near(result, expected[f"out{number}"], tolerance)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_any_size(target):
    for queries, keys in ((1, 1), (7, 16), (17, 33), (33, 7), (65, 130)):
        for threads in THREADS:
            check(operands(queries, keys), target, threads)


@pytest.mark.parametrize("target", TARGETS)
def test_any_features(target):
    for features, values in ((1, 7), (16, 17), (33, 64), (128, 5)):
        check(operands(17, 33, features, values), target)


@pytest.mark.parametrize("target", TARGETS)
def test_visible_keys(target):
    lengths = np.array([0, 33], np.int64)
    for attrs in (
        {"causal": True},
        {"causal": True, "causal_offset": "end"},
        {"causal": True, "window": 5},
        {"window": 3, "window_right": 2},
    ):
        check(operands(70, 33), target, **attrs)
        check(operands(17, 70), target, **attrs)
        check([*operands(7, 33), None, lengths], target, **attrs)


@pytest.mark.parametrize("target", TARGETS)
def test_masks_scale_and_cap(target):
    arrays = operands(17, 33)
    masks = [
        draw(17, 33, seed=5),
        draw(2, 4, 17, 33, seed=5),
        draw(2, 1, 1, 33, seed=5),
        draw(2, 1, 17, 33, seed=6) > 0,
        draw(1, 20, seed=6) > 0,
        np.zeros((17, 33), np.bool_),
    ]
    for mask in masks:
        check([*arrays, mask], target, scale=0.3)
        check([*arrays, mask], target, causal=True, softcap=2.0)


@pytest.mark.parametrize("target", TARGETS)
def test_heads_that_share_keys(target):
    for threads in THREADS:
        check(operands(33, 17, heads=6, shared=2), target, threads, causal=True)


def test_samples():
    for case in get("attention_backward").samples():
        graph = graph_of("attention_backward", *case.inputs, **case.attrs)
        expected = reference(graph, feeds_of(graph, case.inputs))
        found = run_op("attention_backward", *case.inputs, **case.attrs)
        for number, result in enumerate(found):
            assert_near(result, expected[f"out{number}"], max(case.tolerance, 2e-5))


def test_element_types():
    arrays = operands(17, 33)
    check([x.astype(np.float64) for x in arrays], causal=True, tolerance=1e-12)
    check([x.astype(np.float16) for x in arrays], causal=True, tolerance=2e-3)


def test_symbolic_sizes():
    shapes = dict.fromkeys(range(4), "[B, 4, S, 16]")
    check(operands(17, 17), shapes=shapes, causal=True)


def test_threads_do_not_change_a_bit():
    arrays = operands(70, 65, heads=6, shared=3)
    one, *others = (
        run_op("attention_backward", *arrays, threads=threads, causal=True) for threads in (1, 2, 5)
    )
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)


def test_gradients_of_one_projection_are_written_where_they_belong():
    b = Builder("projection")
    x, w = b.input("x", "f32[2, n, 8]"), b.input("w", "f32[8, 24]")
    parts = b.reshape(b.matmul(x, w), shape=(2, x.shape[1], 3, 2, 4))
    moved = b.transpose(parts, perm=(2, 0, 3, 1, 4))
    y = b.attention(*(b.gather(moved, np.array(i)) for i in range(3)), causal=True)
    loss = b.reduce_sum(b.mul(y, y), axes=(0, 1, 2, 3), keepdims=False)
    graph = grad(b.build(loss=loss), "loss", wrt=["x", "w"])
    exe = compile_step(graph, threads=2)
    feeds = {"x": draw(2, 17, 8), "w": draw(8, 24, seed=1)}
    expected = reference(graph, feeds)
    for name, found in exe.run(feeds).items():
        assert_near(found, expected[name], 1e-5)
    steps = [s.kernel for s in exe.engine.schedule.steps if isinstance(s, KernelStep)]
    (at,) = (i for i, kernel in enumerate(steps) if kernel.startswith("attention_backward"))
    assert not any("copy" in kernel for kernel in steps[at:])
