"""bw.QuantConfig: the typed form of a recipe."""

import numpy as np
import pytest
from small_models import batches, perceptron

import bitwright as bw
from bitwright.errors import BitwrightError
from bitwright.quant import PerAxis, PerGroup, PerTensor, PerToken, QuantConfig
from bitwright.quant.model.recipe import RECIPES, recipe


def test_the_default_is_the_default_recipe():
    assert QuantConfig().to_recipe() == RECIPES["int8"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (QuantConfig(activations="static"), "int8-static"),
        (QuantConfig(activations="static", activation_granularity=PerTensor()), "int8-static"),
        (QuantConfig(activations="dynamic"), "int8-dynamic"),
        (QuantConfig(activations="dynamic", activation_granularity=PerToken()), "int8-dynamic"),
        (
            QuantConfig(activations="dynamic", activation_granularity=PerTensor()),
            {"base": "int8-dynamic", "schemes": {"*": "dynamic_per_tensor"}},
        ),
        (QuantConfig(activations=None), "w8"),
        (QuantConfig("int4", activations=None), "w4"),
        (QuantConfig("int4", PerAxis(0), activations=None), {"base": "w4", "block": 0}),
        (QuantConfig("int2", PerGroup(64), activations=None),
         {"base": "w4", "weight_bits": 2, "block": 64}),
        (QuantConfig("mxfp4", activations=None), "mxfp4"),
        (QuantConfig("f8", PerGroup(64), "nearest", None),
         {"base": "f8", "block": 64, "rounding": "nearest"}),
        (
            QuantConfig(
                weight_rounding="adaround",
                symmetric_activations=True,
                smoothquant=False,
                bias_correction=False,
                ignore=("lm_head",),
                schemes={"re:.*down": "dynamic_per_tensor"},
                targets=("matmul",),
                min_output_sqnr_db=30.0,
                min_layer_sqnr_db=20.0,
                min_int8_fraction=0.5,
                consumer="onnxruntime",
            ),
            {
                "rounding": "adaround",
                "symmetric": True,
                "smooth": False,
                "bias_correction": False,
                "ignore": ["lm_head"],
                "schemes": {"re:.*down": "dynamic_per_tensor"},
                "targets": ["matmul"],
                "min_output_sqnr_db": 30.0,
                "min_layer_sqnr_db": 20.0,
                "min_int8_fraction": 0.5,
                "consumer": "onnxruntime",
            },
        ),
    ],
)  # fmt: skip
def test_it_converts_to_a_recipe(config, text):
    assert config.to_recipe() == recipe(text)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QuantConfig("int3"), r"weight_dtype .*expected int8, int4, int2, f8.*found .int3."),
        (QuantConfig("mxfp4"), "activations with mxfp4 weights"),
        (QuantConfig("mxfp4", PerAxis(0), activations=None), "weight_granularity of mxfp4"),
        (QuantConfig(weight_granularity=PerTensor()), r"expected PerAxis\(0\), PerGroup"),
        (QuantConfig(weight_granularity=PerAxis(1)), r"found PerAxis\(axis=1\)"),
        (QuantConfig(activations="sometimes"), "expected auto, static, dynamic, None"),
        (QuantConfig(activations="static", activation_granularity=PerToken()), "of static"),
        (QuantConfig(activations=None, activation_granularity=PerToken()), "of None"),
        (QuantConfig(weight_rounding="up"), "no rounding 'up'"),
        (QuantConfig(min_int8_fraction=2.0), "min_int8_fraction"),
        (QuantConfig(activations="dynamic", symmetric_activations=True), "symmetric"),
    ],
)
def test_what_does_not_exist_is_an_error(config, message):
    with pytest.raises(BitwrightError, match=message):
        bw.quantize(perceptron(), batches(2), config)


def test_quantize_takes_one():
    data = batches(4)
    found = bw.quantize(perceptron(), data, bw.QuantConfig(activations="static", ignore=("y",)))
    assert {n.name: n.scheme for n in found.report.layers} == {"m": "static", "y": "float"}
    grouped = bw.QuantConfig("int4", PerGroup(4), activations=None)
    text = {"base": "w4", "block": 4}
    arrays = [
        [v.node.attrs["value"] for v in bw.quantize(perceptron(), data, form).graph.constants]
        for form in (grouped, text)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*arrays, strict=True))
