"""Multiply-adds on a batch: data-dependent sizes, and loop bodies."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.quant.model.work import Work


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def total(graph, batch):
    work = Work(graph, batch)
    return sum(work.macs(node) for _, node in graph.walk())


def test_data_dependent_sizes():
    b = bw.Builder("chosen")
    x = b.input("x", "f32[n, 6]")
    positive = b.gt(b.reduce_sum(x, axes=[1], keepdims=False), 0.0)
    chosen = b.gather_nd(x, b.transpose(b.nonzero(positive), perm=(1, 0)))
    graph = b.build(y=b.matmul(chosen, draw(6, 4)), z=b.matmul(x, draw(6, 2)))
    batch = {"x": draw(10, 6)}
    rows = int((batch["x"].sum(axis=1) > 0).sum())
    assert 0 < rows < 10
    assert total(graph, batch) == rows * 6 * 4 + 10 * 6 * 2


def step():
    body = bw.Builder("step")
    state, x = body.input("state", "f32[n, 8]"), body.input("x", "f32[n, 8]")
    after = body.add(state, body.matmul(x, draw(8, 8)))
    return body.build(after)


@pytest.mark.parametrize("length", [1, 5])
def test_a_scan_counts_once_per_element(length):
    b = bw.Builder("scan")
    xs, start = b.input("xs", "f32[t, n, 8]"), b.input("start", "f32[n, 8]")
    graph = b.build(y=b.scan(start, xs, body=step(), carried=1, scanned=1))
    batch = {"xs": draw(length, 3, 8), "start": draw(3, 8)}
    assert total(graph, batch) == length * 3 * 8 * 8


@pytest.mark.parametrize("is_constant", [False, True])
def test_a_loop_counts_by_its_trip_count(is_constant):
    body = bw.Builder("body")
    body.input("i", "i64[]")
    going, x = body.input("going", "bool[]"), body.input("x", "f32[n, 8]")
    inner = body.build(going, body.matmul(x, draw(8, 8)))
    b = bw.Builder("loop")
    x = b.input("x", "f32[n, 8]")
    count = b.constant(np.array(7)) if is_constant else b.input("count", "i64[]")
    graph = b.build(y=b.loop(count, None, x, body=inner, carried=1))
    batch = {"x": draw(3, 8)} | ({} if is_constant else {"count": np.array(7)})
    assert total(graph, batch) == 7 * 3 * 8 * 8
