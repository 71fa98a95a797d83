"""Products as rows times a matrix, the form that all algorithms use."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.quant.model.points import find_points

NAMES = ("channels", "out", "window", "strides", "pads", "groups", "dilations")
CONVS = [
    dict(zip(NAMES, values, strict=True))
    for values in [
        (3, 4, (3, 3), (1, 1), (1, 1, 1, 1), 1, (1, 1)),
        (4, 8, (1, 1), (1, 1), (0, 0, 0, 0), 1, (1, 1)),
        (6, 6, (3, 2), (2, 1), (1, 0, 0, 2), 6, (1, 1)),
        (4, 8, (3, 3), (1, 2), (0, 0, 0, 0), 2, (1, 1)),
        (2, 3, (2, 2), (1, 1), (1, 1, 1, 1), 1, (2, 1)),
    ]
]


def conv_graph(channels, out, window, strides, pads, groups, dilations):
    rng = np.random.default_rng(0)
    b = bw.Builder("conv")
    x = b.input("x", f"f32[n, {channels}, 9, 8]")
    w = rng.normal(size=(out, channels // groups, *window)).astype(np.float32)
    y = b.conv(x, w, strides=strides, pads=pads, groups=groups, dilations=dilations)
    return b.build(y=y)


@pytest.mark.parametrize("spec", CONVS, ids=str)
def test_rows_times_matrix_is_the_convolution(spec):
    graph = conv_graph(**spec)
    x = np.random.default_rng(1).normal(size=(2, spec["channels"], 9, 8)).astype(np.float32)
    expected = bw.compile(graph, target="reference").run({"x": x})["y"]
    product = find_points(graph)[0].products[0]
    rows = product.rows(x, 10**6, np.random.default_rng(2))
    found = np.einsum("rgk,gnk->rgn", rows, product.matrix).reshape(len(rows), -1)
    want = expected.transpose(0, 2, 3, 1).reshape(-1, expected.shape[1])
    order = lambda a: np.sort(a, axis=0)  # rows are drawn, not in order
    np.testing.assert_allclose(order(found), order(want), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(product.as_weight(product.matrix), product.weight)


def test_products_of_one_value_share_a_point_and_find_their_bias():
    rng = np.random.default_rng(0)
    b = bw.Builder("shared")
    x = b.input("x", "f32[n, 8]")
    w, bias = rng.normal(size=(8, 4)).astype(np.float32), np.arange(4, dtype=np.float32)
    y = b.add(b.matmul(x, w), bias)
    z = b.matmul(x, b.transpose(b.constant(w.T.copy()), perm=(1, 0)))
    (point,) = find_points(b.build(y=y, z=z))
    assert [p.bias is not None for p in point.products] == [True, False]
    assert all(np.array_equal(p.weight, w) for p in point.products)
    assert point.is_rowwise
