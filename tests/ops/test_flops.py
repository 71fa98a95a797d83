"""Operations of nodes from their definitions: by hand for each kind, and through the compiler."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.ops.core.flops import flops, multiply_adds, node_flops
from bitwright.ops.core.opdef import Kind
from bitwright.ops.core.registry import all_ops, get
from bitwright.passes.manager import run_passes
from bitwright.pipeline import CPU, INFERENCE


def zeros(*shape):
    return np.zeros(shape, np.float32)


def _einsum(b, equation, *shapes):
    xs = [b.input(f"x{i}", f"f32{list(shape)}") for i, shape in enumerate(shapes)]
    return b.einsum(*xs, equation=equation)


def counted(make, **sizes):
    b = bw.Builder("one")
    graph = b.build(y=make(b))
    return flops(graph.outputs[0][1].node, sizes)


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda b: b.matmul(b.input("x", "f32[2, 5, 7]"), zeros(7, 3)), 2 * 2 * 5 * 7 * 3),
        (
            lambda b: b.conv(b.input("x", "f32[2, 8, 10, 10]"), zeros(6, 8, 3, 3)),
            2 * (2 * 6 * 8 * 8) * 8 * 9,
        ),
        (
            lambda b: b.conv(b.input("x", "f32[1, 8, 10, 10]"), zeros(8, 1, 3, 3), groups=8),
            2 * (8 * 8 * 8) * 9,
        ),
        (
            lambda b: b.attention(*(b.input(n, "f32[2, 4, 6, 16]") for n in "qkv")),
            2 * 2 * 4 * 6 * 6 * 32,
        ),
        (lambda b: _einsum(b, "btd,edf->ebtf", (2, 5, 7), (3, 7, 4)), 2 * 3 * 2 * 5 * 7 * 4),
        (lambda b: _einsum(b, "ij,jk,kl->il", (2, 3), (3, 4), (4, 5)), 2 * (2 * 3 * 4 + 2 * 4 * 5)),
        (lambda b: _einsum(b, "ij,k->ik", (2, 3), (4,)), 2 * 4),
        (lambda b: _einsum(b, "ij->i", (2, 3)), 0),
        (lambda b: b.relu(b.input("x", "f32[3, 4]")), 12),
        (lambda b: b.add(b.input("x", "f32[3, 1]"), b.input("y", "f32[1, 4]")), 12),
        (lambda b: b.reduce_sum(b.input("x", "f32[3, 4]"), axes=[1]), 12),
        (lambda b: b.softmax(b.input("x", "f32[3, 4]")), 12),
        (lambda b: b.transpose(b.input("x", "f32[3, 4]"), perm=[1, 0]), 0),
    ],
    ids=[
        *("matmul", "conv", "depthwise", "attention", "experts", "three", "outer", "no product"),
        *("relu", "broadcast", "sum", "softmax", "move"),
    ],
)
def test_by_hand(make, expected):
    assert counted(make) == expected


def test_sizes_stay_symbolic_until_they_are_known():
    make = lambda b: b.matmul(b.input("x", "f32[batch, 7]"), zeros(7, 3))
    assert counted(make, batch=10) == 420


def test_what_the_data_decides_is_not_counted():
    b = bw.Builder("spectrum")
    graph = b.build(y=b.op("fft", b.input("x", "c64[8]")))
    assert node_flops(graph.outputs[0][1].node) is None


def test_a_size_that_the_run_finds_counts_nothing():
    b = bw.Builder("found")
    found = b.compress(b.input("x", "f32[n, 7]"), b.input("which", "bool[n]"), axis=0)
    graph = b.build(y=b.matmul(found, zeros(7, 3)))
    assert multiply_adds(graph.outputs[0][1].node, {"n": 4}) == 0
    assert multiply_adds(found.node, {"n": 4}) == 0


def test_a_region_counts_what_it_holds():
    b = bw.Builder("dense")
    x = b.input("x", "f32[batch, 6]")
    graph = b.build(y=b.relu(b.add(b.matmul(x, b.constant(zeros(6, 3))), b.constant(1 + zeros(3)))))
    fused = run_passes(graph, (*INFERENCE, *CPU))
    (node,) = [n for n in fused.nodes if not n.is_boundary]
    assert node.op == "fused"
    assert flops(node, {"batch": 4}) == 2 * 4 * 6 * 3 + 2 * 4 * 3


def test_ops_with_a_number_of_their_own_are_those_that_multiply():
    assert {op.kind for op in all_ops().values() if op.flops is not None} == {Kind.COMPUTE}
    assert get("lstm").flops is not None and get("relu").flops is None
