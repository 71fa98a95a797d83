"""Statically quantized convolutions are bit-identical in ONNX Runtime with its defaults."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import onnx
import pytest
from onnx_runs import checked, run_ort

import bitwright as bw
from bitwright.frontend.onnx import load
from bitwright.ir.graph import constant_value
from other_runtimes import exact_onnxruntime

SHAPE = (2, 3, 24, 24)


def network(between, spread=1.5):
    """Inverted residuals whose channels differ by decades, with `between` after convolutions."""
    rng = np.random.default_rng(0)
    b = bw.Builder("residuals")

    def conv(x, columns, taps=1, groups=1, **attrs):
        terms = x.shape[1] // groups
        w = rng.normal(size=(columns, terms, taps, taps)) / np.sqrt(terms * taps**2 / 2)
        w *= 10 ** rng.uniform(-spread / 2, spread / 2, (columns, 1, 1, 1))
        pads = (taps // 2,) * 4
        bias = rng.normal(size=columns).astype(np.float32)
        return b.conv(x, w.astype(np.float32), bias, pads=pads, groups=groups, **attrs)

    def block(x, wide, columns):
        y = between(b, conv(x, wide))
        y = between(b, conv(y, wide, 3, groups=wide))
        return conv(y, columns)

    x = between(b, conv(b.input("x", "f32[n, 3, 24, 24]"), 16, 3, strides=(2, 2)))
    x = block(x, 32, 12)
    x = b.add(x, block(x, 72, 12))
    x = b.add(x, block(x, 72, 12))
    return b.build(y=conv(between(b, conv(x, 40)), 9))


def quantized(between):
    rng = np.random.default_rng(1)
    data = [{"x": rng.normal(size=SHAPE).astype(np.float32)} for _ in range(6)]
    recipe = {"base": "int8-static", "consumer": "onnxruntime"}
    return bw.quantize(network(between), data, recipe).graph, data


BETWEEN = {
    "relu6": lambda b, y: b.clip(y, 0.0, 6.0),
    "narrow clip": lambda b, y: b.clip(y, -1.0, 2.5),
    "relu": lambda b, y: b.relu(y),
    "affine": lambda b, y: b.add(b.mul(b.clip(y, 0.0, 6.0), np.float32(1.3)), np.float32(0.2)),
}


@exact_onnxruntime
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_quantized_values_are_the_same_in_onnx_runtime(between):
    graph, _ = quantized(between)
    model = checked(graph, consumer="onnxruntime")
    named = {info.name: info for info in model.graph.value_info}
    told = onnx.ModelProto()
    told.CopyFrom(model)
    qvalues = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    told.graph.output.extend(named[name] for name in qvalues)
    rng = np.random.default_rng(2)
    given = {"x": rng.normal(size=SHAPE).astype(np.float32)}
    for file in (model, told):
        ours = bw.compile(load(file)).run(given)
        for name, theirs in run_ort(file, given).items():
            np.testing.assert_array_equal(ours[name], theirs, err_msg=name)
    np.testing.assert_array_equal(bw.compile(graph).run(given)["y"], ours["y"])


def test_clipping_keeps_the_accuracy():
    graph, (batch, *_) = quantized(BETWEEN["relu6"])
    exact = bw.compile(network(BETWEEN["relu6"])).run(batch)["y"]
    lost = bw.compile(graph).run(batch)["y"] - exact
    assert 10 * np.log10((exact**2).sum() / (lost**2).sum()) > 18


def test_factors_are_folded_into_constants():
    graph, _ = quantized(BETWEEN["affine"])
    count = lambda graph: sum(node.op == "mul" for node in graph.nodes)
    inputs_of_sums = 4  # operands of an addition and the input have separate factors
    assert count(network(BETWEEN["affine"])) <= count(graph)
    assert count(graph) <= count(network(BETWEEN["affine"])) + inputs_of_sums


def test_a_reader_that_falls_back_to_float_needs_a_power_of_two_scale(monkeypatch):
    """The fallback removes the quantization that follows the convolution directly."""
    rng = np.random.default_rng(1)
    b = bw.Builder("two")
    filters = [rng.normal(size=(8, terms, 3, 3)).astype(np.float32) for terms in (3, 8)]
    first = b.relu(b.conv(b.input("x", "f32[n, 3, 24, 24]"), filters[0]))
    graph = b.build(y=b.conv(first, filters[1]))
    data = [{"x": rng.normal(size=SHAPE).astype(np.float32)} for _ in range(4)]
    asked = {"min_output_sqnr_db": 200, "schemes": {"*": "static"}, "consumer": "onnxruntime"}

    def scale_of_first(fallback):
        monkeypatch.setattr(import_module("bitwright.quant.model.stages"), "fallback", fallback)
        found = bw.quantize(graph, data, recipe=asked).graph
        makers = {value: node for node in found.nodes for value in node.outputs}
        conv = next(node for node in found.nodes if node.op == "conv")
        return np.frexp(constant_value(makers[conv.inputs[0]].inputs[1]))[0]

    def without_second(choices, stats, recipe):
        return [choices[0], replace(choices[1], scheme="float", activation=None)]

    assert scale_of_first(lambda choices, *_: choices) != 0.5
    assert scale_of_first(without_second) == 0.5
