"""Composites and their expansions give the same results on the samples of their OpDefs."""

from __future__ import annotations

import numpy as np
import pytest

from bitwright.ir.dtype import dtype
from bitwright.ir.types import TensorType
from bitwright.ops.core.builder import Builder
from bitwright.ops.core.interpret import run
from bitwright.ops.core.opdef import Sample
from bitwright.ops.core.registry import get
from bitwright.passes.simplify.expand_composites import expand_composites
from bitwright.rewrite.trace import Trace

CASES = [
    pytest.param(op, sample, id=f"{op}-{number}")
    for op in ("quantize", "dequantize")
    for number, sample in enumerate(get(op).samples())
]


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_same_numbers(op: str, sample: Sample) -> None:
    b = Builder(op)
    inputs = [
        None if x is None else b.input(f"x{i}", TensorType(dtype(x.dtype), x.shape))
        for i, x in enumerate(sample.inputs)
    ]
    graph = b.build(y=b.op(op, *inputs, **sample.attrs))
    feeds = {f"x{i}": x for i, x in enumerate(sample.inputs) if x is not None}
    expanded = expand_composites(graph, Trace())
    want, found = run(graph, feeds)["y"], run(expanded, feeds)["y"]
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    if want.dtype.kind == "f":
        np.testing.assert_allclose(found, want, rtol=1e-6 if want.dtype.itemsize > 2 else 1e-3)
    else:
        assert (found == want).all()
