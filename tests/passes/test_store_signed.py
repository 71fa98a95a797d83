"""Values that integer products read are stored as i8; results keep their bits."""

import numpy as np

from bitwright.ir.dtype import i8, u8
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.passes.lower_integer.store_signed import store_signed
from bitwright.passes.manager import History, run_passes

RNG = np.random.default_rng(0)


def moved(graph):
    found = run_passes(graph, [store_signed], History())
    for one, other in zip(run(graph, FEEDS).values(), run(found, FEEDS).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    return found


FEEDS = {"x": RNG.normal(size=(6, 8)).astype(np.float32) * 60}


def weight(*shape):
    return RNG.integers(-127, 128, shape, np.int8)


def readers(graph, op):
    return [node.inputs[0].dtype for node in graph.nodes if node.op == op]


def test_static_and_dynamic_values_of_products_are_signed():
    b = Builder("g")
    x = b.input("x", "f32[6, 8]")
    q = b.requantize(x, np.uint8(100), to="u8")
    d, scale, zero = b.dynamic_quantize(x, to="u8", per_token=True)
    one = b.integer_matmul(q, weight(8, 4), np.uint8(100))
    two = b.integer_matmul(d, weight(8, 4), zero)
    three = b.integer_matmul(b.requantize(x, to="u8"), weight(8, 4))
    found = moved(b.build(one=one, two=two, three=three, scale=scale))
    assert readers(found, "integer_matmul") == [i8] * 3


def test_movement_in_between_and_other_readers():
    b = Builder("g")
    x = b.input("x", "f32[6, 8]")
    q = b.requantize(x, np.uint8(3), to="u8")
    image = b.reshape(q, shape=[1, 6, 8, 1])
    y = b.integer_conv(b.max_pool(image, kernel=[2, 1]), weight(4, 6, 2, 1), np.uint8(3))
    graph = b.build(y=y, real=b.mul(b.cast(q, to="f32"), 0.5), q=q)
    found = moved(graph)
    assert readers(found, "integer_conv") == readers(found, "max_pool") == [i8]


def test_values_that_come_from_outside_stay():
    b = Builder("g")
    x = b.input("x", "f32[6, 8]")
    q = b.requantize(x, np.uint8(3), to="u8")
    joined = b.concat(q, b.constant(np.full((6, 8), 7, np.uint8)), axis=1)
    graph = b.build(y=b.integer_matmul(joined, weight(16, 4), np.uint8(3)))
    assert moved(graph) is graph
    assert readers(graph, "integer_matmul") == [u8]
