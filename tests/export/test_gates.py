"""Gated activations: bit-identical to ONNX Runtime in quantized models, one node elsewhere."""

import numpy as np
import onnxruntime
import pytest

import bitwright as bw
from bitwright.export.onnx import export_onnx
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE
from bitwright.target import host
from other_runtimes import exact_onnxruntime

GATES = {
    "silu": {},
    "sigmoid": {},
    "quick_gelu": {},
    "swish": {"alpha": 0.7},
    "gelu": {"approximate": "tanh"},
}


def network(op):
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 64, 64)).astype(np.float32)
    b = bw.Builder("gated")
    gated = getattr(b, op)(b.matmul(b.input("x", "f32[n, 64]"), first), **GATES[op])
    return b.build(y=b.matmul(gated, second))


def rows(count, seed=1):
    return np.random.default_rng(seed).normal(size=(count, 64)).astype(np.float32)


@exact_onnxruntime
@pytest.mark.skipif(not host().has_fma, reason="e^x needs fma to have ONNX Runtime's bits")
@pytest.mark.parametrize("op", GATES)
def test_quantized_values_after_a_gate_are_the_same_in_onnx_runtime(op):
    graph = bw.quantize(network(op), [{"x": rows(16)}]).graph
    model = export_onnx(graph, consumer="onnxruntime")
    assert not {"Sigmoid", "Tanh"} & {node.op_type for node in model.graph.node}
    feeds = {"x": rows(3000, seed=2) * np.float32(2)}
    (theirs,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for source in (graph, model):
        np.testing.assert_array_equal(bw.compile(source).run(feeds)["y"], theirs)


@pytest.mark.parametrize("op", GATES)
def test_a_file_without_quantized_values_names_the_function(op):
    kinds = [node.op_type for node in export_onnx(network(op), opset=17).graph.node]
    assert ("Tanh" if op == "gelu" else "Sigmoid") in kinds and "Exp" not in kinds


@pytest.mark.parametrize("opset", [13, 20, 24])
@pytest.mark.parametrize("op", GATES)
def test_gates_are_imported_as_the_same_ops(op, opset):
    graph = bw.quantize(network(op), [{"x": rows(16)}]).graph
    model = export_onnx(graph, opset=opset, rounding="onnxruntime")
    assert "Exp" in {node.op_type for node in model.graph.node}
    again = run_passes(bw.load(model), INFERENCE)
    assert {"swish": "quick_gelu"}.get(op, op) in {node.op for node in again.nodes}


def test_gates_of_quantized_values_stay_one_node():
    """Runtimes use tables for them."""
    b, scale = bw.Builder("table"), np.float32(0.1)
    qvalues = b.quantize(b.input("x", "f32[n]"), scale, np.uint8(100), to="u8")
    gated = b.sigmoid(b.dequantize(qvalues, scale, np.uint8(100)))
    graph = b.build(b.quantize(gated, np.float32(1 / 256), np.uint8(0), to="u8"))
    model = export_onnx(graph, rounding="onnxruntime")
    assert "Sigmoid" in {node.op_type for node in model.graph.node}
