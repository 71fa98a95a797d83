"""`compare` on two models, and the commands `compare` and `calibrate`."""

import json
import os
import signal

import numpy as np
import pytest
from click.testing import CliRunner

import bitwright as bw
from bitwright import demo
from bitwright.cli import main
from bitwright.errors import CalibrationError
from bitwright.quant import CalibrationEntry, Ranges, insert_q_dq
from bitwright.quant.data import sources as data_source
from bitwright.report.compare import Distance, compare


def network(noise=0.0, outputs=1, name="h"):
    rng = np.random.default_rng(0)
    b = bw.Builder("network")
    w = [rng.normal(size=(8, 8)).astype(np.float32) for _ in range(2)]
    x = b.input("x", "f32[n, 8]")
    h = b.relu(b.matmul(x, b.parameter("w1", w[0] + np.float32(noise))), name=name)
    y = b.matmul(h, b.parameter("w2", w[1]), name="y")
    return b.build(*[y, h][:outputs])


def data(count=6):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(3, 8)).astype(np.float32) * 10 ** (i % 2) for i in range(count)]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    for i, batch in enumerate(demo.calibration()):
        np.savez(tmp_path / "data" / f"{i}.npz", **batch)
    return tmp_path / "data"


def call(*args, code=0):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code, result.output
    return result.output


def test_a_model_equals_itself():
    found = compare(network(), network(), data())
    assert list(found.outputs) == ["y"] and list(found.layers) == ["h"]
    for one in (*found.outputs.values(), *found.layers.values(), *found.samples):
        assert one.sqnr_db == np.inf and one.cosine == pytest.approx(1) and one.same_top1 == 1
    assert found.as_json()["outputs"]["y"]["sqnr_db"] is None


def test_distances_are_over_all_values():
    first, second = network(), network(noise=0.1)
    found = compare(first, second, data())
    a, b = (
        np.concatenate([bw.compile(g).run({"x": x})["y"] for x in data()]).astype(np.float64)
        for g in (first, second)
    )
    one = found.outputs["y"]
    assert one.sqnr_db == pytest.approx(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()))
    assert one.cosine == pytest.approx((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    assert one.max_error == pytest.approx(np.abs(a - b).max())
    assert one.same_top1 == (a.argmax(-1) == b.argmax(-1)).mean()
    worst = [number for number, _ in found.worst(3)]
    assert len(worst) == 3 and found.samples[worst[0]].sqnr_db <= found.samples[worst[1]].sqnr_db


@pytest.mark.parametrize("budget", ["0", "200", ""])
def test_values_observed_in_several_runs_are_paired(monkeypatch, budget):
    if budget:
        monkeypatch.setenv("BITWRIGHT_TAP_BYTES", budget)
    found = compare(network(), network(noise=0.1), data(2))
    assert found.layers["h"].count == found.outputs["y"].count == 48


def test_a_quantized_graph_against_its_float_graph():
    graph = network()
    pairs = insert_q_dq(graph, {"h": CalibrationEntry.per_tensor(0.5, dtype="u8")})
    found = compare(graph, pairs, data())
    assert found.layers["h"].sqnr_db > 100 > found.outputs["y"].sqnr_db > 5


def test_models_that_do_not_correspond():
    found = compare(network(), network(name="other"), data(1))
    assert not found.layers
    with pytest.raises(CalibrationError, match="numbers of outputs"):
        compare(network(), network(outputs=2), data(1))
    with pytest.raises(CalibrationError, match="the data is empty"):
        compare(network(), network(), [])


def test_values_that_are_not_finite():
    nan, inf = np.nan, np.inf
    one = Distance().add(np.array([1, nan, inf, inf]), np.array([1, nan, inf, 2]))
    assert (one.nonfinite, one.count, one.sqnr_db) == (1, 1, np.inf)
    assert Distance().add(np.zeros(3), np.ones(3)).sqnr_db == -np.inf
    assert Distance().add(np.zeros(3), np.zeros(3)).cosine == 1


def test_the_compare_command(tmp_path, folder):
    graph = bw.load(demo.model_path())
    entry = CalibrationEntry.per_tensor(1 / 255, dtype="u8")
    insert_q_dq(graph, {"image": entry}).save(tmp_path / "q.onnx")
    text = call("compare", demo.model_path(), tmp_path / "q.onnx", "--data", folder)
    assert "SQNR dB" in text and "logits" in text and "worst batches" in text and "files:" in text
    options = ("--json", "--no-layers", "--subset", 2)
    facts = json.loads(
        call("compare", demo.model_path(), tmp_path / "q.onnx", "--data", folder, *options)
    )
    assert facts["batches"] == 2 and facts["outputs"]["logits"]["cosine"] > 0.999
    assert not facts["layers"] and facts["file_bytes"][0] == demo.model_path().stat().st_size
    error = call("compare", demo.model_path(), "nothing.onnx", "--data", folder, code=2)
    assert "cannot read nothing.onnx" in error


def test_the_calibrate_command(tmp_path, folder):
    stats = tmp_path / "s.stats"
    text = call("calibrate", demo.model_path(), "--data", folder, "-o", stats)
    assert "image" in text and "4 batches" in text
    assert Ranges.load(stats)["image"].maximum == 1
    facts = json.loads(
        call(
            *("calibrate", demo.model_path(), "--data", folder, "-o", stats),
            *("--subset", 1, "--value", "image", "--json"),
        )
    )
    assert facts["batches"] == 1 and [row["value"] for row in facts["values"]] == ["image"]
    for folder_, file in ((tmp_path / "none", stats), (folder, tmp_path / "none" / "s")):
        assert "error" in call(
            "calibrate", demo.model_path(), "--data", folder_, "-o", file, code=2
        )


def test_an_interrupted_command_keeps_its_statistics(tmp_path, folder, monkeypatch):
    read, stats = data_source.read_arrays, tmp_path / "s.stats"

    def interrupted(path, *options):
        if path.name == "2.npz":
            monkeypatch.setattr(data_source, "read_arrays", read)
            os.kill(os.getpid(), signal.SIGINT)
        return read(path, *options)

    monkeypatch.setattr(data_source, "read_arrays", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = "calibrate", demo.model_path(), "--data", folder, "-o", stats
    try:
        assert "(--resume) continues" in call(*command, code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    assert Ranges.load(stats).batches == 3
    call(*command, "--resume")
    assert Ranges.load(stats).batches == 4
