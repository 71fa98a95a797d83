"""The output error of static ranges, and which of them the search replaces."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.ops.core.builder import Builder
from bitwright.quant.calibration.run import CalibrationRun
from bitwright.quant.data.batches import Batches
from bitwright.quant.model.points import find_points
from bitwright.quant.model.sensitivity import Losses, SensitivityAnalysis
from bitwright.quant.model.weights.choose import static_activation


def chain(rng):
    """Two 1x1 convolutions."""
    b = Builder()
    x = b.input("x", "f32[1, 16, 12, 12]")
    weight = rng.normal(size=(24, 16, 1, 1)).astype(np.float32)
    h = b.relu(b.conv(x, weight, name="first"))
    y = b.conv(h, rng.normal(size=(8, 24, 1, 1)).astype(np.float32), name="second")
    return b.build(y=y)


def batches(rng, count=8):
    return [{"x": rng.normal(size=(1, 16, 12, 12)).astype(np.float32)} for _ in range(count)]


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_output_error_equals_that_of_the_quantized_value(rng):
    graph, data = chain(rng), batches(rng)
    points = find_points(graph)
    calibration = CalibrationRun(graph, points, Batches(data, graph), None, None)
    calibration.run(False)
    stats = calibration.stats
    activations = {point: static_activation(stats[point.name], smooth=False) for point in points}
    sensitivity = SensitivityAnalysis(graph, activations, data[:2], None)
    float_model = bw.compile(graph)
    first = points[0]
    losses = Losses()
    for batch in data[:2]:
        held = activations[first].range.round_trip(batch["x"])
        losses.add(float_model.run(batch), float_model.run({"x": held}))
    assert sensitivity.output_error(first) == pytest.approx(losses.worst, rel=1e-3)
    assert sensitivity.output_error() == 0
    for batch, expected in zip(data, sensitivity.expected, strict=False):
        np.testing.assert_array_equal(expected["y"], float_model.run(batch)["y"])


def test_batches_after_a_negligible_error_do_not_run(rng):
    graph, data = chain(rng), batches(rng)
    points = find_points(graph)
    calibration = CalibrationRun(graph, points, Batches(data, graph), None, None)
    calibration.run(False)
    activations = {s: static_activation(calibration.stats[s.name], smooth=False) for s in points}
    one, two = (SensitivityAnalysis(graph, activations, data[:count], None) for count in (1, 2))
    alone = one.output_error(points[0])
    assert two.output_error(points[0], negligible=alone) == alone
    assert two.output_error(points[0], negligible=alone / 2) == two.output_error(points[0]) != alone


def test_static_ranges_are_replaced_until_the_outputs_meet_the_limit(rng):
    graph, data = chain(rng), batches(rng)
    schemes = {}
    for wanted in (20.0, 50.0, 200.0):
        found = bw.quantize(graph, data, {"static_sqnr_db": wanted, "min_int8_fraction": 0.0})
        schemes[wanted] = [layer.scheme for layer in found.report.layers]
    assert schemes[20.0] == ["static", "static"]
    assert schemes[50.0] != ["static", "static"]
    assert "static" not in schemes[200.0]


def test_the_search_keeps_the_minimum_int8_fraction(rng):
    options = {"static_sqnr_db": 200.0, "min_int8_fraction": 1.0}
    found = bw.quantize(chain(rng), batches(rng), options)
    assert found.report.int8_mac_fraction == 1.0


def test_schemes_that_the_recipe_names_are_not_replaced(rng):
    options = {"static_sqnr_db": 200.0, "schemes": {"first": "static"}}
    found = bw.quantize(chain(rng), batches(rng), options)
    assert found.report.layers[0].scheme == "static"
