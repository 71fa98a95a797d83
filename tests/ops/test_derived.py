"""Tests that every op gets from its declaration alone."""

import numpy as np
import pytest

from bitwright.errors import GraphError
from bitwright.ir import parse, symbol, to_text
from bitwright.ir.dim import UNKNOWN, evaluate
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder, infer_types
from bitwright.ops.core.check import verify
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Kind, NonDifferentiable, NotYet
from bitwright.ops.core.registry import all_ops
from bitwright.ops.core.scalar import NumpyScalars

OPS = all_ops()
CASES = [
    pytest.param(op, case, id=f"{op.name}-{i}")
    for op in OPS.values()
    for i, case in enumerate(op.samples())
]


def build(op, case):
    """A graph of one node, and its inputs."""
    b = Builder(op.name)
    feeds = {f"in{i}": x for i, x in enumerate(case.inputs) if x is not None}
    values = [
        None if x is None else b.input(f"in{i}", TensorType(_dtype(x), x.shape))
        for i, x in enumerate(case.inputs)
    ]
    node = b.node(op.name, values, case.attrs, [])
    return b.build(*node.outputs), node, feeds


def _dtype(array):
    from bitwright.ir import dtype

    return dtype(array.dtype)


@pytest.mark.parametrize("name", OPS)
def test_declaration_is_complete(name):
    op = OPS[name]
    assert op.doc, "says what it computes"
    assert op.grad is NotYet or isinstance(op.grad, NonDifferentiable) or callable(op.grad)
    if op.kind is not Kind.BOUNDARY:
        assert list(op.samples()), "has samples to derive tests from"


@pytest.mark.parametrize("op, case", CASES)
def test_inference_agrees_with_reference(op, case):
    """The interpreter checks every result against the inferred type; this also checks the dtype."""
    graph, node, feeds = build(op, case)
    verify(graph)
    results = run(graph, feeds)
    for value, array in zip(node.outputs, results.values(), strict=True):
        if isinstance(value.type, TensorType):
            assert value.dtype == _dtype(np.asarray(array))
            if value.type.is_static:
                assert value.shape == array.shape


NEEDS_EVERY_SIZE = {"fused": "its operands have the very types that its body declares"}


@pytest.mark.parametrize("op, case", CASES)
def test_symbolic_inference_agrees_with_concrete(op, case):
    """Each distinct size in turn becomes a symbol wherever it stands among the operands.

    An op may refuse a symbol where it needs the size, but not every symbol of a sample.
    """
    graph, _, feeds = build(op, case)
    refusals = []
    results = list(run(graph, feeds).values())
    sizes = {size for x in case.inputs if x is not None for size in x.shape}
    for size in sizes:
        b = Builder(op.name)
        values = []
        for i, x in enumerate(case.inputs):
            shape = () if x is None else tuple(symbol("n") if s == size else s for s in x.shape)
            values.append(None if x is None else b.input(f"in{i}", TensorType(_dtype(x), shape)))
        try:
            _, types = infer_types(op, tuple(values), case.attrs)
        except GraphError as error:
            refusals.append(f"{size}: {error}")
            continue
        for type_, array in zip(types, results, strict=True):
            if isinstance(type_, TensorType):
                shape = [
                    a if s is UNKNOWN else evaluate(s, {"n": size})
                    for s, a in zip(type_.shape, array.shape, strict=True)
                ]
                assert shape == list(array.shape)
    is_refused = bool(sizes) and len(refusals) == len(sizes)
    assert is_refused == (op.name in NEEDS_EVERY_SIZE), refusals


def _has_range(op, case):
    has_range = op.shrinks or op.never_negative or np.isfinite(op.max_abs)
    return has_range and _dtype(case.inputs[0]).is_float


@pytest.mark.parametrize("op, case", [c for c in CASES if _has_range(*c.values)])
def test_declared_range_holds(op, case):
    """`shrinks`, `max_abs` and `never_negative` hold, within rounding."""
    graph, _, feeds = build(op, case)
    y = np.asarray(next(iter(run(graph, feeds).values()))).astype(np.float64)
    y, (x, *_) = y[~np.isnan(y)], [np.asarray(a).astype(np.float64) for a in case.inputs]
    near = 1 + case.tolerance
    assert np.abs(y).max(initial=0) <= op.max_abs * near
    if op.shrinks:
        assert np.abs(y).max(initial=0) <= np.abs(x).max(initial=0) * near
    assert not op.never_negative or (y >= 0).all()


@pytest.mark.parametrize("op, case", CASES)
def test_text_round_trip(op, case):
    graph, _, feeds = build(op, case)
    text = to_text(graph)
    again = parse(text)
    assert to_text(again) == text
    for one, other in zip(
        run(graph, feeds).values(), run(verify(again), feeds).values(), strict=True
    ):
        if isinstance(one, np.ndarray):
            strings = one.dtype == object  # whose bytes are addresses
            assert one.tolist() == other.tolist() if strings else one.tobytes() == other.tobytes()


@pytest.mark.parametrize("op, case", [c for c in CASES if c.values[0].scalar])
def test_scalar_form_agrees_with_reference(op, case):
    graph, node, feeds = build(op, case)
    (expected,) = run(graph, feeds).values()
    wide = [
        None if x is None else x.astype(np.float64) if _dtype(x).is_float else x
        for x in case.inputs
    ]
    with np.errstate(all="ignore"):
        found = op.scalar(NumpyScalars, *wide, **op.call_attrs(node.attrs))
    found = np.broadcast_to(np.asarray(found), expected.shape).astype(np.float64)
    scale = np.abs(expected.astype(np.float64)).max(initial=1e-30)
    np.testing.assert_allclose(
        found, expected.astype(np.float64), rtol=case.tolerance, atol=case.tolerance * scale
    )
