"""The interpreter: sizes learnt from inputs, values freed, faults named."""

import gc
import weakref

import numpy as np
import pytest

from bitwright.errors import RunError
from bitwright.ir import parse, symbol
from bitwright.ir.dtype import f32
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run


def test_sizes_are_bound_from_expressions():
    b = Builder()
    n = symbol("n")
    x = b.input("x", TensorType(f32, (2 * n + 1,)))
    graph = b.build(b.op("sizes", values=[n], shape=[1]), b.relu(x))
    assert run(graph, {"x": np.ones(7, "f4")})["sizes"].tolist() == [3]
    with pytest.raises(RunError, match="wrong size on axis 0"):
        run(graph, {"x": np.ones(6, "f4")})


def test_a_later_input_fixes_what_an_earlier_one_needs():
    b = Builder()
    n, m = symbol("n"), symbol("m")
    b.input("x", TensorType(f32, (n * m,)))
    b.input("y", TensorType(f32, (n, m)))
    graph = b.build(b.constant(1.0))
    run(graph, {"x": np.ones(6, "f4"), "y": np.ones((2, 3), "f4")})
    with pytest.raises(RunError, match="input 'x': has the wrong size"):
        run(graph, {"x": np.ones(7, "f4"), "y": np.ones((2, 3), "f4")})


def test_bounds_are_enforced():
    b = Builder()
    b.input("x", TensorType(f32, (symbol("n", 4),)))
    with pytest.raises(RunError, match="size 'n' is above its bound; expected at most 4, found 5"):
        run(b.build(b.constant(1.0)), {"x": np.ones(5, "f4")})


def test_values_are_freed_when_they_die():
    b = Builder()
    y = b.input("x", "f32[1000]")
    for _ in range(5):
        y = b.exp(y)
    alive = []
    most = 0

    def observe(value, array):
        nonlocal most
        alive.append(weakref.ref(array))
        gc.collect()
        most = max(most, sum(r() is not None for r in alive))

    run(b.build(y), {"x": np.zeros(1000, "f4")}, observe=observe)
    assert most <= 3  # the caller's input, an operand and its result


def test_too_large_a_result_is_refused_before_it_is_made():
    b = Builder()
    n = symbol("n")
    x = b.input("x", TensorType(f32, (n,)))
    graph = b.build(b.expand(x, shape=(2**40, n)))
    with pytest.raises(RunError, match=r"would need .* bytes"):
        run(graph, {"x": np.ones(1 << 10, "f4")})


def test_a_fault_names_the_node_and_its_source():
    text = """graph @g {
  input %x: f32[3]
  input %i: i64[2]
  %y = gather(%x, %i) {axis=0}: f32[2] at "embed/Gather"
  return %y
}"""
    with pytest.raises(RunError) as caught:
        run(parse(text), {"x": np.ones(3, "f4"), "i": np.array([0, 7])})
    assert "gather %y (from embed/Gather)" in str(caught.value)
    assert "7" in str(caught.value)


def test_a_parameter_without_a_value_cannot_run():
    b = Builder()
    w = b.parameter("w", type_="f32[2]")
    with pytest.raises(RunError, match="parameter %w: has no value"):
        run(b.build(b.relu(w)), {})
