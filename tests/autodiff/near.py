"""Compiled gradients against the interpreter and PyTorch."""

import numpy as np
import pytest
from derived_cases import differentiated, grows
from torch_functions import FUNCTIONS, UnsupportedError, torch_gradients

from bitwright.compiler import compile
from bitwright.errors import GraphError
from bitwright.ir import dtype
from bitwright.ops.core.interpret import run


def assert_compiled_agrees(op, case, graph, feeds, names):
    """With the interpreter, and with PyTorch where it has the function and its options."""
    try:
        backward, names = differentiated(graph, names)
    except GraphError as error:
        if not grows(error):
            raise
        pytest.skip(str(error))
    with np.errstate(all="ignore"):
        expected = run(backward, feeds)
    found = compile(backward).run(feeds)
    assert found.keys() == expected.keys()
    for name in names:
        array = expected[f"grad.{name}"]
        assert array.shape == feeds[name].shape and array.dtype == feeds[name].dtype
        assert_near(found[f"grad.{name}"], array, max(20 * case.tolerance, 2e-4), 1e-3)
    if op.name in FUNCTIONS and all(map(is_wide, feeds.values())):
        try:
            others = torch_gradients(op, case, names)
        except UnsupportedError:
            return
        for name, other in others.items():
            assert_near(found[f"grad.{name}"], other, 1e-4, 1.0)


def is_wide(x):
    """Whether an array has no type narrower than f32."""
    element = dtype(x.dtype)
    return element.bits >= 32 or not (element.is_float or element.is_complex)


def assert_near(found, expected, tolerance, least):
    """Errors are relative to the largest finite number, or to `least` where terms cancel."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    found, expected = found.astype(np.complex128), expected.astype(np.complex128)
    finite = np.isfinite(expected)
    scale = max(np.max(np.abs(expected[finite]), initial=0.0), least)
    assert np.max(np.abs(found - expected)[finite], initial=0.0) <= tolerance * scale
