"""Files that bitwright writes, read by onnx and bitwright, without another runtime."""

import numpy as np
import onnx
import pytest

import bitwright as bw
from bitwright import demo

RECIPES = ("int8", "int8-static", "int8-dynamic", "w8", "w4")


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_file_is_valid_and_gives_the_results_of_the_graph(tmp_path, recipe):
    path = tmp_path / "model.onnx"
    graph = bw.load(demo.model_path())
    if recipe is not None:
        graph = bw.quantize(graph, demo.calibration(), recipe=recipe).graph
    graph.save(path)
    onnx.checker.check_model(path)
    inputs, labels = demo.held_out()
    expected = bw.compile(graph).run(inputs)["logits"]
    found = bw.compile(path).run(inputs)["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert (found.argmax(1) == labels).mean() > 0.98


@pytest.mark.parametrize("suffix", [".bw", ".txt", ".onnx"])
def test_every_format_round_trips(tmp_path, suffix):
    b = bw.Builder("m")
    x = b.input("x", "f32[batch, 5]")
    w = b.parameter("w", np.arange(15, dtype=np.float32).reshape(5, 3))
    graph = b.build(y=b.softmax(b.matmul(x, w)))
    graph.save(tmp_path / f"m{suffix}")
    feeds = {"x": np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)}
    again = bw.load(tmp_path / f"m{suffix}")
    found, expected = (bw.compile(g).run(feeds)["y"] for g in (again, graph))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
