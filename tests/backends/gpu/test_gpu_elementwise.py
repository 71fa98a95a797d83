"""Elementwise regions on the GPU: element types, broadcasting, strides, requantization."""

import numpy as np
import pytest
from on_gpu import check_graph, check_node

import bitwright as bw

RNG = np.random.default_rng(0)
SIZES = (1, 7, 33, 1025)


def floats(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("n", SIZES)
def test_one_op(n):
    check_node("add", floats(n), floats(n))


def test_broadcast_and_transposed_operands():
    b = bw.Builder("g")
    x, y, z = b.input("x", "f32[3, 5, 7]"), b.input("y", "f32[7, 5]"), b.input("z", "f32[3, 1, 1]")
    r = b.mul(b.add(x, b.transpose(y, perm=(1, 0))), z)
    check_graph(
        b.build(r=b.relu(r)), {"x": floats(3, 5, 7), "y": floats(7, 5), "z": floats(3, 1, 1)}
    )
