"""Gradients of every op, derived from its samples: against central differences in f64, and compiled
in the sample's own types against the interpreter and PyTorch.

Every sample and every operand is compared with differences. The first samples of an op are compiled
always, the others with `--exhaustive` (`make test-all`).
"""

import pytest
from derived_cases import DIFFERENTIABLE, differentiated, grows, sample_cases, widest
from finite_differences import NotSmoothError, compare, projected
from near import assert_compiled_agrees, is_wide
from torch_functions import FUNCTIONS, WITHOUT_FUNCTION, UnsupportedError, torch_gradients

from bitwright.errors import BitwrightError, GraphError
from bitwright.ir import dtype
from bitwright.ops.core.gradients import zero_gradient
from bitwright.ops.core.opdef import Kind, NonDifferentiable
from bitwright.ops.core.registry import all_ops

CONSTANT = {
    "optimization_barrier": {"after": "a result does not depend on what it comes after"},
    "max_pool_backward": {"x": "places of maxima are piecewise constant"},
    "one_hot": {
        "indices": "results are piecewise constant in indices",
        "depth": "it is a size",
    },
    "max_roi_pool": {"rois": "bins are whole pixels"},
    "roi_align_backward": {"x": "only its shape is read"},
    "max_roi_pool_backward": {
        "x": "places of maxima are piecewise constant",
        "rois": "bins are whole pixels",
    },
}
"""Operands in floating types whose gradient is zero everywhere, and the reason."""


def operand_name(op, name):
    """The declared name of input `in3`; operands of a variadic op share one."""
    return op.operands[min(int(name[2:]), len(op.operands) - 1)].name


@pytest.mark.parametrize("op", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradient_agrees_with_central_differences(op):
    """For every sample and operand, and some sample gives each float operand a gradient."""
    floating, moved, reasons = set(), set(), []
    for number, case in enumerate(op.samples()):
        try:
            graph, feeds, names = widest(op, case.inputs, case.attrs)
        except BitwrightError as error:
            reasons.append(f"sample {number} does not run in f64: {error}")
            continue
        floating |= {
            operand_name(op, n) for n, x in feeds.items() if dtype(x.dtype).name in ("f64", "c128")
        }
        if graph is None or not names:
            reasons.append(f"sample {number} has no result and operand in f64")
            continue
        try:
            backward, kept = differentiated(graph, names)
        except GraphError as error:
            if not grows(error):
                raise
            continue
        floating -= {operand_name(op, n) for n in set(names) - set(kept)}  # the rule says why
        for name in kept:
            try:
                size = compare(graph, backward, feeds, kept, name)
            except NotSmoothError as error:
                reasons.append(f"sample {number} by {name}: {error}")
                continue
            except AssertionError as error:
                raise AssertionError(f"sample {number} by {operand_name(op, name)}") from error
            if size:
                moved.add(operand_name(op, name))
    expected = set() if op.grad is zero_gradient else floating - set(CONSTANT.get(op.name, ()))
    assert moved == expected, reasons


@pytest.mark.slow
@pytest.mark.parametrize("op, case", sample_cases())
def test_compiled_gradient_agrees(op, case):
    """With the interpreter, and with PyTorch where it has the function and its options."""
    graph, feeds, names = projected(op, case.inputs, case.attrs, wide=False)
    if graph is None or not names:
        pytest.skip("nothing to differentiate")
    assert_compiled_agrees(op, case, graph, feeds, names)


def test_every_op_has_a_function_in_pytorch_or_a_reason():
    assert set(FUNCTIONS).isdisjoint(WITHOUT_FUNCTION)
    assert set(FUNCTIONS) | set(WITHOUT_FUNCTION) == set(DIFFERENTIABLE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_is_compared_with_pytorch(name):
    """The first samples, which are always compiled, and whose options PyTorch has."""
    for parameter in sample_cases():
        op, case = parameter.values
        if op.name == name and not parameter.marks:
            graph, feeds, names = projected(op, case.inputs, case.attrs, wide=False)
            if graph is None or not names or not all(map(is_wide, feeds.values())):
                continue
            try:
                assert torch_gradients(op, case, differentiated(graph, names)[1])
            except UnsupportedError:
                continue
            return
    pytest.fail("no sample is compared; extend the function, or state the reason")


@pytest.mark.parametrize("name", all_ops())
def test_every_op_declares_its_gradient(name):
    op = all_ops()[name]
    assert callable(op.grad) or isinstance(op.grad, NonDifferentiable)
    if op.kind is Kind.BOUNDARY:
        assert isinstance(op.grad, NonDifferentiable)
