"""Models from ONNX Runtime's quantizers and optimizer, made from the demo model."""

import logging
import warnings
from importlib.resources import files

import numpy as np
import onnx
import onnxruntime
import pytest
from one_node import agree, by_bitwright
from onnx import helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import bitwright as bw
from bitwright.passes.lower_integer.lower_integer import lower_integer
from bitwright.passes.manager import run_passes
from bitwright.pipeline import INFERENCE

DEMO = files("bitwright.demo").joinpath("digits.onnx")


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def batch(seed=0):
    (value,) = onnx.load(str(DEMO)).graph.input
    sizes = [dim.dim_value or 4 for dim in value.type.tensor_type.shape.dim]
    numbers = np.random.default_rng(seed).uniform(0, 1, sizes)
    return {value.name: numbers.astype(np.float32)}


class Batches(CalibrationDataReader):
    def __init__(self):
        self.left = iter([batch(1), batch(2)])

    def get_next(self):
        return next(self.left, None)


def ops(path):
    return {(node.domain, node.op_type) for node in onnx.load(str(path)).graph.node}


def check(path, tolerance):
    """Both give the same; quantized values that differ by 1 may add up along the layers."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = batch()
    theirs = session.run(None, feeds)
    agree(theirs, by_bitwright(onnx.load(str(path)), feeds), tolerance)
    agree(theirs, list(bw.compile(path).run(feeds).values()), tolerance)


def check_products_are_of_qvalues(path):
    """The lowered model has no float or 32-bit products."""
    lowered = run_passes(run_passes(bw.load(path), INFERENCE), (lower_integer,))
    names = [node.op for node in lowered.nodes]
    assert "matmul" not in names and "conv" not in names
    assert "integer_conv" in names and "integer_matmul" in names


@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("element", [QuantType.QUInt8, QuantType.QInt8])
def test_static_quantization(tmp_path, form, per_channel, element):
    path = tmp_path / "quantized.onnx"
    quantize_static(
        str(DEMO),
        str(path),
        Batches(),
        quant_format=form,
        per_channel=per_channel,
        activation_type=element,
        weight_type=QuantType.QInt8,
    )
    check(path, 0.05)
    check_products_are_of_qvalues(path)


@pytest.mark.parametrize("weight", [QuantType.QInt8, QuantType.QInt4])
def test_static_quantization_with_ops_of_microsoft(tmp_path, weight):
    path = tmp_path / "quantized.onnx"
    quantize_static(
        str(DEMO),
        str(path),
        Batches(),
        activation_type=QuantType.QUInt16,
        weight_type=weight,
        extra_options={"UseQDQContribOps": True},
    )
    assert ("com.microsoft", "DequantizeLinear") in ops(path)
    check(path, 0.01)


def test_dynamic_quantization(tmp_path):
    proto = onnx.load(str(DEMO))
    del proto.graph.value_info[:]  # the quantizer transposes weights and keeps the old shapes
    path = tmp_path / "quantized.onnx"
    quantize_dynamic(proto, str(path))
    check(path, 1e-3)
    check_products_are_of_qvalues(path)


@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_of_few_bits(tmp_path, symmetric):
    path = tmp_path / "quantized.onnx"
    quantizer = MatMulNBitsQuantizer(
        onnx.load(str(DEMO)), block_size=32, is_symmetric=symmetric, bits=4
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    check(path, 1e-4)


@pytest.mark.parametrize("quantized", [False, True])
def test_optimized_by_a_session(tmp_path, quantized):
    source, path = str(DEMO), tmp_path / "optimized.onnx"
    if quantized:
        source = str(tmp_path / "quantized.onnx")
        quantize_static(str(DEMO), source, Batches())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    assert quantized or "com.microsoft" in {domain for domain, _ in ops(path)}
    check(path, 0.05 if quantized else 1e-5)


@pytest.mark.parametrize("producer", ["onnx.quantize", "another"])
def test_softmax_between_quantized_values_is_what_the_standard_says(producer):
    """As ONNX Runtime computes it before optimization."""
    point, steps = np.array(3, np.uint8), np.array(1 / 255, np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "fine", "point"], ["real"]),
        helper.make_node("Softmax", ["real"], ["soft"]),
        helper.make_node("QuantizeLinear", ["soft", "steps", "none"], ["y"]),
    ]
    constants = {"fine": np.array(0.02, np.float32), "point": point, "steps": steps}
    constants["none"] = np.array(0, np.uint8)
    info = [helper.make_tensor_value_info(n, onnx.TensorProto.UINT8, [400, 9]) for n in "xy"]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "softmax", info[:1], info[1:], weights)
    opsets = [helper.make_opsetid("", 17)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name=producer)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    feeds = {"x": np.random.default_rng(0).integers(0, 256, (400, 9)).astype(np.uint8)}
    theirs = session.run(None, feeds)
    agree(theirs, by_bitwright(proto, feeds), 0)
    agree(theirs, list(bw.compile(bw.load(proto)).run(feeds).values()), 0)


def test_ops_between_dynamic_quantization_round_as_in_the_file():
    """The last bit of the range changes all quantized values; hard swish is written as four ops."""
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.integers(-128, 128, (64, 48)).astype(np.int8),
        "w_scale": rng.uniform(0.001, 0.01, 48).astype(np.float32),
        "bias": rng.normal(size=48).astype(np.float32),
    }
    constants |= {f"c{number}": np.array(number, np.float32) for number in (0, 3, 6)}
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "q_scale", "q_zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "q_zero"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["cast"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Mul", ["q_scale", "w_scale"], ["scales"]),
        helper.make_node("Mul", ["cast", "scales"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["v"]),
        helper.make_node("Add", ["v", "c3"], ["moved"]),
        helper.make_node("Clip", ["moved", "c0", "c6"], ["cut"]),
        helper.make_node("Mul", ["v", "cut"], ["gated"]),
        helper.make_node("Div", ["gated", "c6"], ["swish"]),
        helper.make_node("DynamicQuantizeLinear", ["swish"], ["y", "y_scale", "y_zero"]),
    ]
    kinds = {"x": onnx.TensorProto.FLOAT, "y_scale": onnx.TensorProto.FLOAT}
    shapes = {"x": [50, 64], "y": [50, 48], "y_scale": [], "y_zero": []}
    info = {
        name: helper.make_tensor_value_info(name, kinds.get(name, onnx.TensorProto.UINT8), shape)
        for name, shape in shapes.items()
    }
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = [info[name] for name in ("y", "y_scale", "y_zero")]
    graph = helper.make_graph(nodes, "dynamic", [info["x"]], outputs, weights)
    opsets = [helper.make_opsetid("", 17)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    exe = bw.compile(bw.load(proto))
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for _ in range(5):
        feeds = {"x": rng.normal(size=(50, 64)).astype(np.float32)}
        agree(session.run(None, feeds), list(exe.run(feeds).values()), 0)
