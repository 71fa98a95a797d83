"""Variants of the official cases: operands as constants, sizes as symbols.

The cases have axes, shapes and scales as inputs, where exporters write constants, and static sizes,
where exporters write symbolic ones. The results must not depend on that.
"""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bitwright.frontend.onnx import conformance

pytestmark = pytest.mark.skipif(
    not onnx.__version__.startswith("1.23."), reason="the cases are those of onnx 1.23"
)
ROUNDED = {"test_attention_4d_causal_fp16_expanded"}


def with_constants(case, every):
    """Vectors of integers, or all operands but the first, become initializers."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    (inputs, expected), *_ = case.data
    if len(inputs) != len(model.graph.input):
        return None
    infos, arrays = [], []
    for place, (info, value) in enumerate(zip(model.graph.input, inputs, strict=True)):
        value = conformance.plain(value)
        fixed = isinstance(value, np.ndarray) and (
            (every and place > 0) or (value.dtype.kind in "iub" and value.ndim <= 1)
        )
        if fixed:
            model.graph.initializer.append(numpy_helper.from_array(value, info.name))
        else:
            infos.append(info)
            arrays.append(value)
    if not model.graph.initializer:
        return None
    kept = [onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in infos]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return replace(case, model=model, data=[(arrays, expected)])


def with_symbols(case):
    """Every size of every input gets a distinct name; outputs are not declared."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for place, info in enumerate(model.graph.input):
        if info.type.HasField("tensor_type"):
            for axis, dim in enumerate(info.type.tensor_type.shape.dim):
                dim.dim_param = f"n{place}_{axis}"
    for info in model.graph.output:
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    return replace(case, model=model)


@pytest.fixture(scope="module")
def cases():
    found = [*conformance.node_cases(), *conformance.disk_cases()]
    skipped = ("test_bernoulli", "test_image_decoder", "test_gradient_of")
    return [c for c in found if not c.name.startswith(skipped) and c.name not in ROUNDED]


def faults(cases):
    results = conformance.run_all(case for case in cases if case is not None)
    return {r.name: r.reason for r in results if r.status != conformance.PASS}


def test_integer_operands_as_constants(cases):
    assert not faults(with_constants(case, every=False) for case in cases)


@pytest.mark.slow
def test_all_operands_as_constants(cases):
    assert not faults(with_constants(case, every=True) for case in cases)


@pytest.mark.slow
def test_sizes_as_symbols(cases):
    assert not faults(with_symbols(case) for case in cases)


@pytest.mark.slow
def test_constants_and_symbols(cases):
    static = (with_constants(case, every=False) for case in cases)
    assert not faults(with_symbols(case) for case in static if case is not None)
