"""Gradients of every op, derived from its samples: against central differences in f64, and compiled
in the sample's own types against the interpreter.

The first two samples of an op run always, the others with `--exhaustive` (`make test-all`).
"""

import numpy as np
import pytest
from finite_differences import (
    NUDGES,
    NotSmoothError,
    directional,
    dot,
    nudged,
    projected,
    random_direction,
    size_of,
    widened,
    widened_attrs,
)

from bitwright.autodiff.grad import grad
from bitwright.compiler import compile
from bitwright.errors import BitwrightError, GraphError, RunError
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Kind, NonDifferentiable, NotYet
from bitwright.ops.core.registry import all_ops

OPS = {name: op for name, op in all_ops().items() if callable(op.grad) and op.grad is not NotYet}
# Ops with straight-through gradients, which are no derivatives (`tests/ops/test_fake_quantize.py`).
STRAIGHT_THROUGH = ("fake_quantize", "fake_binarize", "fake_dynamic_quantize")
CASES = [
    pytest.param(op, case, id=f"{op.name}-{i}", marks=[pytest.mark.exhaustive] if i > 1 else [])
    for op in OPS.values()
    if op.name not in STRAIGHT_THROUGH
    for i, case in enumerate(op.samples())
]
# Ops without a sample that the check can use, and the reason.
UNCHECKED: dict[str, str] = {}


def widest(op, case):
    """The graph of a sample in f64, its feeds and the names of the differentiable inputs."""
    return projected(op, [widened(x) for x in case.inputs], widened_attrs(case.attrs))


def differentiated(graph, names):
    """The graph with gradients, and the names without operands that a rule refuses (boxes).

    Skips the test for a loop whose carried value grows.
    """
    try:
        return grad(graph, "loss", wrt=names), names
    except GraphError as error:
        if "changes its size between iterations" in str(error):
            pytest.skip(str(error))
        kept = [name for name in names if f"by %{name} is asked for" not in str(error)]
        if not kept or kept == names:
            raise
        return differentiated(graph, kept)


def wide_graph(op, case):
    """The graph of a sample in f64; skips the test where there is nothing to differentiate."""
    try:
        graph, feeds, names = widest(op, case)
    except BitwrightError as error:
        pytest.skip(f"the op does not take these operands in f64: {error}")
    if graph is None:
        pytest.skip("no result is in f64: differences of narrower results are too coarse")
    if not names:
        pytest.skip("no operand is a float")
    return graph, feeds, names


@pytest.mark.parametrize("op, case", CASES)
def test_gradient_agrees_with_central_differences(op, case):
    graph, feeds, names = wide_graph(op, case)
    backward, names = differentiated(graph, names)
    reason = ""
    for attempt in range(len(NUDGES)):
        given = nudged(feeds, names, attempt)
        direction = random_direction({n: given[n] for n in names})
        try:
            expected = directional(graph, given, direction)
        except (NotSmoothError, RunError) as error:
            reason = str(error)
            continue
        found = run(backward, given)
        for name in names:
            assert found[f"grad.{name}"].shape == given[name].shape
        total = sum(dot(found[f"grad.{n}"], direction[n]) for n in names)
        size = sum(size_of(found[f"grad.{n}"], direction[n]) for n in names)
        assert abs(total - expected) <= 1e-6 * max(size, abs(expected), 1e-3)
        return
    pytest.skip(f"no smooth point was found: {reason}")


@pytest.mark.slow
@pytest.mark.parametrize("op, case", CASES)
def test_compiled_gradient_agrees_with_the_interpreter(op, case):
    graph, feeds, names = projected(op, case.inputs, case.attrs, wide=False)
    if graph is None or not names:
        pytest.skip("nothing to differentiate")
    backward, names = differentiated(graph, names)
    expected = run(backward, feeds)
    found = compile(backward).run(feeds)
    tolerance = max(20 * case.tolerance, 2e-4)
    for name, array in expected.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype
        finite = np.isfinite(array.astype(np.complex128))
        if name != "loss":
            wide = array.astype(np.complex128)[finite]
            scale = max(np.max(np.abs(wide), initial=0.0), 1e-3)
            error = np.abs(found[name].astype(np.complex128)[finite] - wide)
            assert np.max(error, initial=0.0) <= tolerance * scale, name


@pytest.mark.parametrize("name", OPS)
def test_a_sample_checks_the_gradient(name):
    """An op with a gradient has a sample with a float operand on which a float result depends."""
    if name in UNCHECKED:
        pytest.skip(UNCHECKED[name])
    for case in OPS[name].samples():
        try:
            graph, _, names = widest(OPS[name], case)
        except BitwrightError:
            continue
        if graph is not None and names:
            return
    pytest.fail("no sample reaches the gradient rule in f64; add one, or a reason to UNCHECKED")


@pytest.mark.parametrize("name", all_ops())
def test_every_op_declares_its_gradient(name):
    op = all_ops()[name]
    assert callable(op.grad) or isinstance(op.grad, NonDifferentiable)
    if op.kind is Kind.BOUNDARY:
        assert isinstance(op.grad, NonDifferentiable)
