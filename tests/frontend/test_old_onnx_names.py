"""ONNX files that the last release exported: old names in regions and in functions."""

import json

import numpy as np
import pytest

from bitwright import warn
from bitwright.export.onnx import export_onnx
from bitwright.frontend.onnx import load
from bitwright.frontend.onnx.regions import KEY
from bitwright.ops.core.builder import Builder


@pytest.fixture(autouse=True)
def _fresh_warnings():
    warn.forget()
    yield
    warn.forget()


def dynamic_product():
    b = Builder("net")
    x = b.input("x", "f32[n, 8]")
    rows = b.dequantize(*b.dynamic_quantize(x, per_token=True), axis=-1, block=8)
    w = np.random.default_rng(0).integers(-127, 128, (8, 5)).astype(np.int8)
    return b.build(y=b.matmul(rows, b.dequantize(w, np.full(5, 0.01, np.float32), axis=1)))


def attention():
    b = Builder("net")
    x = b.input("x", "f32[1, 2, n, 4]")
    return b.build(y=b.attention(x, x, x, int8=True))


def ops(graph):
    """Ops and attributes, without the metadata that a graph keeps of its file."""
    return [(node.op, node.attrs_text) for node in graph.nodes]


def test_function_of_the_last_release():
    model = export_onnx(dynamic_product(), functions="local", activations="integer")
    expected = ops(load(model))
    named = [*model.functions, *model.graph.node]
    for item in named:
        field = "name" if hasattr(item, "opset_import") else "op_type"
        if getattr(item, field) == "quantized_matmul":
            setattr(item, field, "coded_matmul")
    with pytest.warns(warn.BitwrightWarning, match="'coded_matmul'"):
        assert ops(load(model)) == expected


def test_region_of_the_last_release():
    model = export_onnx(attention())
    expected = ops(load(model))
    (entry,) = [entry for entry in model.metadata_props if entry.key == KEY]
    regions = json.loads(entry.value)
    for region in regions:
        region["attrs"]["in_codes"] = region["attrs"].pop("int8")
    entry.value = json.dumps(regions)
    with pytest.warns(warn.BitwrightWarning, match="'in_codes'"):
        assert ops(load(model)) == expected
    assert any(op == "attention" and "('int8', True)" in attrs for op, attrs in expected)
