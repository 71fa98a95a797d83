"""Effects of static ranges on the outputs, and which sites are relieved of them."""

import numpy as np
import pytest

import bitwright as bw
from bitwright.ops.builder import Builder
from bitwright.quant.algorithms.choosing import static_coding
from bitwright.quant.data import Batches
from bitwright.quant.effects import Effects, Losses
from bitwright.quant.gathering import Gathering
from bitwright.quant.products import find_sites


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


def test_an_effect_is_that_of_the_value_in_codes(rng):
    graph, data = chain(rng), batches(rng)
    sites = find_sites(graph)
    gathering = Gathering(graph, sites, Batches(data, graph), None, None)
    gathering.run(False)
    evidence = gathering.evidence
    codings = {site: static_coding(evidence[site.name], smooth=False) for site in sites}
    effects = Effects(graph, codings, data[:2], None)
    float_model = bw.compile(graph)
    first = sites[0]
    losses = Losses()
    for batch in data[:2]:
        held = codings[first].range.round_trip(batch["x"])
        losses.add(float_model.run(batch), float_model.run({"x": held}))
    assert effects.together(first) == pytest.approx(losses.worst, rel=1e-3)
    assert effects.together() == 0
    for batch, expected in zip(data, effects.expected, strict=False):
        np.testing.assert_array_equal(expected["y"], float_model.run(batch)["y"])


def test_batches_behind_one_that_loses_little_are_not_asked(rng):
    graph, data = chain(rng), batches(rng)
    sites = find_sites(graph)
    gathering = Gathering(graph, sites, Batches(data, graph), None, None)
    gathering.run(False)
    codings = {s: static_coding(gathering.evidence[s.name], smooth=False) for s in sites}
    one, two = (Effects(graph, codings, data[:count], None) for count in (1, 2))
    alone = one.together(sites[0])
    assert two.together(sites[0], little=alone) == alone
    assert two.together(sites[0], little=alone / 2) == two.together(sites[0]) != alone


def test_sites_are_relieved_until_the_outputs_keep_what_is_asked(rng):
    graph, data = chain(rng), batches(rng)
    schemes = {}
    for wanted in (20.0, 50.0, 200.0):
        found = bw.quantize(graph, data, {"static_sqnr": wanted, "least_share": 0.0})
        schemes[wanted] = [layer.scheme for layer in found.report.layers]
    assert schemes[20.0] == ["static", "static"]
    assert schemes[50.0] != ["static", "static"]
    assert "static" not in schemes[200.0]


def test_no_measured_effect_takes_more_out_of_8_bits_than_the_recipe_allows(rng):
    options = {"static_sqnr": 200.0, "least_share": 1.0}
    found = bw.quantize(chain(rng), batches(rng), options)
    assert found.report.share_in_8_bit == 1.0


def test_what_the_recipe_names_stays(rng):
    options = {"static_sqnr": 200.0, "schemes": {"first": "static"}}
    found = bw.quantize(chain(rng), batches(rng), options)
    assert found.report.layers[0].scheme == "static"
