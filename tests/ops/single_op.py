"""One op on its own: run it on arrays, or infer its types from texts."""

import numpy as np
import torch

from bitwright.ir import dtype, parse_type
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import draw


def evaluate(op, *arrays, **attrs):
    """The result of the op, or a tuple of them; every shape and dtype is checked on the way."""
    b = Builder(op)
    feeds = {f"in{i}": np.asarray(x) for i, x in enumerate(arrays) if x is not None}
    values = [
        None
        if x is None
        else b.input(f"in{i}", TensorType(dtype(np.asarray(x).dtype), np.shape(x)))
        for i, x in enumerate(arrays)
    ]
    node = b.node(op, values, attrs, [])
    results = tuple(run(b.build(*node.outputs), feeds).values())
    return results[0] if len(results) == 1 else results


def infer(op, *types, **attrs):
    """The inferred type, or a tuple of them, for operand types as text."""
    b = Builder(op)
    values = [None if t is None else b.input(f"in{i}", parse_type(t)) for i, t in enumerate(types)]
    results = b.node(op, values, attrs, []).types
    return results[0] if len(results) == 1 else results


def f64(*shape, seed=0):
    return draw(*shape, dtype="f64", seed=seed)


def torch_of(function, *arrays, **options):
    """What a PyTorch function gives for these arrays."""
    result = function(*(None if x is None else torch.tensor(x) for x in arrays), **options)
    return tuple(r.numpy() for r in result) if isinstance(result, tuple) else result.numpy()


def assert_close(found, expected):
    """Equal up to the rounding of f64."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
