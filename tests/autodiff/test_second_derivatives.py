"""Second derivatives of every op: the gradient of a projection of its gradients, against central
differences in f64 of the first derivatives, and compiled against the interpreter."""

import numpy as np
import pytest
from derived_cases import DIFFERENTIABLE, differentiated, grows, widest
from finite_differences import NotSmoothError, compare, connected, projection

from bitwright.autodiff.grad import grad
from bitwright.compiler import compile
from bitwright.errors import BitwrightError, GraphError
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Kind

BY_SAMPLES = ("matmul", "einsum", "lora_matmul", "softmax", "log_softmax", "softmax_backward")
"""Ops beside elementwise ones of which six samples are tested, of others one."""
# fmt: off
LINEAR = (
    "abs", "add", "bernoulli", "cast", "ceil", "clip", "complex", "conj", "custom", "dequantize",
    "floor", "fused", "hard_sigmoid", "imag", "leaky_relu", "maximum", "minimum", "mod", "neg",
    "random_normal", "random_uniform", "real", "relu", "round", "shrink", "sign", "sub",
    "thresholded_relu", "trunc", "where",
)
# fmt: on
"""Elementwise ops whose second derivative is zero, up to jumps."""


def sum_of_gradients(graph, feeds, names):
    """A graph whose loss is a random projection of the gradients, and what it depends on."""
    first = grad(graph, "loss", wrt=names)
    b = Builder.of(first)
    values = {name: dict(first.outputs)[f"grad.{name}"] for name in names}
    b.outputs.clear()
    total = projection(b, values, {name: feeds[name].shape for name in names}, seed=7)
    return b.build(loss=total), connected(b.nodes, total, names)


def twice_differentiated(op, case):
    """The graph of first derivatives, that of second ones, the feeds and all names; None if there
    are none."""
    try:
        graph, feeds, names = widest(op, case.inputs, case.attrs)
    except BitwrightError:
        return None
    if graph is None or not names:
        return None
    try:
        _, names = differentiated(graph, names)
        first, left = sum_of_gradients(graph, feeds, names)
        return (first, grad(first, "loss", wrt=left), feeds, names, left) if left else None
    except GraphError as error:
        if "second derivatives by the grid are not supported" in str(error) or grows(error):
            return None
        raise


def samples_of(op):
    many = op.kind is Kind.ELEMENTWISE or op.name in BY_SAMPLES
    return list(op.samples())[: 6 if many else 1]


@pytest.mark.parametrize("op", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_second_derivative_agrees_with_central_differences(op):
    largest = 0.0
    for number, case in enumerate(samples_of(op)):
        made = twice_differentiated(op, case)
        if made is None:
            continue
        first, second, feeds, names, left = made
        for name in left:
            try:
                size = compare(first, second, feeds, names, name)
            except NotSmoothError:
                continue
            except AssertionError as error:
                raise AssertionError(f"sample {number} by {name}") from error
            largest = max(largest, size)
    if op.kind is Kind.ELEMENTWISE or op.name in BY_SAMPLES:
        assert (largest > 0) == (op.name not in LINEAR)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mul", "div", "tanh", "gelu", "pow", *BY_SAMPLES])
def test_compiled_second_derivative(name):
    op = DIFFERENTIABLE[name]
    _, second, feeds, _, left = twice_differentiated(op, next(iter(op.samples())))
    found, expected = compile(second).run(feeds), run(second, feeds)
    for value in left:
        np.testing.assert_allclose(
            found[f"grad.{value}"], expected[f"grad.{value}"], rtol=1e-9, atol=1e-9
        )
