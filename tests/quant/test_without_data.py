"""Weight-only quantization with nearest rounding needs no data."""

import warnings

import numpy as np
import pytest
from small_models import batches, convolution, perceptron

import bitwright as bw
from bitwright import demo
from bitwright.errors import CalibrationError
from bitwright.quant.model.recipe import RECIPES, recipe


def nearest(base, **options):
    return {"base": base, "rounding": "nearest", **options}


def constants(graph):
    return [v.node.attrs["value"] for v in graph.constants]


@pytest.mark.parametrize("base", ["w8", "w4", "f8", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("ranges", ["mse", "peak"])
def test_every_weight_only_recipe_works_without_data(base, ranges):
    rng = np.random.default_rng(0)
    b = bw.Builder("m")
    w = b.parameter("w", rng.normal(size=(64, 48)).astype(np.float32))
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 64]"), w))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = bw.quantize(graph, recipe=nearest(base, ranges=ranges))
    (layer,) = found.report.layers
    assert layer.scheme == "weight_only" and not found.report.is_measured
    assert not found.report.output_sqnr_db and "outputs not measured" in found.report.summary()
    assert "that of its weights" in found.report.notes[0]
    assert found.report.quantized_bytes < 0.4 * found.report.float_bytes
    x = rng.normal(size=(100, 64)).astype(np.float32)
    expected, y = (bw.compile(m).run({"x": x})["y"] for m in (graph, found))
    sqnr = 10 * np.log10((expected**2).sum() / ((expected - y) ** 2).sum())
    assert abs(sqnr - layer.sqnr_db) < 1.5


@pytest.mark.parametrize("make", [perceptron, convolution])
@pytest.mark.filterwarnings("ignore::bitwright.warn.DataWarning")
def test_the_weights_equal_those_with_data(make):
    rules = nearest("w8", ranges="peak", bias_correction=False)
    images = [{"x": np.random.default_rng(0).normal(size=(2, 3, 9, 9)).astype(np.float32)}]
    data = batches(4) if make is perceptron else images
    with_data, without = bw.quantize(make(), data, rules), bw.quantize(make(), recipe=rules)
    assert bw.to_text(with_data.graph) == bw.to_text(without.graph)


def test_the_demo_model_keeps_its_accuracy():
    found = bw.quantize(demo.model_path(), recipe=nearest("w8"))
    inputs, labels = demo.held_out()
    assert (bw.compile(found).run(inputs)["logits"].argmax(1) == labels).mean() > 0.98


def test_ignored_layers_stay_float():
    found = bw.quantize(perceptron(), recipe=nearest("w8", ignore=["m"]))
    schemes = {layer.name: layer.scheme for layer in found.report.layers}
    assert schemes == {"m": "float", "y": "weight_only"}


@pytest.mark.parametrize("base", ["int8", "int8-static", "w8", "w4", "nvfp4"])
def test_other_recipes_need_data_and_the_error_names_one_that_does_not(base):
    assert recipe(base).needs_data
    with pytest.raises(CalibrationError, match=r"expected data.*\"rounding\": \"nearest\""):
        bw.quantize(perceptron(), recipe=base)
    weights_only = RECIPES[base].schemes_allowed == ("weight_only",)
    assert recipe(nearest(base)).needs_data is not weights_only
