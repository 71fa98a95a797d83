"""Elementwise regions as kernels: broadcasting, any size and layout, types, threads."""

import numpy as np
import pytest
from emitted import WIDTHS, Compiled

from bitwright.backends.cpu.codegen.emit import Module
from bitwright.backends.cpu.codegen.expression import Expression
from bitwright.backends.cpu.kernels.elementwise.elementwise import (
    STRIDED,
    Layout,
    collapse,
    emit_elementwise,
    movement,
)
from bitwright.errors import CompileError
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw
from bitwright.target import named


def row_major(shape):
    return [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]


def compute(graph, feeds, target, threads=1):
    """The region's results, with the strides that the arrays have."""
    expression = Expression.of(graph)
    inputs = [feeds[value.name] for value in graph.inputs]
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    outputs = [np.full(shape, 77).astype(d.numpy) for d in expression.results]
    seen = [np.broadcast_to(x, shape) for x in inputs]
    strides = [[stride // x.itemsize for stride in x.strides] for x in seen]
    sizes, moves = collapse(shape, strides + [row_major(shape)] * len(outputs))
    kinds = [movement(move[-1]) for move in moves]
    count, outer = len(inputs), range(len(sizes) - 1)
    layout = Layout(len(sizes), tuple(kinds[:count]), tuple(kinds[count:]))
    module = Module(named(target))
    emit_elementwise(module, "kernel", expression, layout)
    names = [f"x{n}" for n in range(count)] + [f"y{n}" for n in range(len(outputs))]
    slots = dict(zip(names, [*seen, *outputs], strict=True))
    slots |= {f"size{axis}": size for axis, size in enumerate(sizes)}
    for name, move, kind in zip(names, moves, kinds, strict=True):
        slots |= {f"{name}_{axis}": move[axis] for axis in outer}
        slots |= {f"{name}_inner": move[-1]} if kind == STRIDED else {}
    Compiled(module)(threads=threads, **slots)
    return outputs


def region(x, y, element="f32"):
    b = Builder("region")
    x, y = b.input("x", f"{element}{list(x)}"), b.input("y", f"{element}{list(y)}")
    return b.build(b.relu(b.sub(b.mul(x, y), b.maximum(x, y))), b.gt(x, y))


SHAPES = [((5, 7), (7,)), ((3, 4, 5), (4, 1)), ((33,), ()), ((), ()), ((0, 3), (3,))]
SHAPES += [((2, 3, 4, 17), (3, 1, 17)), ((129, 16), (129, 1)), ((1000,), (1000,)), ((7, 1), (1, 9))]
SHAPES += [((2, 1, 3, 1), (1, 2, 1, 5))]


@pytest.mark.parametrize("target", WIDTHS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("x_shape, y_shape", SHAPES)
def test_broadcasting_agrees_with_the_interpreter(target, threads, x_shape, y_shape):
    graph = region(x_shape, y_shape)
    feeds = {"x": draw(*x_shape), "y": draw(*y_shape, seed=1)}
    found = compute(graph, feeds, target, threads)
    for one, other in zip(found, run(graph, feeds).values(), strict=True):
        np.testing.assert_allclose(one, other, 1e-6, 1e-6)


@pytest.mark.parametrize("element", ["f16", "bf16", "f64", "i32", "i8", "u8", "i64"])
@pytest.mark.parametrize("target", WIDTHS)
def test_element_types(target, element):
    graph = region((3, 37), (37,), element)
    high = 9 if element[0] in "iu" else 2
    feeds = {
        "x": draw(3, 37, dtype=element, low=0, high=high),
        "y": draw(37, dtype=element, seed=1, low=0, high=high),
    }
    found = compute(graph, feeds, target, 2)
    tolerance = {"f16": 2e-3, "bf16": 2e-2}.get(element, 1e-7)
    for one, other in zip(found, run(graph, feeds).values(), strict=True):
        np.testing.assert_allclose(one.astype("f8"), other.astype("f8"), tolerance, 4 * tolerance)


@pytest.mark.parametrize("target", WIDTHS)
def test_transposed_and_strided_operands(target):
    graph = region((6, 19), (6, 19))
    feeds = {"x": draw(19, 6).T, "y": draw(6, 38, seed=1)[:, ::2]}
    found = compute(graph, feeds, target, 3)
    for one, other in zip(found, run(graph, feeds).values(), strict=True):
        np.testing.assert_allclose(one, other, 1e-6, 1e-6)


@pytest.mark.parametrize("target", WIDTHS)
def test_long_functions_of_any_size(target):
    """Several vectors per iteration, and the remainder one by one."""
    for size in (1, 7, 16, 33, 63, 64, 65, 127, 200):
        b = Builder("region")
        x, y = b.input("x", f"f32[3, {size}]"), b.input("y", f"f32[{size}]")
        graph = b.build(b.add(b.gelu(x), y))
        for seen in (draw(3, size), draw(size, 3).T):
            feeds = {"x": seen, "y": draw(size, seed=1)}
            (expected,) = run(graph, feeds).values()
            for threads in (1, 3):
                (found,) = compute(graph, feeds, target, threads)
                np.testing.assert_allclose(found, expected, 1e-6, 1e-6)


def test_axes_merge_where_every_tensor_allows():
    assert collapse((2, 3, 4), [[12, 4, 1], [12, 4, 1]]) == ([24], [[1], [1]])
    assert collapse((2, 3, 4), [[12, 4, 1], [0, 0, 1]]) == ([6, 4], [[4, 1], [0, 1]])
    assert collapse((2, 1, 4), [[4, 9, 1]]) == ([8], [[1]])
    assert collapse((1, 1), [[0, 0]]) == ([1], [[1]])


def test_a_result_cannot_repeat():
    with pytest.raises(CompileError, match="cannot repeat"):
        Layout(1, (), (movement(0),))
