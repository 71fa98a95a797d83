"""`bw.diff`: two quantized models, layer by layer."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright.cli import main
from bitwright.ir import container
from quantized_kinds import KINDS, Draw


@pytest.fixture(scope="module")
def case():
    graph, feeds = KINDS["dense"](Draw())
    return graph, [feeds() for _ in range(4)]


@pytest.fixture(scope="module")
def static(case):
    return bw.quantize(*case, recipe="int8-static")


def test_equal_models(static, tmp_path):
    found = bw.diff(static, static)
    assert found.is_same and len(found.layers) == 2
    static.save(tmp_path / "a.onnx")
    static.save(tmp_path / "b.bw")
    assert bw.diff(tmp_path / "a.onnx", tmp_path / "a.onnx").is_same
    result = CliRunner().invoke(main, ["diff", f"{tmp_path}/a.onnx", f"{tmp_path}/a.onnx"])
    assert result.exit_code == 0 and "2 layers matched, 0 differ" in result.stdout


def test_the_stored_type_alone(static, tmp_path):
    for kind in ("u8", "i8"):
        static.save(tmp_path / f"{kind}.onnx", weight_type=kind, proof=False)
    found = bw.diff(tmp_path / "u8.onnx", tmp_path / "i8.onnx")
    assert [layer.changes for layer in found.layers] == [["weight type u8 -> i8"]] * 2
    assert all(layer.values_changed == 0 for layer in found.layers)


def test_scheme_bits_and_scales(case, static, tmp_path):
    other = bw.quantize(*case, recipe={"base": "w4", "rounding": "nearest"})
    static.save(tmp_path / "a.onnx", proof=False)
    other.save(tmp_path / "b.onnx", proof=False)
    np.save(tmp_path / "x.npy", case[1][0]["x"])
    arguments = ["diff", f"{tmp_path}/a.onnx", f"{tmp_path}/b.onnx", "--json"]
    result = CliRunner().invoke(main, [*arguments, "--data", f"{tmp_path}/x.npy"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    changes = found["layers"][0]["changes"]
    assert "scheme static -> weight_only" in changes
    assert any("8 -> 4 bits" in text for text in changes)
    assert any(text.startswith("weights: ") for text in changes)
    assert found["outputs"]["y"]["sqnr_db"] > 5
    assert found["file_bytes"][0] > found["file_bytes"][1]


def test_one_changed_value(static):
    weight = max(static.graph.constants, key=lambda v: v.node.attrs["value"].size)
    changed = np.array(weight.node.attrs["value"])
    changed.flat[7] += 1 if changed.flat[7] < 100 else -1
    graph = _with_value(static.graph, weight.name, changed)
    found = bw.diff(static, graph)
    (layer,) = found.changed
    assert layer.values_changed == 1 and layer.weight_sqnr_db > 30


def _with_value(graph, name, array):
    raw = container.to_bytes(graph)
    old = graph.values[name].node.attrs["value"].tobytes()
    return container.from_bytes(raw.replace(old, array.tobytes()))


def test_layers_of_one_model_only(case, static):
    b = bw.Builder("other")
    w = np.ones((7, 5), np.float32)
    graph = b.build(y=b.matmul(b.input("x", "f32[n, 7]"), w, name="elsewhere"))
    found = bw.diff(static, graph)
    assert len(found.only_first) == 2 and len(found.only_second) == 1
    assert "only in the second model" in str(found)
