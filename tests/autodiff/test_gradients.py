"""Gradients of every op, derived from its samples: against central differences in f64."""

import numpy as np
import pytest
from finite_differences import directional, projected, widened

from bitwright.autodiff.grad import grad
from bitwright.errors import BitwrightError
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import NotYet
from bitwright.ops.core.registry import all_ops

OPS = {name: op for name, op in all_ops().items() if callable(op.grad) and op.grad is not NotYet}
CASES = [
    pytest.param(op, case, id=f"{op.name}-{i}")
    for op in OPS.values()
    for i, case in enumerate(op.samples())
]


@pytest.mark.parametrize("op, case", CASES)
def test_gradient_agrees_with_central_differences(op, case):
    inputs = [widened(x) for x in case.inputs]
    try:
        graph, feeds, names = projected(op, inputs, case.attrs)
    except BitwrightError as error:
        pytest.skip(f"the op does not take these operands in f64: {error}")
    if not names:
        pytest.skip("no operand is a float")
    found = run(grad(graph, "loss", wrt=names), feeds)
    for name in names:
        assert found[f"grad.{name}"].shape == feeds[name].shape
    direction, expected = directional(graph, feeds, names)
    parts = [np.sum(found[f"grad.{n}"] * direction[n]) for n in names]
    size = sum(np.sum(np.abs(found[f"grad.{n}"] * direction[n])) for n in names)
    assert abs(sum(parts) - expected) <= 1e-6 * max(size, abs(expected), 1e-3)
