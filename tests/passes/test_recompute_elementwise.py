"""Copies of cheap elementwise nodes in front of readers that are far apart."""

import numpy as np

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.fuse.fuse_regions import fuse_regions
from bitwright.passes.fuse.recompute_elementwise import recompute_elementwise
from bitwright.rewrite.trace import Trace


def changed(graph):
    trace = Trace()
    return recompute_elementwise(graph, trace), trace


def normalized(element="f32", between=True):
    """x - mean is read before and after a reduction."""
    b = Builder("normalized")
    x, mean = b.input("x", f"{element}[n, 6]"), b.input("mean", f"{element}[6]")
    y = b.exp(x)
    d = b.sub(y, mean)
    r = b.relu(b.mul(d, 2.0))
    s = b.reduce_sum(r, axes=(0, 1), keepdims=False) if between else b.cast(2.0, to=element)
    z = b.add(b.mul(d, s), b.mul(y, 3.0))
    return b.build(r=r, z=z), d


def count(graph, op):
    return sum(node.op == op for node in graph.nodes)


def feeds(graph):
    rng = np.random.default_rng(0)
    sizes = {v.name: tuple(3 if not isinstance(s, int) else s for s in v.shape)
             for v in graph.inputs}  # fmt: skip
    return {v.name: rng.normal(size=sizes[v.name]).astype(v.dtype.numpy) for v in graph.inputs}


def test_each_reader_gets_a_copy_that_fuses():
    graph, d = normalized()
    new, _ = changed(graph)
    assert count(graph, "sub") == 1 and count(new, "sub") == 2
    assert d.name not in new.values
    fused = fuse_regions(new, Trace())
    assert count(fused, "sub") == 0
    given = feeds(graph)
    before, after = run(graph, given), run(new, given)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_a_chain_is_computed_again_as_a_whole():
    b = Builder("chain")
    x, mean = b.input("x", "f32[n, 6]"), b.input("mean", "f32[6]")
    y = b.exp(x)
    z = b.mul(b.sub(y, mean), 0.5)
    s = b.reduce_sum(b.relu(z), axes=(0, 1), keepdims=False)
    graph = b.build(z=b.add(b.mul(z, s), y))
    new, _ = changed(graph)
    # relu has no other operand, so its copies are fused into the reduction's region or stay there
    assert count(new, "sub") == count(new, "relu") + 1 == 2
    given = feeds(graph)
    assert run(graph, given)["z"].tobytes() == run(new, given)["z"].tobytes()


def test_readers_in_one_region_need_no_copy():
    graph, _ = normalized(between=False)
    assert changed(graph)[0] is graph


def test_half_floats_stay_because_regions_do_not_round_them():
    graph, _ = normalized("f16")
    assert changed(graph)[0] is graph


def test_results_and_operands_of_other_kernels_stay():
    b = Builder("stays")
    x = b.input("x", "f32[n, 6]")
    y = b.exp(x)
    shown = b.mul(y, 2.0)
    read = b.mul(y, 3.0)
    s = b.reduce_sum(b.add(shown, read), axes=(0, 1), keepdims=False)
    p = b.matmul(read, np.eye(6, dtype=np.float32))
    graph = b.build(shown=shown, z=b.add(b.mul(b.add(shown, s), y), b.mul(read, p)))
    new, trace = changed(graph)
    assert new is graph
    reasons = [e.reason for e in trace.events if e.node == read.name]
    assert reasons == [f"%{p.node.name} does not compute it while it reads"]


def test_wider_or_several_operands_do_not_stay_in_memory_instead():
    b = Builder("wide")
    x, t = b.input("x", "f32[n, 6]"), b.input("t", "f32[n, 6]")
    mask = b.gt(b.exp(x), 0.0)  # 1 byte in place of 4
    both = b.add(b.exp(t), b.exp(b.neg(t)))  # one buffer in place of two
    first = b.where(mask, both, 1.0)
    s = b.reduce_sum(first, axes=(0, 1), keepdims=False)
    graph = b.build(z=b.where(mask, b.mul(both, s), 2.0))
    new, trace = changed(graph)
    assert new is graph
    assert len([e for e in trace.events if "would stay in memory" in e.reason]) == 2
