"""bw.quantize from the ranges of bw.calibrate: static schemes, and nothing is measured."""

import numpy as np
import pytest
from small_models import batches as rows
from small_models import branches, convolution, perceptron

import bitwright as bw
from bitwright.errors import CalibrationError


def images(count=3):
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(size=(2, 3, 9, 9)).astype(np.float32)} for _ in range(count)]


def sqnr(model, quantized, batch):
    exact = bw.compile(model).run(batch)
    found = bw.compile(quantized).run(batch)
    return min(
        10 * np.log10((exact[n] ** 2).sum() / ((exact[n] - found[n]) ** 2 + 1e-20).sum())
        for n in exact
    )


@pytest.mark.parametrize(("graph", "data"), [(perceptron(), rows(4)), (convolution(), images())])
def test_ranges_give_static_schemes_and_the_report_says_so(graph, data, tmp_path):
    ranges = bw.calibrate(graph, data)
    found = bw.quantize(graph, statistics=ranges)
    assert {layer.scheme for layer in found.report.layers} == {"static"}
    assert all("the range" in layer.reason for layer in found.report.layers)
    assert not found.report.is_measured and not found.report.output_sqnr_db
    (note,) = found.report.notes
    assert f"saved ranges of {len(data)} batches" in note and "nothing was measured" in note
    assert "outputs not measured" in found.report.summary()
    assert sqnr(graph, found, data[0]) > 25
    ranges.save(tmp_path / "ranges")
    again = bw.quantize(graph, statistics=tmp_path / "ranges")
    arrays = lambda q: [v.node.attrs["value"].tobytes() for v in q.graph.constants]
    assert arrays(again) == arrays(found)
    assert arrays(bw.quantize(graph, statistics=str(tmp_path / "ranges"))) == arrays(found)


def test_the_scale_is_that_of_the_range():
    graph, data = perceptron(), rows(4)
    found = bw.quantize(graph, statistics=bw.calibrate(graph, data))
    node = next(n for n in found.graph.nodes if n.name == "x.quantized")
    x = np.concatenate([batch["x"] for batch in data])
    width = (max(x.max(), 0) - min(x.min(), 0)) / 255
    assert node.inputs[1].node.attrs["value"] == pytest.approx(width, rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "schemes"),
    [
        ("int8-dynamic", {"dynamic_per_token"}),
        ("w8", {"weight_only"}),
        ({"schemes": {"m": "dynamic_per_tensor"}}, {"dynamic_per_tensor", "static"}),
        ({"ignore": ["m"]}, {"float", "static"}),
        ({"symmetric": True}, {"static"}),
        ({"consumer": "onnxruntime"}, {"static"}),
        (bw.QuantConfig(activations="static"), {"static"}),
    ],
)
def test_recipes_apply(recipe, schemes):
    graph, data = perceptron(), rows(4)
    found = bw.quantize(graph, None, recipe, statistics=bw.calibrate(graph, data))
    assert {layer.scheme for layer in found.report.layers} == schemes
    assert sqnr(graph, found, data[0]) > 25


def test_power_of_two_scales_of_convolutions():
    graph, data = convolution(), images()
    ranges = bw.calibrate(graph, data)
    found = bw.quantize(graph, recipe={"consumer": "onnxruntime"}, statistics=ranges)
    assert sqnr(graph, found, data[0]) > 25


def test_values_without_a_range_stay_float():
    graph, data = perceptron(), rows(4)
    found = bw.quantize(graph, statistics=bw.calibrate(graph, data, values=["x"]))
    reasons = {layer.name: (layer.scheme, layer.reason) for layer in found.report.layers}
    assert reasons["m"][0] == "static"
    assert reasons["y"] == ("float", "the statistics have no range of its input")
    zeros = [{"x": np.zeros((2, 8), np.float32)}]
    found = bw.quantize(graph, statistics=bw.calibrate(graph, zeros))
    assert {layer.scheme for layer in found.report.layers} == {"float"}
    assert "zero on all data" in found.report.layers[0].reason


def test_a_model_without_products_is_left_unchanged():
    graph = branches()
    data = [{"flag": np.array(True), "x": np.ones(3, np.float32)}]
    assert not bw.quantize(graph, statistics=bw.calibrate(graph, data)).report.layers


def test_ranges_and_data_together_are_an_error():
    graph, data = perceptron(), rows(2)
    with pytest.raises(CalibrationError, match="Ranges"):
        bw.quantize(graph, data, statistics=bw.calibrate(graph, data))
