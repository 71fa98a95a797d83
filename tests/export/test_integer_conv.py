"""Integer convolutions are exported as ConvInteger and give the same integers."""

import numpy as np
import pytest
from onnx_runs import checked, run_ort

from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run

RANDOM = np.random.default_rng(0)


def numbers(element, *shape, low=None, high=None):
    info = np.iinfo(element)
    low, high = info.min if low is None else low, info.max if high is None else high
    return RANDOM.integers(low, high, shape, element, endpoint=True)


def check(graph, feeds):
    """The exported model, after its results have been compared."""
    model = checked(graph)
    expected, found = run(graph, feeds), run_ort(model, feeds)
    for name, want in expected.items():
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(found[name], want)
    return [node.op_type for node in model.graph.node]


def centred(b, code, zero):
    return b.sub(b.cast(code, to="i32"), b.cast(zero, to="i32"))


@pytest.mark.parametrize("element, name", [(np.uint8, "u8"), (np.int8, "i8")])
def test_quantized_values_with_zero_points_are_one_node(element, name):
    b = Builder("m")
    x = b.input("x", f"{name}[n, 3, 6, h]")
    x_zero, w_zero = b.constant(element(101)), b.constant(element(77))
    w = b.constant(numbers(element, 4, 3, 3, 3))
    y = b.conv(centred(b, x, x_zero), centred(b, w, w_zero), pads=(1, 1, 1, 1), strides=(2, 1))
    ops = check(b.build(y), {"x": numbers(element, 2, 3, 6, 5)})
    assert ops.count("ConvInteger") == 1


@pytest.mark.parametrize(
    "element, name", [(np.int32, "i32"), (np.int16, "i16"), (np.uint16, "u16")]
)
def test_wider_integers_are_split_into_bytes(element, name):
    b = Builder("m")
    x = b.input("x", f"{name}[2, 4, 5]")
    limit = 1000 if element is np.int32 else None
    w = b.constant(numbers(element, 6, 2, 3, low=limit and -limit, high=limit))
    y = b.conv(x, w, groups=2, dilations=(2,), pads=(1, 2))
    feeds = {"x": numbers(element, 2, 4, 5, low=limit and -(10 * limit), high=limit and 10 * limit)}
    assert "ConvInteger" in check(b.build(y), feeds)


def test_zero_point_for_each_channel():
    b = Builder("m")
    x, x_zero = b.input("x", "u8[1, 2, 7]"), b.constant(np.uint8(3))
    w = b.constant(numbers(np.uint8, 4, 2, 3))
    zeros = b.constant(numbers(np.uint8, 4, 1, 1))
    y = b.conv(centred(b, x, x_zero), centred(b, w, zeros))
    check(b.build(y), {"x": numbers(np.uint8, 1, 2, 7)})


def test_sums_of_products_of_large_numbers_wrap():
    b = Builder("m")
    x = b.input("x", "i32[1, 1, 4]")
    y = b.conv(x, b.constant(numbers(np.int32, 1, 1, 2)))
    graph, feeds = b.build(y), {"x": numbers(np.int32, 1, 1, 4)}
    w = graph.constants[0].node.attrs["value"][0, 0].astype(np.int64)
    x = feeds["x"][0, 0].astype(np.int64)
    want = [(x[i] * w[0] + x[i + 1] * w[1]) & 0xFFFFFFFF for i in range(3)]
    (found,) = run_ort(checked(graph), feeds).values()
    np.testing.assert_array_equal(found.reshape(3).astype(np.int64) & 0xFFFFFFFF, want)
