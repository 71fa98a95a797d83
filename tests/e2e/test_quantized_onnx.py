"""Models from ONNX Runtime's quantizer run in integers, with the results of ONNX Runtime."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization

import bitwright as bw
from bitwright import pipeline
from bitwright.passes.manager import run_passes

RNG = np.random.default_rng(0)
SAMPLES = [RNG.normal(size=(2, 3, 12, 12)).astype(np.float32) for _ in range(4)]


def network():
    """A first layer, a depthwise one, a residual, a pool and two dense layers."""
    arrays = {
        "w1": RNG.normal(size=(16, 3, 3, 3)) / 5,
        "b1": RNG.normal(size=16) / 5,
        "w2": RNG.normal(size=(16, 1, 3, 3)) / 3,
        "b2": RNG.normal(size=16) / 5,
        "w3": RNG.normal(size=(16, 16, 1, 1)) / 4,
        "w4": RNG.normal(size=(144, 20)) / 12,
        "b4": RNG.normal(size=20) / 5,
        "w5": RNG.normal(size=(10, 20)) / 5,
        "b5": RNG.normal(size=10) / 5,
    }
    tensors = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    pads = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    nodes = [
        helper.make_node("Conv", ["x", "w1", "b1"], ["c1"], strides=[2, 2], **pads),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], group=16, **pads),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("Conv", ["r2", "w3"], ["c3"], kernel_shape=[1, 1]),
        helper.make_node("Add", ["c3", "r1"], ["s"]),
        helper.make_node("Relu", ["s"], ["r3"]),
        helper.make_node("MaxPool", ["r3"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w4"], ["m"]),
        helper.make_node("Add", ["m", "b4"], ["d"]),
        helper.make_node("Sigmoid", ["d"], ["g"]),
        helper.make_node("Gemm", ["g", "w5", "b5"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 10])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


class Reader(quantization.CalibrationDataReader):
    def __init__(self):
        self.samples = iter(SAMPLES)

    def get_next(self):
        sample = next(self.samples, None)
        return None if sample is None else {"x": sample}


U8, I8 = quantization.QuantType.QUInt8, quantization.QuantType.QInt8
FORMS = {
    "qdq": (quantization.QuantFormat.QDQ, U8, I8, True),
    "qdq per tensor": (quantization.QuantFormat.QDQ, U8, U8, False),
    "qdq signed": (quantization.QuantFormat.QDQ, I8, I8, True),
    "operators": (quantization.QuantFormat.QOperator, U8, I8, True),
}


@pytest.mark.parametrize("form", [*FORMS, "dynamic"])
def test_answers_are_those_of_onnx_runtime(form, tmp_path):
    source, made = tmp_path / "f32.onnx", tmp_path / "int8.onnx"
    onnx.save(network(), source)
    if form == "dynamic":
        quantization.quantize_dynamic(source, made, per_channel=True)
    else:
        kind, activations, weights, per_channel = FORMS[form]
        quantization.quantize_static(
            source,
            made,
            Reader(),
            quant_format=kind,
            activation_type=activations,
            weight_type=weights,
            per_channel=per_channel,
        )
    session = ort.InferenceSession(made, providers=["CPUExecutionProvider"])
    exe = bw.compile(made, threads=2)
    assert not list(exe.engine.schedule.fallbacks)
    graph = run_passes(bw.load(made), (*pipeline.INFERENCE, *pipeline.CPU))
    ops = {node.op for _, node in graph.walk()}
    assert ops.isdisjoint({"matmul", "conv", "quantize", "dequantize"})
    assert {"integer_matmul", "integer_conv"} <= ops
    for x in SAMPLES:
        (want,), (found,) = session.run(None, {"x": x}), exe.run({"x": x}).values()
        steps = np.abs(want - found).max() / (np.ptp(want) / 255)
        assert steps < 2.5, f"{steps:.1f} steps of the output"
