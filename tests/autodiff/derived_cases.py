"""What derived tests of gradients run on: the samples of every differentiable op, and variants of
their shapes."""

import numpy as np
import pytest
from finite_differences import projected, stream, widened, widened_attrs

from bitwright.autodiff.grad import grad
from bitwright.errors import GraphError
from bitwright.ir import dtype
from bitwright.ops.core.opdef import NotYet
from bitwright.ops.core.registry import all_ops

OPS = {name: op for name, op in all_ops().items() if callable(op.grad) and op.grad is not NotYet}
# Ops with straight-through gradients, which are no derivatives (`tests/ops/test_fake_quantize.py`).
STRAIGHT_THROUGH = ("fake_quantize", "fake_binarize", "fake_dynamic_quantize")
DIFFERENTIABLE = {name: op for name, op in OPS.items() if name not in STRAIGHT_THROUGH}


def widest(op, inputs, attrs):
    """The graph of an op in f64, its feeds and the names of the differentiable inputs."""
    return projected(op, [widened(x) for x in inputs], widened_attrs(attrs))


def differentiated(graph, names):
    """The graph with gradients, and the names without operands that a rule refuses (boxes)."""
    try:
        return grad(graph, "loss", wrt=names), names
    except GraphError as error:
        kept = [name for name in names if f"by %{name} is asked for" not in str(error)]
        if not kept or kept == names:
            raise
        return differentiated(graph, kept)


def grows(error):
    """Whether a loop has no gradient because a carried value changes its size."""
    return "changes its size between iterations" in str(error)


def first_samples(op):
    """Numbers of samples: the first two, and each that brings an operand or kind of operand which
    none before it has."""
    found, seen = [], set()
    for number, case in enumerate(op.samples()):
        new = {(i, x.dtype.kind) for i, x in enumerate(case.inputs) if x is not None}
        if number < 2 or new - seen:
            found.append(number)
        seen |= new
    return found


def sample_cases():
    """Ops and samples as parameters of tests; those after the first ones are exhaustive."""
    for op in DIFFERENTIABLE.values():
        chosen = first_samples(op)
        for i, case in enumerate(op.samples()):
            marks = [] if i in chosen else [pytest.mark.exhaustive]
            yield pytest.param(op, case, id=f"{op.name}-{i}", marks=marks)


def of_size(x, old, new, rng):
    """The array with `new` elements along each axis that has `old`; more floats are drawn."""
    shape = tuple(new if size == old else size for size in x.shape)
    if new <= old or not (x.size and dtype(x.dtype).is_float):
        for axis, size in enumerate(x.shape):
            x = np.take(x, np.arange(new) % size, axis=axis) if size == old else x
        return x
    finite = x[np.isfinite(x)].astype(np.float64)
    return rng.uniform(finite.min(initial=0), finite.max(initial=1), shape).astype(x.dtype)


def shape_variants(inputs, seed=0):
    """Names and operands: every distinct size in turn becomes 1, 0 and a random one, and each axis
    of each operand becomes 1 or, in front, vanishes.

    An op takes only those that its inference accepts.
    """
    rng, seen = stream(200 + seed), {_shapes(inputs)}
    has_indices = any(x is not None and x.dtype.kind in "iu" for x in inputs)

    def new(name, changed):
        key = _shapes(changed)
        if key not in seen:
            seen.add(key)
            yield name, changed

    for old in sorted({size for x in inputs if x is not None for size in x.shape} - {0}):
        # more indices would repeat, and what is written twice has no gradient
        other = int(rng.integers(2, max(old, 3) if has_indices else 10))
        for size in (1, 0, other):
            changed = [None if x is None else of_size(x, old, size, rng) for x in inputs]
            yield from new(f"{old} to {size}", changed)
    for i, x in enumerate(inputs):
        if x is None or 0 in x.shape:
            continue
        for axis in range(x.ndim):
            yield from new(f"axis {axis} of in{i} to 1", _with(inputs, i, np.take(x, [0], axis)))
        if x.ndim:
            yield from new(f"in{i} without axis 0", _with(inputs, i, np.asarray(x[0])))


def _with(inputs, position, x):
    return [*inputs[:position], x, *inputs[position + 1 :]]


def _shapes(inputs):
    return tuple(None if x is None else x.shape for x in inputs)
