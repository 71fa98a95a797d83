"""Files for the default consumer load in OpenVINO and are as accurate there."""

import numpy as np
import pytest

import bitwright as bw
from quantized_kinds import KINDS, RECIPES, Draw

openvino = pytest.importorskip("openvino")
STEP = 3.0
"""Decibels that OpenVINO may lose where it quantizes activations of dense layers its own way."""


@pytest.fixture(scope="module")
def core():
    return openvino.Core()


def sqnr(exact, found):
    noise = ((exact.astype(np.float64) - found) ** 2).sum()
    return 10 * np.log10((exact.astype(np.float64) ** 2).sum() / max(noise, 1e-30))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_default_files_open_and_are_right(core, kind, recipe, tmp_path):
    graph, feeds = KINDS[kind](Draw())
    path = tmp_path / "model.onnx"
    bw.quantize(graph, [feeds() for _ in range(6)], recipe=recipe).save(path)
    batch = feeds()
    exact, ours = bw.compile(graph).run(batch)["y"], bw.compile(path).run(batch)["y"]
    config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(str(path)), "CPU", config)
    found = compiled(batch)[0]
    assert sqnr(exact, found) > sqnr(exact, ours) - STEP
